"""Status and conditions from what is seen."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.conditions import Condition, Reason, find_condition
from phalanx_api.spec.inference_service import FieldError
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.conditions.status import refused, status
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.state.actions import CreateGroup, InitReplicas, KeepChildren
from phalanx_operator.decide.state.fleet import Fleet, GroupLoadView
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedPod, ObservedRouter, Snapshot
from tests.control.builders import NOW, SETTLED_ROUTER, make_desired, make_group, make_service, make_snapshot

NO_ROUTER = ObservedRouter(wanted=1, updated=1, ready=0, current=True)


def verdicts(found: Status) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in found.conditions}


def troubled(name: str, reason: str) -> ObservedGroup:
    pod = ObservedPod(name=f"{name}-0", index=0, owner_uid=f"uid-{name}", reason=reason, message="because")
    return replace(make_group(name, ready=False), pods=(pod,))


ON, OFF = "True/Serving", "False/NoReadyGroup"
BEHIND = "False/RouterNotReady"


@pytest.mark.parametrize(
    ("snapshot", "replicas", "suspended", "ready", "available", "progressing"),
    [
        pytest.param(make_snapshot(make_group("a")), 1, False, "True/Ready", ON, "Complete", id="at rest"),
        pytest.param(make_snapshot(make_group("a"), router=NO_ROUTER), 1, False, BEHIND, BEHIND, "Complete", id="router down"),
        pytest.param(make_snapshot(make_group("a"), router=None), 1, False, BEHIND, BEHIND, "Complete", id="no router"),
        pytest.param(make_snapshot(), 1, False, "False/GroupsNotReady", OFF, "Scaling", id="nothing there"),
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
        pytest.param(make_snapshot(troubled("a", "ErrImagePull")), 1, False, "False/ImagePullFailed", OFF, "Scaling", id="image"),
        pytest.param(make_snapshot(troubled("a", "CrashLoopBackOff")), 1, False, "False/PodFailing", OFF, "Scaling", id="crash"),
        pytest.param(
            make_snapshot(troubled("a", "Unschedulable")), 1, False, "False/InsufficientCapacity", OFF, "Scaling", id="capacity"
        ),
    ],
)
def test_conditions(snapshot: Snapshot, replicas: int, suspended: bool, ready: str, available: str, progressing: str) -> None:
    found = verdicts(status(snapshot, make_desired(replicas), suspended=suspended, now=NOW))
    shown = {kind: "/".join(verdict) for kind, verdict in found.items()}
    moving = {} if progressing == "Complete" else {"Reconciling": f"True/{progressing}"}
    router = {"RouterReady": "True/Ready" if snapshot.router == SETTLED_ROUTER else BEHIND}
    assert shown == {"Ready": ready, "Available": available, "Progressing": f"True/{progressing}"} | moving | router


def test_service_without_groups_reports_held_requests() -> None:
    found = verdicts(status(make_snapshot(), make_desired(0, holds=True), suspended=False, now=NOW))
    assert (found["Available"], found["Ready"]) == (("False", "Holding"), ("True", "ScaledToZero"))
    behind = verdicts(status(make_snapshot(router=NO_ROUTER), make_desired(0, holds=True), suspended=False, now=NOW))
    assert behind["Available"] == ("False", "NoReadyGroup"), "nobody is there to hold them"
    starting = verdicts(status(make_snapshot(), make_desired(1, holds=True), suspended=False, now=NOW))
    assert starting["Available"] == ("False", "NoReadyGroup")


def test_reconciling_is_there_only_while_groups_move() -> None:
    moving = status(make_snapshot(make_group("a", "old")), make_desired(1), suspended=False, now=NOW)
    assert verdicts(moving)["Reconciling"] == ("True", "Rolling")
    late = status(make_snapshot(make_group("a", "old"), status=moving), make_desired(1, late="x"), suspended=False, now=NOW)
    assert "Reconciling" not in verdicts(late), "it is stalled"
    rest = status(make_snapshot(make_group("a"), status=moving), make_desired(1), suspended=False, now=NOW)
    assert "Reconciling" not in verdicts(rest)


def known(*names: str, linked: bool = True) -> dict[str, GroupLoadView]:
    """Groups as routers see them."""
    return {
        name: GroupLoadView(
            name=name,
            fresh=True,
            streams=0,
            running=0,
            waiting=0,
            pressure=0.0,
            backlog_s=0.0,
            itl_s=0.0,
            speed=1.0,
            capacity=1,
            model=None,
            linked=linked,
        )
        for name in names
    }


@pytest.mark.parametrize(
    ("fleet", "former", "available"),
    [
        (Fleet(asked=1, answered=1, groups=known("a", "b", "c", "d")), 0, 1),
        (Fleet(asked=1, answered=1, groups=known("b")), 1, 0),
        (Fleet(asked=1, answered=1, groups=known("a", linked=False)), 1, 0),
        (Fleet(), 1, 0),
        (Fleet(asked=1), 1, 1),
        (Fleet(asked=1), 3, 1),
        (Fleet(asked=1), 0, 0),
    ],
    ids=["linked", "unknown to routers", "lost", "no router", "silent", "silent, fewer are ready", "silent from the start"],
)
def test_available_groups_are_ready_stable_and_linked(fleet: Fleet, former: int, available: int) -> None:
    leaving = make_group("c", draining=DrainMark("t", "why"))
    groups = (make_group("a"), make_group("b", ready=False), leaving, make_group("d", terminating=True))
    seen = make_snapshot(*groups, status=Status(available_replicas=former))
    found = status(seen, make_desired(2), fleet, suspended=False, now=NOW)
    assert (found.available_replicas, found.ready_replicas) == (available, 1)


def test_crash_looping_container_is_reported_with_its_message() -> None:
    pod = ObservedPod(
        name="a-0", index=0, owner_uid="uid-a", node="n", reason="CrashLoopBackOff", message="MODEL /x: no such file or folder"
    )
    seen = make_snapshot(replace(make_group("a", ready=False), pods=(pod,)))
    found = status(seen, make_desired(1), suspended=False, now=NOW)
    ready = find_condition(found.conditions, "Ready")
    assert ready and ready.message == "pod a-0: CrashLoopBackOff: MODEL /x: no such file or folder"
    assert found.groups[0].reason == "CrashLoopBackOff: MODEL /x: no such file or folder"


def test_the_message_names_the_pod_and_its_trouble() -> None:
    found = status(make_snapshot(troubled("a", "ErrImagePull")), make_desired(1), suspended=False, now=NOW)
    ready = find_condition(found.conditions, "Ready")
    assert ready and ready.message == "pod a-0: ErrImagePull: because"


def test_a_router_that_cannot_start_is_named_too() -> None:
    pod = ObservedPod(name="chat-router-x", index=0, owner_uid="rs", reason="ImagePullBackOff", message="no such image")
    seen = make_snapshot(make_group("a"), router=NO_ROUTER, router_pods=(pod,))
    assert verdicts(status(seen, make_desired(1), suspended=False, now=NOW))["Ready"] == ("False", "ImagePullFailed")


def test_counters_count_groups_that_are_not_being_deleted() -> None:
    groups = (make_group("a"), make_group("b", "old"), make_group("c", ready=False), make_group("d", terminating=True))
    found = status(make_snapshot(*groups), make_desired(3), suspended=False, now=NOW)
    assert (found.replicas, found.ready_replicas, found.updated_replicas) == (3, 2, 2)
    assert found.selector == "phalanx.dev/service=chat,apps.kubernetes.io/pod-index=0"
    assert found.url == "http://chat.team.svc"
    assert found.observed_generation == 7


def test_groups_are_listed_worst_first_up_to_64() -> None:
    groups = [make_group(f"g{i:02}", size=1) for i in range(70)] + [make_group("z", ready=False, size=1)]
    listed = status(make_snapshot(*groups), make_desired(71), suspended=False, now=NOW).groups
    assert (len(listed), listed[0].name, listed[0].phase, listed[1].phase) == (64, "z", "Starting", "Ready")
    assert listed[1].nodes == ("node-0",)


def test_the_current_revision_follows_when_the_rollout_is_done() -> None:
    seen = make_snapshot(make_group("a", "old"), status=Status(current_revision="old"))
    rolling = status(seen, make_desired(1), suspended=False, now=NOW)
    done = status(make_snapshot(make_group("a"), status=rolling), make_desired(1), suspended=False, now=NOW)
    assert [(s.current_revision, s.update_revision) for s in (rolling, done)] == [("old", "new"), ("new", "new")]


def test_unchanged_observation_gives_an_equal_status() -> None:
    first = status(make_snapshot(make_group("a")), make_desired(1), suspended=False, now=NOW)
    again = status(make_snapshot(make_group("a"), status=first), make_desired(1), suspended=False, now="2027-01-01T00:00:00Z")
    assert again == first


def test_invalid_spec_stalls_and_names_its_fields() -> None:
    seen = make_snapshot(make_group("a"))
    found = refused(seen, Reason.SPEC_INVALID, [FieldError("spec.model.uri", "no")], NOW)
    assert verdicts(found) == {
        "Ready": ("False", "SpecInvalid"),
        "Progressing": ("False", "SpecInvalid"),
        "Stalled": ("True", "SpecInvalid"),
        "Available": ("True", "Serving"),
        "RouterReady": ("True", "Ready"),
    }
    assert find_condition(found.conditions, "Ready") == Condition(
        type="Ready",
        status="False",
        observed_generation=7,
        last_transition_time=NOW,
        reason="SpecInvalid",
        message="spec.model.uri: no",
    )
    mended = status(make_snapshot(make_group("a"), status=found), make_desired(1), suspended=False, now=NOW)
    assert "Stalled" not in verdicts(mended)


@pytest.mark.parametrize(
    ("router", "verdict", "words"),
    [
        (NO_ROUTER, "RouterNotReady", "0 of 1 routers are ready"),
        (None, "RouterNotReady", "0 of 1"),
        (SETTLED_ROUTER, "Ready", ""),
    ],
    ids=["down", "gone", "there"],
)
def test_a_spec_that_cannot_be_followed_hides_no_loss(router: ObservedRouter | None, verdict: str, words: str) -> None:
    """Of groups and routers that fail meanwhile."""
    groups = [make_group(name) for name in ("a", "b", "c")]
    whole = status(make_snapshot(*groups), make_desired(3), Fleet(asked=1), suspended=False, now=NOW)
    whole = whole.model_copy(update={"available_replicas": 3})
    seen = make_snapshot(make_group("a"), make_group("b", ready=False), router=router, status=whole)
    found = refused(seen, Reason.SPEC_INVALID, [FieldError("spec", "no")], NOW)
    assert (found.replicas, found.ready_replicas, found.available_replicas) == (2, 1, 1)
    assert verdicts(found)["RouterReady"] == (str(router == SETTLED_ROUTER), verdict)
    said = find_condition(found.conditions, "RouterReady")
    assert said and words in said.message
    few = refused(make_snapshot(*groups, status=Status(available_replicas=1)), Reason.REJECTED, [FieldError("spec", "no")], NOW)
    assert few.available_replicas == 1, "routers knew no more of them"


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [({"replicas": 3}, 3), ({"replicas": None}, 1), ({"replicas": 0}, 0), ({"replicas": 3, "suspend": True}, 0)],
)
def test_wanted_groups_table(spec: dict[str, Any], replicas: int) -> None:
    assert plan.wanted_replicas(make_service(**spec)) == replicas


def test_a_plan_has_the_shared_children_before_the_groups() -> None:
    made = plan.decide(
        make_service(replicas=None), PlanInputs(snapshot=make_snapshot(has_replicas=False), fleet=Fleet()), make_desired(1), NOW
    )
    assert [type(action) for action in made.actions] == [InitReplicas, KeepChildren, CreateGroup]


def test_a_service_at_rest_needs_nothing_but_its_children() -> None:
    seen = PlanInputs(snapshot=make_snapshot(make_group("a"), router=SETTLED_ROUTER), fleet=Fleet())
    made = plan.decide(make_service(), seen, make_desired(1), NOW)
    assert [type(action) for action in made.actions] == [KeepChildren]


def test_ready_counts_the_requested_routers() -> None:
    found = status(make_snapshot(make_group("a")), make_desired(1, routers=3), suspended=False, now=NOW)
    assert verdicts(found)["Ready"] == ("False", "RouterNotReady")


def test_a_group_without_its_pods_is_named() -> None:
    seen = make_snapshot(replace(make_group("a", ready=False), pods=()))
    ready = find_condition(status(seen, make_desired(1), suspended=False, now=NOW).conditions, "Ready")
    assert ready is not None
    assert "a has 0 of 2 pods" in ready.message
