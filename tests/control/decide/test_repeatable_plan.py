"""A decision depends on its inputs alone: decided twice from one snapshot, actions and status are equal."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.actions import Plan
from phalanx_operator.decide.state.snapshot import Snapshot
from phalanx_operator.render.objects import group_names
from tests.control.builders import NOW, make_service, make_snapshot
from tests.control.decide.rollouts import STRATEGIES, Groups, group_lists, small_starts
from tests.control.summaries import fleet_of, group, summary

FLEET = fleet_of(summary(group("g0"), group("g1")))
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autoscaled": {"autoscaling": {"minReplicas": 1, "maxReplicas": 4, "targets": {"ttftP95Ms": 500}}},
    "rolls back": {"rollout": {"onFailure": "Rollback"}},
    "suspended": {"suspend": True},
}


def decide(service: InferenceService, snapshot: Snapshot) -> Plan:
    """Returns the plan for a snapshot as an operator without memory decides it."""
    assessed = plan.assess(service, snapshot, FLEET, NOW)
    _, scaling = autoscaler.autoscale(service, assessed, FLEET, AutoscalerState(), NOW, 10.0)
    inputs = PlanInputs(snapshot=assessed, fleet=FLEET, scaling=scaling)
    desired = plan.desired_groups(service, "new", group_names("chat", "uid-1", "new", 20), inputs, NOW)
    decided = plan.decide(service, inputs, desired, NOW)
    assert plan.decide(service, inputs, desired, NOW) == decided
    return decided


def check_repeatable(service: InferenceService, groups: Groups) -> None:
    """Asserts that two decisions are equal and leave the snapshot as it was."""
    snapshot = make_snapshot(*groups, status=Status(current_revision="old", update_revision="new"))
    untouched = copy.deepcopy(snapshot)
    first = decide(service, snapshot)
    assert snapshot == untouched
    assert decide(service, snapshot) == first == decide(service, untouched)


@settings(deadline=None, max_examples=100)
@given(group_lists, st.sampled_from(sorted(SPECS)), st.integers(0, 5), st.sampled_from(STRATEGIES))
def test_same_snapshot_gives_the_same_plan(groups: Groups, spec: str, replicas: int, strategy: tuple[int, int]) -> None:
    rollout = {"maxUnavailable": strategy[0], "maxSurge": strategy[1]} | SPECS[spec].get("rollout", {})
    check_repeatable(make_service(**SPECS[spec] | {"replicas": replicas, "rollout": rollout}), groups)


def test_every_small_start_gives_the_same_plan() -> None:
    service = make_service(**SPECS["plain"] | {"replicas": 2})
    for groups in small_starts():
        check_repeatable(service, groups)
