"""A partitioned control plane: while many nodes are silent, only users' commands delete groups, and no restart begins."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx_api import labels
from phalanx_api.conditions import Condition, find_condition
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.groups import lost_nodes
from phalanx_operator.decide.groups.lost_nodes import POLL_S, RETURN_S, NodeStates
from phalanx_operator.decide.groups.partition import LONGEST_S, TOGETHER_S, partition_reason
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.actions import CreateGroup, DeleteGroup, DeletePod, DrainGroup, KeepGroup, Plan, RestartGroup
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import (
    DrainMark,
    NodeCensus,
    ObservedGroup,
    ObservedNode,
    ObservedPod,
    ReplicasWriter,
    RestartRecord,
)
from phalanx_operator.kube.client import EVENTS
from tests.control.builders import NOW, make_group, make_service, make_snapshot
from tests.control.loop.scenes import world_with_routers
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import KEY, World
from tests.examples import examples

ANSWERED = fleet_of(summary())
"""The only router answers, and reports no group."""
UNANSWERED = Fleet(polled=2)


def ago(age_s: float) -> str:
    return (datetime.fromisoformat(NOW) - timedelta(seconds=age_s)).isoformat()


def nodes_of(total: int, *ages: float | None) -> list[ObservedNode]:
    """Returns nodes of which the first are silent for these seconds, or since an unknown time."""
    silent = [ObservedNode(f"node-{i}", False, "" if age is None else ago(age)) for i, age in enumerate(ages)]
    return silent + [ObservedNode(f"node-{i}", True, ago(9e5)) for i in range(len(silent), total)]


def census_of(nodes: Sequence[ObservedNode]) -> NodeCensus:
    return NodeCensus(len(nodes), tuple(node for node in nodes if not node.ready))


@pytest.mark.parametrize(("silent", "router_nodes"), [((200, 205), []), ((200, 205), [5]), ((200,), [5])])
def test_router_that_starts_elsewhere_ends_no_partition(silent: tuple[float, ...], router_nodes: list[int]) -> None:
    """Groups have five of the six nodes."""
    nodes = nodes_of(6, *silent)
    routers = tuple(ObservedPod(name=f"r{i}", index=i, owner_uid="d", node=f"node-{i}") for i in router_nodes)
    pods = tuple(ObservedPod(name=f"a-{i}", index=i, owner_uid="a", node=f"node-{i}", uid=str(i)) for i in range(5))
    by_name = {node.name: node for node in nodes}
    states = NodeStates(by_name, 120.0, NOW, ANSWERED, census_of(nodes_of(20, *silent)), routers=routers)
    (assessed,) = lost_nodes.assess([make_group("a", pods=pods, size=5)], states)
    assert bool(assessed.assessment.kept_reason) is (len(silent) == 2)


@pytest.mark.parametrize(
    ("own", "cluster", "expected"),
    [
        (nodes_of(3, 200), nodes_of(9, 200), ""),
        (nodes_of(1, 200), nodes_of(9, 200), ""),
        (nodes_of(2, 200), nodes_of(9, 200), ""),
        (nodes_of(2, 200, 205), nodes_of(9, 200, 205), "2 of 2 nodes of the service"),
        (nodes_of(5, 200, 205), nodes_of(20, 200, 205), "2 of 5 nodes of the service"),
        (nodes_of(6, 200, 205), nodes_of(20, 200, 205), ""),
        (nodes_of(3, 200, 200 + TOGETHER_S), nodes_of(9, 200), "2 of 3 nodes of the service"),
        (nodes_of(3, 200, 201 + TOGETHER_S), nodes_of(9, 200), ""),
        (nodes_of(4, 10, 300, 310, 320), nodes_of(20, 10), "3 of 4 nodes of the service"),
        (nodes_of(3, 200, None), nodes_of(9, 200), ""),
        (nodes_of(1, 200), nodes_of(3, 200, 200), "2 of 3 nodes of the cluster"),
        (nodes_of(1, 200), nodes_of(2, 200), ""),
        (nodes_of(1, 200), nodes_of(1, 200), "1 of 1 nodes of the cluster"),
        (nodes_of(2), nodes_of(3, 200, 200), ""),
        (nodes_of(0), nodes_of(0), ""),
        (nodes_of(2, 10), nodes_of(5, 9e5, 9e5), ""),
    ],
    ids=[
        *("a third", "one of one", "one of two", "two of two", "two of five", "two of six", "at the bound", "one by one"),
        *("a late single node", "unknown time", "cluster", "one of two in the cluster", "only node", "others", "no nodes"),
        "nodes that have been off for days",
    ],
)
def test_how_many_silent_nodes_are_a_partition(own: list[ObservedNode], cluster: list[ObservedNode], expected: str) -> None:
    found = partition_reason(own, census_of(cluster), UNANSWERED, NOW)
    assert found == (f"{expected} became not ready within 120 s" if expected else "")


@pytest.mark.parametrize(
    ("fleet", "age_s", "lasts"),
    [
        (ANSWERED, LONGEST_S - 1, True),
        (ANSWERED, LONGEST_S, False),
        (Fleet(polled=2, answered=1), LONGEST_S, False),
        (Fleet(polled=3, answered=1), 9e5, True),
        (UNANSWERED, 9e5, True),
        (Fleet(), 9e5, True),
        (Fleet(polled=1, answered=1, unanswered=1), LONGEST_S, False),
        (Fleet(polled=1, answered=1, unanswered=3), 9e5, True),
    ],
    ids=["young", "old", "half of the routers", "a third", "silent routers", "no routers", "one cut off", "most cut off"],
)
def test_longest_time_needs_answers_of_routers(fleet: Fleet, age_s: float, lasts: bool) -> None:
    """It counts from the last node."""
    own = nodes_of(3, age_s, age_s + 100)
    assert bool(partition_reason(own, census_of(own), fleet, NOW)) is lasts


def test_new_partition_begins_after_an_old_one() -> None:
    own = nodes_of(4, 5, 10, 2 * LONGEST_S, 2 * LONGEST_S)
    assert partition_reason(own, NodeCensus(), ANSWERED, NOW).startswith("2 of 4 nodes")


def group_on(name: str, *nodes: ObservedNode, **fields: Any) -> ObservedGroup:
    """Returns a group with a pod on each node, of `size` pods, as the API server shows it: pods on silent nodes are not ready."""
    size = fields.pop("size", len(nodes))
    made = make_group(name, created=ago(9e5), size=len(nodes), **fields)
    pods = [
        replace(pod, node=node.name, uid=f"uid-{pod.name}", ready=node.ready, unready_since="" if node.ready else node.since)
        for pod, node in zip(made.pods, nodes, strict=True)
    ]
    return replace(made, pods=tuple(pods), size=size)


def plan_of(
    *groups: ObservedGroup,
    nodes: Sequence[ObservedNode],
    census: NodeCensus | None = None,
    fleet: Fleet = ANSWERED,
    conditions: tuple[Condition, ...] = (),
    writer: ReplicasWriter | None = None,
    **spec: Any,
) -> Plan:
    """`conditions`: of the former status. Without a census the cluster has only these nodes."""
    service, census = make_service(**{"replicas": len(groups)} | spec), census or census_of(nodes)
    status = Status(conditions=conditions)
    snapshot = make_snapshot(
        *groups, nodes={node.name: node for node in nodes}, census=census, status=status, replicas_writer=writer
    )
    snapshot = plan.assess(service, snapshot, fleet, NOW)
    inputs = PlanInputs(snapshot=snapshot, fleet=fleet)
    return plan.decide(service, inputs, plan.desired_groups(service, "new", ("s1", "s2", "s3"), inputs, NOW), NOW)


def ended(decided: Plan) -> list[DeleteGroup | DeletePod | RestartGroup]:
    """Returns the actions that end groups or pods."""
    return [action for action in decided.actions if isinstance(action, DeleteGroup | DeletePod | RestartGroup)]


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({}, {}),
        ({"revision": "old"}, {}),
        ({"terminating": True}, {}),
        ({"draining": DrainMark(NOW, "3 groups, 2 wanted")}, {}),
        ({"restarts": RestartRecord(at=(NOW,) * 6)}, {}),
        ({"gang": "Fallback", "incomplete_since": ago(9e5), "size": 2}, {}),
        ({}, {"restartPolicy": {"startupSeconds": 60}}),
        ({}, {"rollout": {"progressDeadlineSeconds": 60, "onFailure": "Rollback"}}),
    ],
    ids=["serves", "old", "terminating", "draining", "over its restart budget", "incomplete", "late start", "late rollout"],
)
@pytest.mark.parametrize("fleet", [ANSWERED, UNANSWERED, Fleet(), fleet_of(summary(group("a", state="dead")))])
def test_nothing_ends_for_silent_nodes(fleet: Fleet, fields: dict[str, Any], spec: dict[str, Any]) -> None:
    nodes = nodes_of(3, 300, 310)
    groups = [group_on("a", nodes[0], **fields), group_on("b", nodes[1], **fields), group_on("c", nodes[2])]
    decided = plan_of(*groups, nodes=nodes, fleet=fleet, **spec)
    assert ended(decided) == []
    is_leaving = bool({"terminating", "draining"} & fields.keys())
    assert is_leaving or not [action for action in decided.actions if isinstance(action, CreateGroup)]
    condition = find_condition(decided.status.conditions, "ControlPlanePartitioned")
    assert condition is not None and condition.status == "True"
    why = "2 of 3 nodes of the service became not ready within 120 s"
    assert condition.message == f"only a command, or a lower count of another client, deletes groups: {why}"
    assert decided.requeue_s <= POLL_S and find_condition(decided.status.conditions, "Stalled") is None


def test_partition_replaces_no_group_over_its_restart_budget() -> None:
    """The condition says so; otherwise one at a time is replaced."""
    messages = []
    for nodes in (nodes_of(3, 300, 310), nodes_of(3)):
        spent = [group_on(name, nodes[2], restarts=RestartRecord(at=(NOW,) * 6)) for name in "cd"]
        spent = [replace(made, pods=tuple(replace(pod, ready=False, unready_since=NOW) for pod in made.pods)) for made in spent]
        decided = plan_of(group_on("a", nodes[0]), group_on("b", nodes[1]), *spent, nodes=nodes, replicas=4)
        held = find_condition(decided.status.conditions, "DisruptionsHeld")
        messages += [(len(ended(decided)), held.message if held else "")]
    why = "2 of 4 groups exceed their restart budgets"
    assert messages == [(0, f"{why}; none is replaced during the partition"), (1, f"{why}; at most one at a time is replaced")]


def test_kept_groups_are_not_available() -> None:
    """A rollout drains no other group meanwhile, and `Ready` names them."""
    nodes = nodes_of(3, 300, 310)
    groups = [group_on(name, node, revision="old") for name, node in zip("abc", nodes, strict=True)]
    decided = plan_of(*groups, nodes=nodes)
    assert not [action for action in decided.actions if isinstance(action, DrainGroup | CreateGroup)] and not ended(decided)
    ready = find_condition(decided.status.conditions, "Ready")
    assert ready is not None and ready.reason == "Unreachable" and ready.message.startswith("group a is kept: 2 of 3 nodes")
    alone = plan_of(groups[0], groups[1], nodes=nodes)
    available = find_condition(alone.status.conditions, "Available")
    assert available is not None and available.status == "False", "no router reports them"


FIELDS = pytest.mark.parametrize(
    "fields", [{}, {"revision": "old"}, {"draining": DrainMark(NOW, "surplus")}], ids=["late", "old", "draining"]
)


def returned(age_s: float, unready_s: float, **fields: Any) -> tuple[list[ObservedNode], list[ObservedGroup]]:
    """Returns nodes that became ready again, and a group on each whose pod has not been reported since."""
    nodes = [replace(node, since=ago(age_s)) for node in nodes_of(2)]
    made = [group_on(name, node, **fields) for name, node in zip("ab", nodes, strict=True)]
    pods = [tuple(replace(pod, ready=False, unready_since=ago(unready_s)) for pod in one.pods) for one in made]
    return nodes, [replace(one, pods=unready) for one, unready in zip(made, pods, strict=True)]


@FIELDS
def test_healing_ends_nothing_before_kubelets_report(fields: dict[str, Any]) -> None:
    """Else groups that were cut off for longer than `startupSeconds` would restart when their nodes are ready."""
    nodes, groups = returned(RETURN_S - 1, 4000, **fields)
    cut_off = nodes_of(2, 300, 310)
    during = plan_of(*(group_on(one.name, node) for one, node in zip(groups, cut_off, strict=True)), nodes=cut_off)
    healed = plan_of(*groups, nodes=nodes, conditions=during.status.conditions)
    assert ended(healed) == [] and healed.requeue_s <= 2
    condition = find_condition(healed.status.conditions, "ControlPlanePartitioned")
    assert condition is not None and "node-0 is ready again" in condition.message
    nodes, groups = returned(RETURN_S, 4000, **fields)
    late = plan_of(*groups, nodes=nodes, conditions=healed.status.conditions)
    assert len(ended(late)) == 2 and find_condition(late.status.conditions, "ControlPlanePartitioned") is None


@FIELDS
def test_node_that_returns_alone_needs_evidence(fields: dict[str, Any]) -> None:
    """Without a partition before, groups that routers report are kept, and none restarts."""
    nodes, groups = returned(5, 4000, **fields)
    reported = fleet_of(summary(group("a"), group("b")))
    assert ended(plan_of(*groups, nodes=nodes, fleet=reported)) == []
    assert len(ended(plan_of(*groups, nodes=nodes))) == (2 if fields else 0)
    nodes, groups = returned(50, 40, **fields)
    assert len(ended(plan_of(*groups, nodes=nodes, fleet=reported))) == (2 if fields else 0), "unready since the node is ready"


@pytest.mark.parametrize(("returned_s", "kept"), [(5.0, True), (-5.0, True), (RETURN_S + 1, False), (-3600.0, False)])
def test_groups_wait_for_nodes_that_return_later(returned_s: float, kept: bool) -> None:
    """One node of two is back by its own clock; the other may follow."""
    returned, silent = ObservedNode("node-0", True, ago(returned_s)), ObservedNode("node-1", False, ago(300))
    former = (Condition(type="ControlPlanePartitioned", status="True", reason="NodesSilent", last_transition_time=NOW),)
    groups = (group_on("a", ObservedNode("node-0", True, ago(9e5))), group_on("b", silent))
    decided = plan_of(*groups, nodes=[returned, silent], fleet=ANSWERED, conditions=former)
    assert (ended(decided) == []) is kept


def test_surplus_group_is_drained_during_a_partition() -> None:
    nodes = nodes_of(2, 300, 310)
    groups = [group_on("a", nodes[0]), group_on("b", nodes[1])]
    decided = plan_of(*groups, nodes=nodes, replicas=1)
    assert ended(decided) == [] and len([a for a in decided.actions if isinstance(a, DrainGroup)]) == 1


SPENT = RestartRecord(at=(NOW,) * 6, engine="uid-c-0/0", deaths=6)
ENDING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "drained": ({"draining": DrainMark(ago(60), "3 groups, 2 wanted")}, {"replicas": 2}),
    "drain timeout": ({"revision": "old", "draining": DrainMark(ago(9e5), "revision old is old", "revision")}, {}),
    "unready while it drains": ({"draining": DrainMark(NOW, "a straggler", "straggler"), "ready": False}, {}),
    "old and unready": ({"revision": "old", "ready": False}, {}),
    "over its restart budget": ({"restarts": SPENT, "ready": False}, {}),
    "late start": ({"ready": False}, {"restartPolicy": {"startupSeconds": 60}}),
    "unplaced": ({"gang": "Fallback", "incomplete_since": ago(9e5), "size": 2, "ready": False}, {}),
}
"""Groups on ready nodes that end without a partition."""


@pytest.mark.parametrize(("fields", "spec"), ENDING.values(), ids=ENDING)
def test_partition_ends_nothing_on_ready_nodes(fields: dict[str, Any], spec: dict[str, Any]) -> None:
    fleet = fleet_of(summary(evacuated=["c"]))
    for silent, is_ended in (((300.0, 310.0), False), ((), True)):
        nodes = nodes_of(3, *silent)
        ending = group_on("c", nodes[2], **fields)
        if not fields.get("ready", True):
            pods = tuple(replace(pod, ready=False, unready_since=ago(8e5), created=ago(8e5)) for pod in ending.pods)
            ending = replace(ending, pods=pods)
        groups, own = (group_on("a", nodes[0]), group_on("b", nodes[1]), ending), ReplicasWriter(labels.MANAGER, NOW)
        decided = plan_of(*groups, nodes=nodes, fleet=fleet, writer=own, **spec)
        assert bool(ended(decided)) is is_ended


def test_old_group_that_drains_serves_again_in_a_partition() -> None:
    """Its successor would wait for the end of the partition."""
    for silent, kept in (((300.0, 310.0), ["c"]), ((), [])):
        nodes = nodes_of(3, *silent)
        draining = group_on("c", nodes[2], revision="old", draining=DrainMark(NOW, "revision old is old", "revision"))
        decided = plan_of(group_on("a", nodes[0]), group_on("b", nodes[1]), draining, nodes=nodes, fleet=fleet_of(summary()))
        assert [action.name for action in decided.actions if isinstance(action, KeepGroup)] == kept


@pytest.mark.parametrize(
    ("purpose", "writer", "spec", "deleted"),
    [
        ("asked", labels.MANAGER, {}, 1),
        ("surplus", labels.MANAGER, {"replicas": 2}, 0),
        ("surplus", "kubectl", {"replicas": 2}, 1),
        ("revision", "kubectl", {"replicas": 3}, 0),
        ("surplus", "kubectl", {"replicas": 2, "rollout": {"maxSurge": 1}}, 0),
        ("surplus", labels.MANAGER, {"suspend": True}, 1),
    ],
    ids=["asked", "autoscaler", "user", "rollout", "surge", "suspended"],
)
def test_users_commands_delete_groups_in_a_partition(purpose: Any, writer: str, spec: dict[str, Any], deleted: int) -> None:
    nodes, by = nodes_of(3, 300, 310), ReplicasWriter(writer, NOW)
    groups = (
        group_on("a", nodes[0]),
        group_on("b", nodes[1]),
        group_on("c", nodes[2], draining=DrainMark(ago(9e5), "x", purpose)),
    )
    decided = plan_of(*groups, nodes=nodes, writer=by, **spec)
    assert len(ended(decided)) == deleted


@pytest.mark.parametrize(("silent", "count"), [((300, 310), 3), ((), 2)])
def test_partition_keeps_the_count_of_groups(silent: tuple[float, ...], count: int) -> None:
    """The bounds allow two."""
    nodes = nodes_of(3, *silent)
    groups = [group_on(name, node) for name, node in zip("abc", nodes, strict=True)]
    service = make_service(replicas=3, autoscaling={"maxReplicas": 2, "targets": {"ttftP95Ms": 2000}})
    snapshot = make_snapshot(*groups, nodes={node.name: node for node in nodes}, census=census_of(nodes))
    snapshot = plan.assess(service, snapshot, ANSWERED, NOW)
    _, scaling = autoscaler.autoscale(service, snapshot, ANSWERED, AutoscalerState(), NOW, 0.0)
    assert scaling is not None and (scaling.decision.groups, scaling.replicas_to_write) == (count, None if silent else count)
    assert ("2 of 3 nodes" in scaling.decision.why) is bool(silent)


def test_evicted_pods_evacuate_nothing_during_a_partition() -> None:
    """The taint manager evicts them, but pods on silent nodes still serve their streams."""
    nodes = nodes_of(2, 300, 310)
    made = group_on("a", *nodes)
    evicted = replace(made, pods=tuple(replace(pod, terminating=True) for pod in made.pods))
    during = plan_of(evicted, nodes=nodes)
    assert (ended(during), during.evacuate) == ([], ())
    after = plan_of(evicted, nodes=nodes, fleet=replace(ANSWERED, polled=1, answered=1))
    assert after == during, "what routers report changes nothing"
    single = plan_of(evicted, nodes=[nodes[0]], census=NodeCensus(9, (nodes[0],)))
    assert single.evacuate == ("a",) and ended(single)


ages = st.lists(st.floats(280, 340) | st.floats(0, 2000), max_size=6)
group_rows = st.lists(
    st.tuples(st.sampled_from(["new", "old"]), st.sampled_from(["", "draining", "terminating"]), st.integers(0, 7)), max_size=4
)
fleets = st.sampled_from(
    [ANSWERED, UNANSWERED, Fleet(), Fleet(polled=1, is_new=True)]
    + [fleet_of(summary(group("g0", state=state))) for state in ("fresh", "degraded", "suspect", "dead")]
)


@settings(deadline=None, max_examples=examples(300))
@example([300.0, 310.0], [("new", "", 0), ("new", "", 1)], ANSWERED, 2, 2)
@example([300.0, 310.0], [("new", "draining", 0), ("new", "", 1)], Fleet(), 2, 2)
@given(ages, group_rows, fleets, st.integers(0, 4), st.integers(0, 8))
def test_only_a_partition_changes_decisions(
    silent: list[float], rows: list[tuple[str, str, int]], fleet: Fleet, replicas: int, others: int
) -> None:
    """Below the bound the plan is that of an operator without the rule; above it no silence ends anything."""
    nodes = nodes_of(len(silent) + others, *silent)
    placed = [(row, nodes[row[2] % len(nodes)]) for row in rows if nodes]
    groups = [
        group_on(
            f"g{i}",
            node,
            revision=revision,
            terminating=state == "terminating",
            draining=DrainMark(NOW, "surplus") if state == "draining" else None,
        )
        for i, ((revision, state, _), node) in enumerate(placed)
    ]
    used = {node.name: node for _, node in placed}
    decided = plan_of(*groups, nodes=nodes, fleet=fleet, replicas=replicas)
    is_partitioned = bool(partition_reason(list(used.values()), census_of(nodes), fleet, NOW))
    assert (find_condition(decided.status.conditions, "ControlPlanePartitioned") is not None) is is_partitioned
    if is_partitioned:
        cut_off = {group.name for group, (_, node) in zip(groups, placed, strict=True) if not node.ready}
        assert not cut_off & {action.name.partition("-")[0] for action in ended(decided)}
        assert not [action.why for action in ended(decided) if "node" in action.why]
        deleted, live = [a for a in ended(decided) if isinstance(a, DeleteGroup)], sum(not g.terminating for g in groups)
        assert not deleted or live - len(deleted) >= replicas
    else:
        assert decided == without_rule(groups, nodes, fleet, replicas)


def without_rule(groups: Sequence[ObservedGroup], nodes: Sequence[ObservedNode], fleet: Fleet, replicas: int) -> Plan:
    """Returns the plan of an operator that finds no partition."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx_operator.decide.groups.lost_nodes.partition_reason", lambda *_: "")
        return plan_of(*groups, nodes=nodes, fleet=fleet, replicas=replicas)


