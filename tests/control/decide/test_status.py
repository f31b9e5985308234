"""Status and conditions of a snapshot."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.conditions import Condition, Reason, find_condition
from phalanx_api.spec.inference_service import FieldError
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.conditions.status import rejected_status, service_status
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.state.actions import CreateGroup, InitReplicas, KeepSharedObjects
from phalanx_operator.decide.state.fleet import Fleet, GroupReport
from phalanx_operator.decide.state.snapshot import (
    DrainMark,
    ObservedGroup,
    ObservedPod,
    ObservedRouter,
    Snapshot,
    with_assessment,
)
from tests.control.builders import NOW, SETTLED_ROUTER, make_desired, make_group, make_report, make_service, make_snapshot

NO_ROUTER = ObservedRouter(replicas=1, updated=1, ready=0, is_current=True)


def verdicts(status: Status) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in status.conditions}


def make_failing(name: str, reason: str) -> ObservedGroup:
    pod = ObservedPod(name=f"{name}-0", index=0, owner_uid=f"uid-{name}", reason=reason, message="because")
    return replace(make_group(name, ready=False), pods=(pod,))


ON, OFF = "True/Serving", "False/NoReadyGroup"
NOT_READY = "False/RouterNotReady"


@pytest.mark.parametrize(
    ("snapshot", "replicas", "suspended", "ready", "available", "progressing"),
    [
        pytest.param(make_snapshot(make_group("a")), 1, False, "True/Ready", ON, "Complete", id="settled"),
        pytest.param(
            make_snapshot(make_group("a"), router=NO_ROUTER), 1, False, NOT_READY, NOT_READY, "Complete", id="router down"
        ),
        pytest.param(make_snapshot(make_group("a"), router=None), 1, False, NOT_READY, NOT_READY, "Complete", id="no router"),
        pytest.param(make_snapshot(), 1, False, "False/GroupsNotReady", OFF, "Scaling", id="no group"),
        pytest.param(
            make_snapshot(make_group("a"), make_group("b", ready=False)),
            *(2, False, "False/GroupsNotReady", ON, "Scaling"),
            id="one starts",
        ),
        pytest.param(make_snapshot(make_group("a", "old")), 1, False, "False/RollingOut", ON, "Rolling", id="rolling"),
        pytest.param(make_snapshot(), 0, False, "True/ScaledToZero", OFF, "Complete", id="zero"),
        pytest.param(make_snapshot(), 0, True, "True/Suspended", OFF, "Complete", id="suspended"),
        pytest.param(
            make_snapshot(make_group("a", terminating=True)), 0, True, "True/Suspended", OFF, "Complete", id="terminating"
        ),
        pytest.param(
            make_snapshot(make_failing("a", "ErrImagePull")), 1, False, "False/ImagePullFailed", OFF, "Scaling", id="image"
        ),
        pytest.param(
            make_snapshot(make_failing("a", "CrashLoopBackOff")), 1, False, "False/PodFailing", OFF, "Scaling", id="crash"
        ),
        pytest.param(
            make_snapshot(make_failing("a", "Unschedulable")),
            1,
            False,
            "False/InsufficientCapacity",
            OFF,
            "Scaling",
            id="capacity",
        ),
    ],
)
def test_conditions(snapshot: Snapshot, replicas: int, suspended: bool, ready: str, available: str, progressing: str) -> None:
    found = verdicts(service_status(snapshot, make_desired(replicas), suspended=suspended, now=NOW))
    shown = {kind: "/".join(verdict) for kind, verdict in found.items()}
    reconciling = {} if progressing == "Complete" else {"Reconciling": f"True/{progressing}"}
    router = {"RouterReady": "True/Ready" if snapshot.router == SETTLED_ROUTER else NOT_READY}
    assert shown == {"Ready": ready, "Available": available, "Progressing": f"True/{progressing}"} | reconciling | router


def test_service_without_groups_reports_held_requests() -> None:
    found = verdicts(service_status(make_snapshot(), make_desired(0, holds_requests=True), suspended=False, now=NOW))
    assert (found["Available"], found["Ready"]) == (("False", "Holding"), ("True", "ScaledToZero"))
    without_router = verdicts(
        service_status(make_snapshot(router=NO_ROUTER), make_desired(0, holds_requests=True), suspended=False, now=NOW)
    )
    assert without_router["Available"] == ("False", "NoReadyGroup"), "no router holds them"
    starting = verdicts(service_status(make_snapshot(), make_desired(1, holds_requests=True), suspended=False, now=NOW))
    assert starting["Available"] == ("False", "NoReadyGroup")


def test_reconciling_exists_only_while_groups_change() -> None:
    rolling = service_status(make_snapshot(make_group("a", "old")), make_desired(1), suspended=False, now=NOW)
    assert verdicts(rolling)["Reconciling"] == ("True", "Rolling")
    late = service_status(
        make_snapshot(make_group("a", "old"), status=rolling), make_desired(1, late_reason="x"), suspended=False, now=NOW
    )
    assert "Reconciling" not in verdicts(late), "it is stalled"
    rest = service_status(make_snapshot(make_group("a"), status=rolling), make_desired(1), suspended=False, now=NOW)
    assert "Reconciling" not in verdicts(rest)


def reported(*names: str, is_linked: bool = True) -> dict[str, GroupReport]:
    """Returns groups as routers report them."""
    return {name: make_report(name, is_linked=is_linked, is_fresh=True) for name in names}


@pytest.mark.parametrize(
    ("fleet", "former", "available"),
    [
        (Fleet(polled=1, answered=1, groups=reported("a", "b", "c", "d")), 0, 1),
        (Fleet(polled=1, answered=1, groups=reported("b")), 1, 0),
        (Fleet(polled=1, answered=1, groups=reported("a", is_linked=False)), 1, 0),
        (Fleet(), 1, 0),
        (Fleet(polled=1), 1, 1),
        (Fleet(polled=1), 3, 1),
        (Fleet(polled=1), 0, 0),
    ],
    ids=["linked", "unknown to routers", "lost", "no router", "silent", "silent, fewer are ready", "silent from the start"],
)
def test_available_groups_are_ready_stable_and_linked(fleet: Fleet, former: int, available: int) -> None:
    draining = make_group("c", draining=DrainMark("t", "why"))
    groups = (make_group("a"), make_group("b", ready=False), draining, make_group("d", terminating=True))
    snapshot = make_snapshot(*groups, status=Status(available_replicas=former))
    status = service_status(snapshot, make_desired(2), fleet, suspended=False, now=NOW)
    assert (status.available_replicas, status.ready_replicas) == (available, 1)


@pytest.mark.parametrize(
    ("groups", "spec", "hold_reason", "allowed"),
    [
        ([make_group("a", "old"), make_group("b", "old")], {"max_unavailable": 1, "max_surge": 1}, "", 0),
        ([with_assessment(make_group("a"), kept_reason="silent"), make_group("b")], {"max_unavailable": 1}, "", 0),
        ([], {"max_unavailable": 1}, "", 0),
        ([make_group("a"), make_group("b")], {"max_unavailable": 1}, "", 1),
        ([make_group("a"), make_group("b", ready=False)], {"max_unavailable": 1}, "", 0),
        ([make_group("a"), make_group("b", draining=DrainMark(NOW, "asked"))], {"max_unavailable": 1}, "", 0),
        ([make_group("a"), make_group("b"), make_group("c")], {"max_unavailable": 0, "max_surge": 1}, "", 1),
        ([make_group("a"), make_group("b")], {"max_unavailable": 0, "max_surge": 1}, "", 0),
        ([make_group("a"), make_group("b")], {"max_unavailable": 1}, "the API server's clock changed", 0),
    ],
)
def test_allowed_disruptions_count_all_causes(
    groups: list[ObservedGroup], spec: dict[str, Any], hold_reason: str, allowed: int
) -> None:
    desired = make_desired(2, hold_reason=hold_reason, **spec)
    assert service_status(make_snapshot(*groups), desired, Fleet(), suspended=False, now=NOW).disruptions_allowed == allowed


def test_crash_looping_container_is_reported_with_its_message() -> None:
    pod = ObservedPod(
        name="a-0", index=0, owner_uid="uid-a", node="n", reason="CrashLoopBackOff", message="MODEL /x: no such file or folder"
    )
    snapshot = make_snapshot(replace(make_group("a", ready=False), pods=(pod,)))
    status = service_status(snapshot, make_desired(1), suspended=False, now=NOW)
    ready = find_condition(status.conditions, "Ready")
    assert ready and ready.message == "pod a-0: CrashLoopBackOff: MODEL /x: no such file or folder"
    assert status.groups[0].reason == "CrashLoopBackOff: MODEL /x: no such file or folder"


def test_the_message_names_the_pod_and_its_failure() -> None:
    status = service_status(make_snapshot(make_failing("a", "ErrImagePull")), make_desired(1), suspended=False, now=NOW)
    ready = find_condition(status.conditions, "Ready")
    assert ready and ready.message == "pod a-0: ErrImagePull: because"


def test_a_router_that_cannot_start_is_named_too() -> None:
    pod = ObservedPod(name="chat-router-x", index=0, owner_uid="rs", reason="ImagePullBackOff", message="no such image")
    snapshot = make_snapshot(make_group("a"), router=NO_ROUTER, router_pods=(pod,))
    assert verdicts(service_status(snapshot, make_desired(1), suspended=False, now=NOW))["Ready"] == ("False", "ImagePullFailed")


def test_counters_count_groups_that_are_not_being_deleted() -> None:
    groups = (make_group("a"), make_group("b", "old"), make_group("c", ready=False), make_group("d", terminating=True))
    status = service_status(make_snapshot(*groups), make_desired(3), suspended=False, now=NOW)
    assert (status.replicas, status.ready_replicas, status.updated_replicas) == (3, 2, 2)
    assert status.selector == "phalanx.dev/service=chat,apps.kubernetes.io/pod-index=0"
    assert status.url == "http://chat.team.svc"
    assert status.observed_generation == 7


def test_groups_are_listed_worst_first_up_to_64() -> None:
    groups = [make_group(f"g{i:02}", size=1) for i in range(70)] + [make_group("z", ready=False, size=1)]
    listed = service_status(make_snapshot(*groups), make_desired(71), suspended=False, now=NOW).groups
    assert (len(listed), listed[0].name, listed[0].phase, listed[1].phase) == (64, "z", "Starting", "Ready")
    assert listed[1].nodes == ("node-0",)


def test_the_current_revision_follows_when_the_rollout_is_done() -> None:
    snapshot = make_snapshot(make_group("a", "old"), status=Status(current_revision="old"))
    rolling = service_status(snapshot, make_desired(1), suspended=False, now=NOW)
    done = service_status(make_snapshot(make_group("a"), status=rolling), make_desired(1), suspended=False, now=NOW)
    assert [(s.current_revision, s.update_revision) for s in (rolling, done)] == [("old", "new"), ("new", "new")]


def test_unchanged_observation_gives_an_equal_status() -> None:
    first = service_status(make_snapshot(make_group("a")), make_desired(1), suspended=False, now=NOW)
    again = service_status(
        make_snapshot(make_group("a"), status=first), make_desired(1), suspended=False, now="2027-01-01T00:00:00Z"
    )
    assert again == first


def test_invalid_spec_stalls_and_names_its_fields() -> None:
    snapshot = make_snapshot(make_group("a"))
    status = rejected_status(snapshot, Reason.SPEC_INVALID, [FieldError("spec.model.uri", "no")], NOW)
    assert verdicts(status) == {
        "Ready": ("False", "SpecInvalid"),
        "Progressing": ("False", "SpecInvalid"),
        "Stalled": ("True", "SpecInvalid"),
        "Available": ("True", "Serving"),
        "RouterReady": ("True", "Ready"),
    }
    assert find_condition(status.conditions, "Ready") == Condition(
        type="Ready",
        status="False",
        observed_generation=7,
        last_transition_time=NOW,
        reason="SpecInvalid",
        message="spec.model.uri: no",
    )
    valid = service_status(make_snapshot(make_group("a"), status=status), make_desired(1), suspended=False, now=NOW)
    assert "Stalled" not in verdicts(valid)


@pytest.mark.parametrize(
    ("router", "verdict", "message"),
    [
        (NO_ROUTER, "RouterNotReady", "0 of 1 routers are ready"),
        (None, "RouterNotReady", "0 of 1"),
        (SETTLED_ROUTER, "Ready", ""),
    ],
    ids=["down", "absent", "ready"],
)
def test_invalid_spec_hides_no_failures(router: ObservedRouter | None, verdict: str, message: str) -> None:
    """Groups and routers that fail are still reported."""
    groups = [make_group(name) for name in ("a", "b", "c")]
    whole = service_status(make_snapshot(*groups), make_desired(3), Fleet(polled=1), suspended=False, now=NOW)
    whole = whole.model_copy(update={"available_replicas": 3})
    snapshot = make_snapshot(make_group("a"), make_group("b", ready=False), router=router, status=whole)
    status = rejected_status(snapshot, Reason.SPEC_INVALID, [FieldError("spec", "no")], NOW)
    assert (status.replicas, status.ready_replicas, status.available_replicas) == (2, 1, 1)
    assert verdicts(status)["RouterReady"] == (str(router == SETTLED_ROUTER), verdict)
    condition = find_condition(status.conditions, "RouterReady")
    assert condition and message in condition.message
    few = rejected_status(
        make_snapshot(*groups, status=Status(available_replicas=1)), Reason.REJECTED, [FieldError("spec", "no")], NOW
    )
    assert few.available_replicas == 1, "routers reported no more"


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [({"replicas": 3}, 3), ({"replicas": None}, 1), ({"replicas": 0}, 0), ({"replicas": 3, "suspend": True}, 0)],
)
def test_wanted_groups_table(spec: dict[str, Any], replicas: int) -> None:
    assert plan.wanted_replicas(make_service(**spec)) == replicas


def test_plan_keeps_shared_objects_before_groups() -> None:
    decided = plan.decide(
        make_service(replicas=None), PlanInputs(snapshot=make_snapshot(has_replicas=False), fleet=Fleet()), make_desired(1), NOW
    )
    assert [type(action) for action in decided.actions] == [InitReplicas, KeepSharedObjects, CreateGroup]


def test_settled_service_needs_only_its_shared_objects() -> None:
    inputs = PlanInputs(snapshot=make_snapshot(make_group("a"), router=SETTLED_ROUTER), fleet=Fleet())
    decided = plan.decide(make_service(), inputs, make_desired(1), NOW)
    assert [type(action) for action in decided.actions] == [KeepSharedObjects]


def test_ready_counts_the_requested_routers() -> None:
    status = service_status(make_snapshot(make_group("a")), make_desired(1, routers=3), suspended=False, now=NOW)
    assert verdicts(status)["Ready"] == ("False", "RouterNotReady")


def test_a_group_without_its_pods_is_named() -> None:
    snapshot = make_snapshot(replace(make_group("a", ready=False), pods=()))
    ready = find_condition(service_status(snapshot, make_desired(1), suspended=False, now=NOW).conditions, "Ready")
    assert ready is not None
    assert "a has 0 of 2 pods" in ready.message
