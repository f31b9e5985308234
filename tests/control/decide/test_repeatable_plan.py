"""A decision depends on its inputs alone: decided twice from one snapshot, actions and status are equal.

A plan has at most one action for each group.
"""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.actions import CreateGroup, GroupAction, Plan
from phalanx_operator.decide.state.snapshot import RestartRecord, Snapshot
from phalanx_operator.render.objects import group_names
from tests.control.builders import NOW, make_service, make_snapshot
from tests.control.decide.rollouts import STRATEGIES, Groups, group_lists, small_starts
from tests.control.summaries import fleet_of, group, summary
from tests.examples import examples

FLEET = fleet_of(summary(group("g0"), group("g1")))
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autoscaled": {"autoscaling": {"minReplicas": 1, "maxReplicas": 4, "targets": {"ttftP95Ms": 500}}},
    "rolls back": {"rollout": {"onFailure": "Rollback"}},
    "suspended": {"suspend": True},
}


def make_variant(spec: str, replicas: int, strategy: tuple[int, int]) -> InferenceService:
    """Returns the service with a spec of SPECS and a rollout of STRATEGIES."""
    rollout = {"maxUnavailable": strategy[0], "maxSurge": strategy[1]} | SPECS[spec].get("rollout", {})
    return make_service(**SPECS[spec] | {"replicas": replicas, "rollout": rollout})


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


@settings(deadline=None, max_examples=examples(100))
@given(group_lists, st.sampled_from(sorted(SPECS)), st.integers(0, 5), st.sampled_from(STRATEGIES))
def test_same_snapshot_gives_the_same_plan(groups: Groups, spec: str, replicas: int, strategy: tuple[int, int]) -> None:
    check_repeatable(make_variant(spec, replicas, strategy), groups)


def test_every_small_start_gives_the_same_plan() -> None:
    service = make_service(**SPECS["plain"] | {"replicas": 2})
    for groups in small_starts():
        check_repeatable(service, groups)


def with_due_restarts(groups: Groups, is_recorded: bool) -> Groups:
    """Returns the groups with pods unready for two hours: a restart is due, or recorded and unfinished."""
    due = []
    for observed in groups:
        pods = tuple(replace(pod, uid=f"{pod.name}-uid", unready_since="2026-01-02T01:04:05Z") for pod in observed.pods)
        record = RestartRecord(pods=tuple(pod.uid for pod in pods) if is_recorded else ())
        due.append(replace(observed, pods=pods, restarts=record))
    return tuple(due)


def check_actions_per_group(service: InferenceService, groups: Groups) -> None:
    for is_recorded in (False, True):
        snapshot = make_snapshot(*with_due_restarts(groups, is_recorded), status=Status(update_revision="new"))
        actions = [action for action in decide(service, snapshot).actions if isinstance(action, GroupAction)]
        per_group = Counter(action.uid for action in actions if not isinstance(action, CreateGroup))
        assert set(per_group.values()) <= {1}, actions


@settings(deadline=None, max_examples=examples(100))
@given(group_lists, st.sampled_from(sorted(SPECS)), st.integers(0, 5), st.sampled_from(STRATEGIES))
def test_plan_has_at_most_one_action_per_group(groups: Groups, spec: str, replicas: int, strategy: tuple[int, int]) -> None:
    check_actions_per_group(make_variant(spec, replicas, strategy), groups)


def test_every_small_start_has_one_action_per_group() -> None:
    service = make_service(**SPECS["plain"] | {"replicas": 2})
    for groups in small_starts():
        check_actions_per_group(service, groups)
