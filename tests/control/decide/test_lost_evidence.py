"""Evidence about groups on silent nodes that is missing for a while: routers that have just started, kubelets that are late."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from phalanx_api.conditions import Condition
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.groups.lost_nodes import FIRST_REPORTS_S, RETURN_S, is_on_silent_node
from phalanx_operator.decide.groups.partition import LONGEST_S
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.state.actions import Action, CreateGroup, DeleteGroup, DeletePod, DrainGroup, RestartGroup
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, merge
from phalanx_operator.decide.state.snapshot import DrainMark, NodeCensus, ObservedGroup, ObservedNode, ObservedPod, ObservedRouter
from phalanx_operator.observe.observe import read_pod
from tests.control.builders import NOW, make_group, make_service, make_snapshot
from tests.control.summaries import fleet_of, group, summary

ENDS = DeleteGroup | DeletePod | RestartGroup | DrainGroup
PARTITIONED = (Condition(type="ControlPlanePartitioned", status="True", reason="NodesSilent", last_transition_time=NOW),)
UNREADY = ObservedRouter(replicas=1, updated=1, ready=0, is_current=True)


def ago(age_s: float) -> str:
    return (datetime.fromisoformat(NOW) - timedelta(seconds=age_s)).isoformat()


def router(ready_s: float | None = None, *, unready_s: float = 9e5, uid: str = "r0", node: str = "node-1") -> ObservedPod:
    """Returns a router that has been ready, or unready, for these seconds."""
    pod = ObservedPod(name=uid, index=0, owner_uid="d", uid=uid, ip="10.0.0.9", created=ago(9e5), node=node)
    return replace(pod, unready_since=ago(unready_s)) if ready_s is None else replace(pod, ready=True, ready_since=ago(ready_s))


def answers(*uids: str, state: str = "dead") -> Fleet:
    """Returns the fleet of routers with this state of group `a`."""
    return merge([RouterReport(uid, 0.0, summary(group("a", state=state))) for uid in uids], len(uids), 45.0)


def actions_of(
    routers: tuple[ObservedPod, ...], fleet: Fleet, silent_s: float = 300.0, *, has_served: bool = True
) -> tuple[Action, ...]:
    """Returns the decision about a group on a silent node, which was ready before; the other node is ready."""
    nodes = {"node-0": ObservedNode("node-0", False, ago(silent_s)), "node-1": ObservedNode("node-1", True, ago(9e5))}
    made = make_group("a", size=1, created=ago(9e5), ready=False)
    pods = tuple(replace(pod, uid="pod", unready_since=ago(silent_s), is_unreported=has_served) for pod in made.pods)
    snapshot = make_snapshot(
        replace(made, pods=pods), nodes=nodes, router=UNREADY, router_pods=routers, census=NodeCensus(9, (nodes["node-0"],))
    )
    service = make_service(replicas=1)
    snapshot = plan.assess(service, snapshot, fleet, NOW)
    inputs = PlanInputs(snapshot=snapshot, fleet=fleet)
    return plan.decide(service, inputs, plan.desired_groups(service, "new", ("s1",), inputs, NOW), NOW).actions


def ended(actions: tuple[Action, ...]) -> list[Action]:
    return [action for action in actions if isinstance(action, ENDS)]


@pytest.mark.parametrize(
    ("routers", "fleet", "kept"),
    [
        ((router(1),), answers("r0"), True),
        ((router(FIRST_REPORTS_S + 1),), answers("r0"), False),
        ((router(-1),), answers("r0"), True),
        ((router(1), router(9e5, uid="r1")), answers("r0", "r1"), False),
        ((router(1), router(9e5, uid="r1")), answers("r0"), True),
        ((router(1), router(uid="r1", node="node-0")), answers("r0", "r1"), False),
        ((router(unready_s=5),), Fleet(), True),
        ((router(unready_s=119),), Fleet(), True),
        ((router(unready_s=121),), Fleet(), False),
        ((router(unready_s=5, node="node-0"),), Fleet(unanswered=1), False),
        ((replace(router(unready_s=5), terminating=True),), Fleet(), False),
        ((router(1),), Fleet(polled=1), True),
        ((router(FIRST_REPORTS_S + 1),), Fleet(polled=1), False),
        ((), Fleet(), False),
        ((router(1),), answers("r0", state="fresh"), True),
    ],
    ids=[
        *("just ready", "had time to link", "another clock", "an old one answers too", "the old one is silent"),
        *("an old one on the silent node answers", "restarts", "restarts slowly", "does not start", "unready with its node"),
        *("leaves", "just ready and silent", "silent", "no router", "reports it"),
    ],
)
def test_young_routers_are_no_evidence_of_death(routers: tuple[ObservedPod, ...], fleet: Fleet, kept: bool) -> None:
    """They have yet to link to the group: one router that restarts beside one silent node ends no group."""
    assert (ended(actions_of(routers, fleet)) == []) is kept


def test_unready_groups_wait_for_no_router() -> None:
    """Its kubelet reported it as unready: nothing says that it serves."""
    assert ended(actions_of((router(1),), answers("r0"), has_served=False)) != []


def test_young_router_starts_no_successor() -> None:
    """A group without evidence is neither unreachable nor replaced until the router had time."""
    assert [action for action in actions_of((router(1),), answers("r0")) if isinstance(action, CreateGroup)] == []


def conditions(ready: bool, *, containers: str = "True", reason: str = "") -> dict[str, Any]:
    """Returns a pod as its kubelet or the node controller reports it. The latter changes the status of Ready alone."""
    shown = [
        {"type": "Ready", "status": str(ready), "lastTransitionTime": ago(400)} | ({"reason": reason} if reason else {}),
        {"type": "ContainersReady", "status": containers},
    ]
    return {"metadata": {"name": "a-0"}, "status": {"conditions": shown}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (conditions(False), True),
        (conditions(True), False),
        (conditions(False, containers="False", reason="ContainersNotReady"), False),
        (conditions(False, reason="ReadinessGatesNotReady"), False),
        ({"metadata": {"name": "a-0"}, "status": {}}, False),
    ],
    ids=["node controller", "ready", "kubelet", "gates", "new"],
)
def test_who_reported_a_pod_as_unready(body: dict[str, Any], expected: bool) -> None:
    assert read_pod(body).is_unreported is expected


@pytest.mark.parametrize(
    ("age_s", "is_unreported", "silent"),
    [(RETURN_S - 1, False, True), (RETURN_S, False, False), (RETURN_S, True, True), (LONGEST_S, True, False)],
)
def test_return_lasts_until_the_kubelet_reports(age_s: float, is_unreported: bool, silent: bool) -> None:
    node = ObservedNode("node-0", True, ago(age_s))
    pod = replace(make_group("a", ready=False, size=1).pods[0], unready_since=ago(age_s + 300), is_unreported=is_unreported)
    assert is_on_silent_node(pod, {"node-0": node}, NOW) is silent
    assert not is_on_silent_node(replace(pod, unready_since=ago(age_s - 1)), {"node-0": node}, NOW)


def healed(age_s: float, fleet: Fleet, *, was_partitioned: bool = True, **fields: Any) -> list[Action]:
    """Returns what ends on two nodes that are ready again for these seconds, and whose kubelets have yet to report."""
    nodes = {f"node-{i}": ObservedNode(f"node-{i}", True, ago(age_s)) for i in range(2)}
    groups: list[ObservedGroup] = []
    for name, node in zip("ab", nodes, strict=True):
        made = make_group(name, size=1, created=ago(9e6), ready=False, **fields)
        pod = replace(made.pods[0], node=node, uid=f"uid-{name}", unready_since=ago(age_s + 4000), is_unreported=True)
        groups.append(replace(made, pods=(pod,)))
    status = Status(conditions=PARTITIONED if was_partitioned else ())
    service = make_service(replicas=2)
    snapshot = plan.assess(service, make_snapshot(*groups, nodes=nodes, status=status), fleet, NOW)
    inputs = PlanInputs(snapshot=snapshot, fleet=fleet)
    decided = plan.decide(service, inputs, plan.desired_groups(service, "new", ("s1", "s2"), inputs, NOW), NOW)
    assert decided.requeue_s <= LONGEST_S - age_s or age_s > LONGEST_S
    return ended(decided.actions)


FIELDS = pytest.mark.parametrize(
    "fields", [{}, {"revision": "old"}, {"draining": DrainMark(NOW, "surplus")}], ids=["late", "old", "draining"]
)


@FIELDS
def test_late_kubelets_end_no_group_after_a_partition(fields: dict[str, Any]) -> None:
    """It took 60 s at most before; a kubelet may wait longer between two tries."""
    silent = fleet_of(summary(group("a", state="dead"), group("b", state="dead")))
    assert healed(RETURN_S + 100, silent, **fields) == []
    assert healed(LONGEST_S + 1, silent, **fields) != [], "what routers report decides at last"
    reported = fleet_of(summary(group("a"), group("b")))
    assert [action for action in healed(9e5, reported, **fields) if not isinstance(action, DrainGroup)] == []
    alone = healed(RETURN_S + 100, silent, was_partitioned=False, **fields)
    assert bool(alone) is bool(fields), "a group that is wanted may serve until its kubelet reports it"
    assert healed(LONGEST_S + 1, silent, was_partitioned=False, **fields) != []