def is_partitioned(world: World) -> float | None:
    labels = dict(zip(("namespace", "service"), KEY, strict=True))
    return world.metrics.registry.get_sample_value("phalanx_service_partitioned", labels)


async def test_partition_holds_until_routers_decide() -> None:
    """Both nodes of the service are silent, and routers report none of its groups."""
    world = await world_with_routers(replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"mode": "None"}})
    before = world.groups
    assert is_partitioned(world) == 0
    for name, since in (("node-0", "2026-01-02T03:04:00Z"), ("node-1", "2026-01-02T03:04:10Z")):
        world.cluster.lose_node(name, since)
    for minute in range(5, 14):
        world.now = f"2026-01-02T03:{minute:02}:00Z"
        await world.reconcile()
        assert (world.groups, world.deleted(), world.routers.policy.evacuate, world.next_s) == (before, set(), [], POLL_S)
    assert world.condition("ControlPlanePartitioned") == ("True", "NodesSilent") and is_partitioned(world) == 1
    notes = [event["note"] for event in world.kube.of_kind(EVENTS).values() if event["reason"] == "NodesSilent"]
    assert len(notes) == 1 and "2 of 2 nodes of the service" in notes[0]
    world.now = "2026-01-02T03:14:10Z"
    await world.reconcile()
    assert world.deleted() == before and is_partitioned(world) == 0
    assert find_condition(world.status.conditions, "ControlPlanePartitioned") is None
    assert ("Normal", "PartitionEnded") in world.events()


