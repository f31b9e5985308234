"""`Available`: what routers report counts where the control plane reaches neither routers nor groups."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.conditions import Condition, Reason, find_condition
from phalanx_api.spec.inference_service import FieldError
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.conditions.status import rejected_status
from phalanx_operator.decide.groups.lost_nodes import EVIDENCE_S
from phalanx_operator.decide.groups.partition import LONGEST_S
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.state.actions import KeepSharedObjects
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, merge
from phalanx_operator.decide.state.snapshot import NodeCensus, ObservedGroup, ObservedNode, ObservedPod, ObservedRouter, Snapshot
from tests.control.builders import NOW, SETTLED_ROUTER, make_group, make_service, make_snapshot
from tests.control.kstatus import kstatus
from tests.control.summaries import group, summary

UNREADY_ROUTER = ObservedRouter(replicas=1, updated=1, ready=0, is_current=True)
WHY = "2 of 2 nodes of the service became not ready within 120 s"
BY_REPORTS = Condition(type="Available", status="True", reason="NodesSilent", message=WHY, last_transition_time=NOW)
UNANSWERED = Fleet(polled=0, unanswered=1)


def ago(age_s: float) -> str:
    return (datetime.fromisoformat(NOW) - timedelta(seconds=age_s)).isoformat()


def reported(state: str = "fresh", age_s: float = 0.0, names: str = "ab") -> Fleet:
    """Returns the fleet of one router, which reports these groups."""
    return merge([RouterReport("r", age_s, summary(*(group(name, state=state) for name in names)))], 1, 45.0)


def snapshot_of(
    silent_s: tuple[float, ...] = (300.0, 310.0),
    *,
    fleet: Fleet,
    router: ObservedRouter = UNREADY_ROUTER,
    former: Condition | None = None,
    is_evicted: bool = False,
) -> Snapshot:
    """Returns an assessed service of two groups, each on its own node, of which the first are silent for these seconds."""
    nodes = [ObservedNode(f"node-{i}", False, ago(age)) for i, age in enumerate(silent_s)]
    nodes += [ObservedNode(f"node-{i}", True, ago(9e5)) for i in range(len(nodes), 2)]
    groups = [_group_on(name, node, is_evicted=is_evicted) for name, node in zip("ab", nodes, strict=True)]
    status = Status(conditions=(former,) if former else (), available_replicas=2)
    census = NodeCensus(9, tuple(node for node in nodes if not node.ready))
    by_name = {node.name: node for node in nodes}
    observed = make_snapshot(*groups, nodes=by_name, census=census, router=router, status=status)
    return plan.assess(make_service(replicas=2), observed, fleet, NOW)


def _group_on(name: str, node: ObservedNode, *, is_evicted: bool) -> ObservedGroup:
    made = make_group(name, created=ago(9e5), size=1, ready=node.ready)
    since = "" if node.ready else node.since
    pods = (replace(pod, node=node.name, unready_since=since, terminating=is_evicted) for pod in made.pods)
    return replace(made, pods=tuple(pods))


def status_of(snapshot: Snapshot, fleet: Fleet) -> Status:
    service, inputs = make_service(replicas=2), PlanInputs(snapshot=snapshot, fleet=fleet)
    return plan.decide(service, inputs, plan.desired_groups(service, "new", ("s1", "s2"), inputs, NOW), NOW).status


def available(status: Status) -> tuple[str, str]:
    found = find_condition(status.conditions, "Available")
    assert found is not None
    return found.status, found.reason


@pytest.mark.parametrize(
    ("silent_s", "router", "fleet", "expected"),
    [
        ((300, 310), UNREADY_ROUTER, reported(), "True NodesSilent"),
        ((300, 310), UNREADY_ROUTER, reported(names="b"), "True NodesSilent"),
        ((300, 310), UNREADY_ROUTER, reported("dead"), "False NoReadyGroup"),
        ((300, 310), UNREADY_ROUTER, reported(age_s=EVIDENCE_S + 1), "False NoReadyGroup"),
        ((300, 310), UNREADY_ROUTER, reported(names=""), "False NoReadyGroup"),
        ((300, 310), UNREADY_ROUTER, UNANSWERED, "False NoReadyGroup"),
        ((300, 310), SETTLED_ROUTER, reported(), "True Serving"),
        ((LONGEST_S, LONGEST_S + 10), UNREADY_ROUTER, reported(), "True Unreachable"),
        ((LONGEST_S, LONGEST_S + 10), UNREADY_ROUTER, reported("dead"), "False NoReadyGroup"),
        ((300,), UNREADY_ROUTER, reported(), "True Unreachable"),
        ((300,), UNREADY_ROUTER, UNANSWERED, "False RouterNotReady"),
        ((300,), SETTLED_ROUTER, UNANSWERED, "True Serving"),
        ((), UNREADY_ROUTER, Fleet(), "False RouterNotReady"),
    ],
    ids=[
        *("partition", "one group is left", "routers lose the groups", "old report", "no group reported", "no router answers"),
        *("a router elsewhere", "after ten minutes", "lost after ten minutes", "one node and the router", "router lost too"),
        *("one node", "router restarts"),
    ],
)
def test_reports_of_routers_decide_on_silent_nodes(
    silent_s: tuple[float, ...], router: ObservedRouter, fleet: Fleet, expected: str
) -> None:
    status = status_of(snapshot_of(silent_s, fleet=fleet, router=router), fleet)
    assert " ".join(available(status)) == expected


def test_reason_names_the_partition_and_ready_stays_false() -> None:
    """Tools that wait by the rules of kstatus still wait."""
    serving, lost = (status_of(snapshot_of(fleet=fleet), fleet) for fleet in (reported(), reported("dead")))
    found, missing = (find_condition(status.conditions, "Available") for status in (serving, lost))
    assert found is not None and found.message == f"routers answer the operator, and report that groups serve: {WHY}"
    assert missing is not None and missing.message == f"no router reports that a group serves: {WHY}"
    ready = find_condition(serving.conditions, "Ready")
    assert ready is not None and (ready.status, ready.reason) == ("False", "Unreachable")
    conditions = serving.model_dump(by_alias=True)["conditions"]
    body = {"metadata": {"generation": 7}, "status": {"observedGeneration": 7, "conditions": conditions}}
    assert kstatus(body) == "InProgress"
    assert (serving.available_replicas, lost.available_replicas) == (2, 0)


@pytest.mark.parametrize(("former", "expected"), [(BY_REPORTS, ("True", "NodesSilent")), (None, ("False", "RouterNotReady"))])
def test_new_operator_waits_for_answers(former: Condition | None, expected: tuple[str, str]) -> None:
    """Otherwise each restart of the operator would report an outage."""
    is_new = Fleet(polled=1, is_new=True)
    status = status_of(snapshot_of(fleet=is_new, former=former), is_new)
    assert available(status) == expected
    assert available(status_of(snapshot_of(fleet=UNANSWERED, former=former), UNANSWERED)) == ("False", "NoReadyGroup")


@pytest.mark.parametrize(
    ("ready", "fleet", "former", "expected"),
    [
        ("no", reported(), None, True),
        ("no", reported("dead"), None, True),
        ("no yes", reported(), BY_REPORTS, False),
        ("no leaving", reported(), None, True),
        ("leaving no", reported(), None, False),
        ("evicted no", reported(), None, True),
        ("no", UNANSWERED, BY_REPORTS, False),
        ("no", Fleet(polled=1, is_new=True), BY_REPORTS, True),
        ("no", Fleet(polled=1, is_new=True), None, False),
        ("", Fleet(), None, False),
    ],
    ids=[
        *("a router answers", "it has no group", "one is ready", "the ready one terminates", "it terminates"),
        *("it is evicted", "none answers", "new operator", "first operator", "no router"),
    ],
)
def test_service_keeps_unready_routers_that_answer(ready: str, fleet: Fleet, former: Condition | None, expected: bool) -> None:
    """The pods decide: the Deployment may report a ready one late. No signal reaches an evicted one on a silent node."""
    pods = tuple(
        ObservedPod(
            name=str(index),
            index=0,
            owner_uid="d",
            uid="r" if index == 0 else "",
            ready=each in ("yes", "leaving"),
            terminating=each in ("leaving", "evicted"),
            node="node-0" if each == "evicted" else "",
        )
        for index, each in enumerate(ready.split())
    )
    snapshot = replace(snapshot_of(fleet=fleet, former=former), router_pods=pods)
    service, inputs = make_service(replicas=2), PlanInputs(snapshot=snapshot, fleet=fleet)
    decided = plan.decide(service, inputs, plan.desired_groups(service, "new", ("s1", "s2"), inputs, NOW), NOW)
    (kept,) = [action for action in decided.actions if isinstance(action, KeepSharedObjects)]
    assert kept.publishes_unready == expected


@pytest.mark.parametrize(("node", "expected"), [("node-1", ("False", "RouterNotReady")), ("node-0", ("True", "Unreachable"))])
def test_reports_of_leaving_routers_count_on_silent_nodes(node: str, expected: tuple[str, str]) -> None:
    """The only router restarts: it still streams and answers the operator, but refuses new requests."""
    fleet = reported()
    router = ObservedPod(name="r", index=0, owner_uid="d", uid="r", terminating=True, node=node)
    snapshot = replace(snapshot_of((300,), fleet=fleet), router_pods=(router,))
    assert available(status_of(snapshot, fleet)) == expected


def test_evicted_groups_are_not_available() -> None:
    """Routers send them no more requests."""
    fleet = reported()
    assert available(status_of(snapshot_of(fleet=fleet, is_evicted=True), fleet)) == ("False", "NoReadyGroup")


def test_rejected_object_hides_no_evidence() -> None:
    """A quota that is exceeded during a partition ends no stream."""
    fleet = reported()
    errors = [FieldError("spec", "exceeded quota")]
    status = rejected_status(snapshot_of(fleet=fleet), Reason.QUOTA_EXCEEDED, errors, NOW, fleet=fleet, replicas=2)
    assert (available(status), status.available_replicas) == (("True", "NodesSilent"), 2)


states = st.sampled_from(["fresh", "degraded", "suspect", "dead"])


@settings(deadline=None)
@given(states, st.floats(0, 60), st.sampled_from(["", "a", "ab"]), st.lists(st.floats(0, 900), max_size=2), st.booleans())
def test_available_says_what_reports_show(state: str, age_s: float, names: str, silent_s: list[float], has_router: bool) -> None:
    """True with a ready router and a group that is ready or reported in time, or with a report of a group in time."""
    fleet = reported(state, age_s, names)
    router = SETTLED_ROUTER if has_router else UNREADY_ROUTER
    shown = available(status_of(snapshot_of(tuple(silent_s), fleet=fleet, router=router), fleet))
    is_reported = state in ("fresh", "degraded") and age_s <= EVIDENCE_S and bool(names)
    is_serving = len(silent_s) < 2 or is_reported
    assert (shown[0] == "True") is (is_serving if has_router else is_reported)
    assert (shown[1] == "Serving") is (shown[0] == "True" and has_router)