async def test_nodes_without_groups_count_in_the_cluster() -> None:
    world = await world_with_routers(replicas=1)
    before = world.groups
    for name in ("node-0", "elsewhere"):
        world.cluster.lose_node(name, "2026-01-02T03:00:00Z")
    await world.reconcile()
    assert world.deleted() == set() and is_partitioned(world) == 1
    notes = [event["note"] for event in world.kube.of_kind(EVENTS).values() if event["reason"] == "NodesSilent"]
    assert len(notes) == 1 and "2 of 3 nodes of the cluster" in notes[0]
    elsewhere = world.kube.objects["nodes", "", "spare"]
    world.kube.objects["nodes", "", "elsewhere"] = elsewhere | {"metadata": elsewhere["metadata"] | {"name": "elsewhere"}}
    await world.reconcile()
    assert world.deleted() == before and is_partitioned(world) == 0


async def test_deleted_node_is_gone_not_silent() -> None:
    world = await world_with_routers(replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"mode": "None"}})
    before = world.groups
    for name in ("node-0", "node-1"):
        world.cluster.lose_node(name, "2026-01-02T03:00:00Z")
    await world.reconcile()
    assert world.deleted() == set() and is_partitioned(world) == 1
    del world.kube.objects["nodes", "", "node-0"]
    await world.reconcile()
    assert world.deleted() == before and is_partitioned(world) == 0, "one silent node of one"
