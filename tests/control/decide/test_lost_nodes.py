"""Lost nodes: groups get successors and pods are deleted at once, unless the node returns or routers report that they serve."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.conditions import Reason, set_condition
from phalanx_api.spec.lifecycle import Rollout
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.groups import drain
from phalanx_operator.decide.groups.lost_nodes import (
    EVIDENCE_S,
    NodeStates,
    assess,
    due_in_s,
    loss_reason,
    pods_to_delete,
)
from phalanx_operator.decide.groups.progress import surge_failure
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.actions import CreateGroup, DeleteGroup, DeletePod, DrainGroup, KeepGroup, Plan, RestartGroup
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, merge
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedNode, RestartRecord
from phalanx_operator.kube.client import EVENTS, NODES, PODS, STATEFUL_SETS
from tests.control.builders import NOW, make_group, make_service, make_snapshot, pod_body
from tests.control.decide.rollouts import make_in_state
from tests.control.loop.scenes import make_unschedulable, world_with_routers
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

LONG_AGO = "2026-01-02T02:00:00Z"
SILENT = {"node-0": ObservedNode("node-0", False, LONG_AGO)}
NO_REPORTS = Fleet()
STATES = ("fresh", "degraded", "suspect", "dead")
report_rows = st.lists(st.tuples(st.sampled_from(STATES), st.floats(0, 60)), max_size=3)


@pytest.mark.parametrize(
    ("node", "lost"),
    [
        (None, False),
        (ObservedNode("n", True, "2026-01-01T00:00:00Z"), False),
        (ObservedNode("n", False, "2026-01-02T03:03:00Z"), False),
        (ObservedNode("n", False, "2026-01-02T03:02:00Z"), True),
        (ObservedNode("n", False, ""), False),
    ],
    ids=["unknown", "ready", "unready for a minute", "unready for two", "unknown time"],
)
def test_when_a_node_is_lost(node: ObservedNode | None, lost: bool) -> None:
    assert bool(loss_reason(node, 120, NOW)) is lost


def test_pods_of_a_kept_group_are_never_deleted_together() -> None:
    nodes = {"node-0": ObservedNode("node-0", False, "2026-01-02T03:00:00Z")}
    pods = tuple(replace(pod, uid=f"uid-{pod.name}") for pod in make_group("a").pods)
    staying, terminating = replace(make_group("a"), pods=pods), replace(make_group("a", terminating=True), pods=pods)
    states = NodeStates(nodes, 120, NOW)
    assert pods_to_delete((staying,), states) == []
    assert [(pod.name, pod.uid, pod.grace_s) for pod in pods_to_delete((terminating,), states)] == [("a-0", "uid-a-0", 0)]


async def test_lost_node_replaces_its_groups() -> None:
    one_by_one = {"gang": {"mode": "None"}}
    two_pods = {"tensor": 2, "gpusPerPod": 1}
    world = World(replicas=2, parallelism=two_pods, placement=one_by_one, restartPolicy={"nodeLostSeconds": 60})
    await world.settle()
    before = world.groups
    world.cluster.lose_node("node-1", "2026-01-02T03:03:30Z")
    await world.reconcile()
    assert (world.groups, world.next_s) == (before, 25.0)
    world.now = "2026-01-02T03:04:31Z"
    writes = await world.reconcile()
    assert world.deleted() == before and len(world.groups) == 4
    assert sorted(w for w in writes if w.startswith("force-delete")) == sorted(f"force-delete pods {name}-1" for name in before)
    assert not [w for w in writes if w.startswith("force-delete") and w.endswith("-0")]
    assert [reason for _, reason in world.events()].count("GroupDeleted") == 1, "one event for both"


async def test_group_of_a_pod_that_never_ends_is_replaced() -> None:
    """The node is ready, but a hung container runtime or another client's finalizer keeps the pod."""
    world = World(replicas=2, restartPolicy={"nodeLostSeconds": 60})
    await world.settle()
    (stuck, other), former = sorted(world.groups), world.groups
    pod = world.kube.of_kind(PODS)[f"{stuck}-0"]
    world.kube.put(PODS, pod | {"metadata": pod["metadata"] | {"deletionTimestamp": "2026-01-02T03:03:35Z"}})
    await world.reconcile()
    assert world.deleted() == set()
    world.now = "2026-01-02T03:04:35Z"
    assert not [write for write in await world.reconcile() if write.startswith("force-delete")], "it may still have devices"
    (successor,) = world.groups - former
    affinity = world.kube.of_kind(STATEFUL_SETS)[successor]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert "node-0" in str(affinity["preferredDuringSchedulingIgnoredDuringExecution"])
    await world.reconcile()
    assert (world.deleted(), world.groups - world.deleted()) == ({stuck}, {other, successor})
    listed = {group.name: (group.phase, group.reason) for group in world.status.groups}
    assert listed[stuck] == ("Terminating", f"pod {stuck}-0 has not ended on node node-0 60 s after its grace period")


@pytest.mark.parametrize(
    ("node", "is_lost"),
    [
        (ObservedNode("node-0", True, "2026-01-02T03:03:00Z"), False),
        (ObservedNode("node-0", True, "2026-01-02T03:02:00Z"), True),
        (ObservedNode("node-0", False, "2026-01-02T03:04:00Z"), False),
        (None, True),
    ],
    ids=["ready for a minute", "ready for two", "silent", "not watched"],
)
def test_kubelets_get_time_to_end_pods(node: ObservedNode | None, is_lost: bool) -> None:
    made = make_group("a", created=LONG_AGO)
    ending = replace(made.pods[0], ready=False, terminating=True, ends_at="2026-01-02T02:30:00Z", unready_since=LONG_AGO)
    states = NodeStates({"node-0": node} if node else {}, 120, NOW)
    (found,) = assess((replace(made, pods=(ending, *made.pods[1:])),), states)
    assert bool(found.assessment.lost_reason) is is_lost


async def test_node_that_returns_in_time_changes_nothing() -> None:
    world = World(replicas=2)
    await world.settle()
    before = world.groups
    world.cluster.lose_node("node-0", "2026-01-02T03:04:00Z")
    await world.reconcile()
    world.cluster.start_pods()
    del world.kube.objects["nodes", "", "node-0"]
    world.now = "2026-01-02T03:14:05Z"
    await world.settle()
    assert (world.groups, world.deleted()) == (before, set())


def reports_of(*rows: tuple[str, float], name: str = "a") -> Fleet:
    """Returns the fleet of one router per row: the group's state and the age of the report."""
    reports = [RouterReport(f"r{i}", age, summary(group(name, state=state))) for i, (state, age) in enumerate(rows)]
    return merge(reports, len(reports), 45.0)


def cut_off(name: str = "a", **fields: Any) -> ObservedGroup:
    """Returns a group whose first node is silent, as the API server shows it."""
    made = make_group(name, created=LONG_AGO, **fields)
    pods = [replace(pod, uid=f"uid-{pod.name}", unready_since=LONG_AGO, ready=pod.node not in SILENT) for pod in made.pods]
    return replace(made, pods=tuple(pods))


def plan_of(*groups: ObservedGroup, fleet: Fleet = NO_REPORTS, replicas: int = 1, revision: str = "new", **spec: Any) -> Plan:
    service = make_service(replicas=replicas, **spec)
    snapshot = plan.assess(service, make_snapshot(*groups, nodes=SILENT), fleet, NOW)
    inputs = PlanInputs(snapshot=snapshot, fleet=fleet)
    desired = plan.desired_groups(service, revision, ("s1", "s2"), inputs, NOW)
    return plan.decide(service, inputs, desired, NOW)


def ready_condition(decided: Plan) -> tuple[str, str]:
    (ready,) = [condition for condition in decided.status.conditions if condition.type == "Ready"]
    return ready.reason, ready.message


def replacements(decided: Plan) -> list[str]:
    """Returns the reasons of actions that replace a group or end its pods."""
    kinds = CreateGroup | DeleteGroup | DeletePod | RestartGroup
    return [action.why for action in decided.actions if isinstance(action, kinds)]


@pytest.mark.parametrize(
    ("fleet", "kept"),
    [
        (reports_of(("fresh", 0.0)), True),
        (reports_of(("degraded", EVIDENCE_S)), True),
        (reports_of(("fresh", EVIDENCE_S + 0.1)), False),
        (reports_of(("suspect", 0.0)), False),
        (reports_of(("dead", 0.0)), False),
        (reports_of(("dead", 0.0), ("fresh", 30.0)), True),
        (reports_of(("fresh", 42.0), ("dead", 0.0)), False),
        (reports_of(("fresh", 5.0), ("fresh", 42.0)), True),
        (reports_of(("fresh", 0.0), name="b"), False),
        (NO_REPORTS, False),
        (Fleet(polled=2), False),
        (replace(Fleet(polled=2), is_new=True), True),
        (replace(reports_of(("dead", 0.0)), is_new=True), True),
    ],
    ids=[
        *("fresh", "at the bound", "old", "suspect", "dead", "contradiction", "old contradiction", "one is young"),
        *("another group", "no routers", "silent routers", "not asked yet", "one not asked yet"),
    ],
)
def test_which_reports_keep_a_group(fleet: Fleet, kept: bool) -> None:
    decided = plan_of(cut_off(), fleet=fleet)
    assert (ready_condition(decided)[0] == "Unreachable", replacements(decided) == []) == (kept, kept)


def test_condition_and_deletion_say_what_decided() -> None:
    kept = plan_of(cut_off(), cut_off("b"), fleet=fleet_of(summary(group("a"), group("b"))), replicas=2)
    message = "group a is kept: node node-0 is silent, but routers report that the group serves; 1 more groups are kept likewise"
    assert ready_condition(kept) == ("Unreachable", message)
    assert kept.status.groups[0].reason == "node node-0 is silent, but routers report that the group serves"
    lost = plan_of(cut_off(), fleet=reports_of(("dead", 0.0)))
    (deletion,) = [action for action in lost.actions if isinstance(action, DeleteGroup)]
    assert deletion.why == "node node-0 has not been ready for 120 s, and no router reports that the group serves"


@pytest.mark.parametrize(
    "fields",
    [
        {"restarts": RestartRecord(at=(NOW,) * 6)},
        {"revision": "old"},
        {"gang": "Fallback", "size": 3, "incomplete_since": LONG_AGO, "pods": make_group("a").pods},
        {"draining": DrainMark(NOW, "2 groups, 1 wanted")},
    ],
    ids=["over its restart budget", "old revision", "pod missing", "draining"],
)
def test_serving_group_is_kept_in_any_state(fields: dict[str, Any]) -> None:
    deletes = [action for action in plan_of(cut_off(**fields)).actions if isinstance(action, DeleteGroup)]
    kept = plan_of(cut_off(**fields), fleet=reports_of(("fresh", 0.0)))
    assert (len(deletes), replacements(kept)) == (1, [])


def test_surplus_group_on_silent_node_is_drained() -> None:
    other = make_group("b", created=LONG_AGO)
    elsewhere = replace(other, pods=tuple(replace(pod, node="node-9") for pod in other.pods))
    decided = plan_of(cut_off("a"), elsewhere, fleet=reports_of(("fresh", 0.0)))
    assert [action.name for action in decided.actions if isinstance(action, DrainGroup)] == ["a"]
    assert replacements(decided) == []


def test_draining_group_is_kept_when_wanted_again() -> None:
    decided = plan_of(cut_off(draining=DrainMark(NOW, "1 groups, 0 wanted")), fleet=reports_of(("fresh", 0.0)))
    assert [action.name for action in decided.actions if isinstance(action, KeepGroup)] == ["a"]


@pytest.mark.parametrize(("fleet", "serves"), [(reports_of(("fresh", 0.0)), True), (NO_REPORTS, False)])
def test_serving_group_counts_for_requests_and_scaling(fleet: Fleet, serves: bool) -> None:
    """Routers await no other group, and the autoscaler sees no change of the serving groups."""
    service = make_service(autoscaling={"maxReplicas": 4, "targets": {"itlP95Ms": 50}})
    snapshot = plan.assess(service, make_snapshot(cut_off(), nodes=SILENT), fleet, NOW)
    young = [replace(group, created=NOW) for group in snapshot.groups]
    assert drain.is_awaited(young, (), 1, NOW) is not serves
    snapshot = replace(snapshot, groups=tuple(young))
    state, _ = autoscaler.autoscale(service, snapshot, fleet, AutoscalerState(), NOW, 0.0)
    assert state.history.freeze.serving == (frozenset({"a"}) if serves else frozenset())


@pytest.mark.parametrize("state", ["fresh", "dead"])
def test_evicted_group_on_a_silent_node_is_replaced(state: str) -> None:
    """Routers send it no more requests, so that it serves only its last streams."""
    made = cut_off()
    evicted = replace(made, pods=tuple(replace(pod, terminating=pod.node in SILENT) for pod in made.pods))
    decided = plan_of(evicted, fleet=reports_of((state, 0.0)))
    assert decided.evacuate == ("a",) and replacements(decided)


def test_rollout_continues_beside_a_cut_off_group() -> None:
    """It counts as available: of three old groups one drains at a time."""
    made = [make_group(name, revision="old") for name in ("b", "c")]
    others = [replace(one, pods=tuple(replace(pod, node="node-9") for pod in one.pods)) for one in made]
    groups = (cut_off(revision="old"), *others)
    decided = plan_of(*groups, fleet=reports_of(("fresh", 0.0)), replicas=3, revision="new")
    drained = [action for action in decided.actions if isinstance(action, DrainGroup)]
    assert len(drained) == 1
    available = next(one for one in decided.status.conditions if one.type == "Available")
    assert available.status == "True"


def test_long_partition_is_no_failed_rollout() -> None:
    decided = plan_of(cut_off(), fleet=reports_of(("fresh", 0.0)), rollout={"progressDeadlineSeconds": 60})
    assert "Stalled" not in {condition.type for condition in decided.status.conditions}


@pytest.mark.parametrize(
    ("fleet", "due_s"), [(reports_of(("fresh", 15.0)), 26.0), (Fleet(polled=1, is_new=True), 10.0), (NO_REPORTS, None)]
)
def test_next_look_is_when_evidence_gets_old(fleet: Fleet, due_s: float | None) -> None:
    snapshot = plan.assess(make_service(), make_snapshot(cut_off(), nodes=SILENT), fleet, NOW)
    assert due_in_s(snapshot.groups, NodeStates(SILENT, 120, NOW, fleet)) == due_s


def test_routers_are_polled_faster_while_nodes_are_silent() -> None:
    assert (plan_of(cut_off()).poll_s, plan_of().poll_s) == (10.0, 30.0)


@settings(deadline=None)
@given(report_rows, st.booleans(), st.integers(0, 3), st.sampled_from(["new", "old"]), st.booleans())
def test_fresh_evidence_alone_decides(
    rows: list[tuple[str, float]], is_new: bool, replicas: int, revision: str, is_draining: bool
) -> None:
    """A group with fresh evidence is never replaced; without it, all is as without routers."""
    fleet = replace(reports_of(*rows), is_new=is_new, polled=len(rows) + is_new)
    made = cut_off(revision=revision, draining=DrainMark(NOW, "surplus") if is_draining else None)
    decided, former = (plan_of(made, fleet=f, replicas=replicas) for f in (fleet, Fleet(polled=len(rows))))
    removed = [action for action in decided.actions if isinstance(action, DeleteGroup | DeletePod | RestartGroup)]
    if is_new or any(state in ("fresh", "degraded") and age <= EVIDENCE_S for state, age in rows):
        assert removed == []
    else:
        kinds = [(type(action), getattr(action, "name", "")) for action in decided.actions]
        assert kinds == [(type(action), getattr(action, "name", "")) for action in former.actions]


async def test_partition_deletes_no_group_that_serves() -> None:
    """The control plane loses the nodes of both groups and of their router, whose links to both are alive."""
    world = await world_with_routers(replicas=2, restartPolicy={"nodeLostSeconds": 60})
    before = world.groups
    (router,) = [pod for name, pod in world.kube.of_kind(PODS).items() if name.startswith("chat-router")]
    world.kube.put(PODS, router | {"spec": {"nodeName": "node-0"}})
    world.routers.summary = summary(*(group(name) for name in before))
    world.cluster.lose_node("node-0", LONG_AGO)
    lost_router = world.kube.of_kind(PODS)["chat-router-0"]
    world.kube.put(PODS, lost_router | {"status": lost_router["status"] | {"podIP": "10.0.0.0"}})
    for minute in range(5, 20):
        world.now = f"2026-01-02T03:{minute:02}:00Z"
        await world.reconcile()
    assert (world.groups, world.deleted(), world.draining()) == (before, set(), {})
    assert world.ready == ("False", "Unreachable") and ("Warning", "Unreachable") in world.events()
    assert any("is kept: node node-0 is silent" in event["note"] for event in world.kube.of_kind(EVENTS).values())
    assert [target.is_ready for target in world.routers.targets] == [False] and world.routers.policy.routers == 1
    assert world.routers.policy.evacuate == []
    world.routers.age_s = EVIDENCE_S + 1
    await world.reconcile()
    assert world.deleted() == before, "old evidence does not count"


async def world_with_a_cut_node() -> tuple[World, str]:
    """Returns a world with a group on a silent node, and the group's name; other nodes are ready, so it is no partition."""
    spec: dict[str, Any] = {
        "rollout": {"maxSurge": 1, "surgeTimeoutSeconds": 300},
        "placement": {"gang": {"mode": "None"}},
        "restartPolicy": {"nodeLostSeconds": 60},
    }
    world = await world_with_routers(replicas=2, **spec)
    for name, pod in list(world.kube.of_kind(PODS).items()):
        world.kube.put(PODS, pod | {"spec": {"nodeName": f"node-of-{name}"}})
    cut, other = sorted(world.groups)
    world.routers.summary = summary(group(cut), group(other))
    world.cluster.lose_node(f"node-of-{cut}-0", "2026-01-02T03:03:30Z")
    return world, cut


async def test_unreachable_group_leaves_once_its_successor_serves() -> None:
    world, cut = await world_with_a_cut_node()
    before = world.groups
    (other,) = before - {cut}
    await world.reconcile()
    assert world.groups == before, "the node may return"
    world.now = "2026-01-02T03:04:31Z"
    await world.reconcile()
    (successor,) = world.groups - before
    await world.reconcile()
    assert (world.deleted(), world.draining()) == (set(), {}), "the successor starts"
    world.kube.put(PODS, pod_body(world.kube.of_kind(STATEFUL_SETS)[successor], 0, ready=True, uid="new"))
    await world.reconcile()
    assert world.draining()[cut].endswith(
        f"unreachable node node-of-{cut}-0 has not been ready for 60 s, and its successor serves"
    )
    assert world.routers.policy.evacuate == [cut] and not world.deleted()
    world.routers.summary = summary(group(cut, running=0), group(other), group(successor), evacuated=[cut])
    writes = await world.reconcile()
    assert world.deleted() == {cut} and "force-delete pods" in " ".join(await world.reconcile() + writes)
    assert world.groups - world.deleted() == {other, successor}


async def test_failed_surge_for_an_unreachable_group_is_retried() -> None:
    world, _ = await world_with_a_cut_node()
    before, world.now = world.groups, "2026-01-02T03:04:31Z"
    await world.reconcile()
    (first,) = world.groups - before
    pod = pod_body(world.kube.of_kind(STATEFUL_SETS)[first], 0, ready=False, uid="new")
    world.kube.put(PODS, make_unschedulable(pod, world.now))
    world.now = "2026-01-02T03:09:31Z"
    await world.reconcile()
    assert world.deleted() == {first} and world.condition("Progressing") == ("True", "SurgeUnschedulable")
    for plural, name in (("statefulsets", first), ("pods", f"{first}-0")):
        del world.kube.objects[plural, "team", name]
    world.now = "2026-01-02T03:19:30Z"
    await world.reconcile()
    assert world.groups == before and world.next_s == 1.0 and world.condition("Progressing") == ("True", "SurgeUnschedulable")
    world.now = "2026-01-02T03:19:31Z"
    await world.reconcile()
    assert len(world.groups - before) == 1 and world.condition("Progressing") == ("True", "Complete")


@pytest.mark.parametrize("now", ["2026-01-02T02:04:31Z", "2026-01-02T03:04:31Z"])
async def test_changed_clock_keeps_the_successor_of_an_unreachable_group(now: str) -> None:
    """Its node seems to be silent for less time, or for as long."""
    world, _ = await world_with_a_cut_node()
    world.now = "2026-01-02T03:04:31Z"
    await world.reconcile()
    before, world.now, world.clock_reason = world.groups, now, "the API server's clock changed"
    await world.reconcile()
    assert (len(before), world.groups, world.deleted(), world.draining()) == (3, before, set(), {})


async def test_changed_clock_starts_no_surge() -> None:
    world, _ = await world_with_a_cut_node()
    before, world.now, world.clock_reason = world.groups, "2026-01-02T03:04:31Z", "the API server's clock changed"
    await world.reconcile()
    assert world.groups == before


@pytest.mark.parametrize(
    ("rollout", "states", "ends"),
    [
        ({}, [("new", "silent"), ("old", "ready")], False),
        ({"paused": True}, [("new", "silent"), ("old", "ready")], True),
        ({"partition": 1}, [("new", "silent"), ("old", "ready")], True),
        ({"partition": 1}, [("new", "ready"), ("old", "ready")], True),
        ({}, [("new", "silent"), ("new", "ready")], True),
    ],
)
def test_rollout_without_a_surge_deletes_first_until_its_end(
    rollout: dict[str, Any], states: list[tuple[str, str]], ends: bool
) -> None:
    """Ten minutes after it ended."""
    failed = set_condition((), "Progressing", True, reason=Reason.SURGE_UNSCHEDULABLE, message="none", generation=1, now=NOW)
    status = Status(update_revision="new", conditions=failed, surge_failure_time="2026-01-02T02:54:05Z")
    groups = [make_in_state(str(index), *state) for index, state in enumerate(states)]
    assert surge_failure(groups, status, "new", Rollout(**rollout), NOW) == ("" if ends else "none")


async def test_partition_that_heals_changes_nothing() -> None:
    world = await world_with_routers(replicas=2)
    before, uids = world.groups, {name: pod["metadata"]["uid"] for name, pod in world.kube.of_kind(PODS).items()}
    world.routers.summary = summary(*(group(name) for name in before))
    world.cluster.lose_node("node-0", LONG_AGO)
    await world.reconcile()
    del world.kube.objects["nodes", "", "node-0"]
    await world.settle()
    assert (world.groups, world.deleted(), world.ready) == (before, set(), ("True", "Ready"))
    assert {name: pod["metadata"]["uid"] for name, pod in world.kube.of_kind(PODS).items()} == uids


@pytest.mark.parametrize(("now", "is_kept"), [("2026-01-02T03:04:10Z", True), ("2026-01-02T03:05:05Z", False)])
async def test_router_reports_before_its_kubelet_reports_it(now: str, is_kept: bool) -> None:
    """Its node is the first to return from a partition that is older than ten minutes. After a minute it must be ready."""
    world = await world_with_routers(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"mode": "None"}})
    before = world.groups
    world.routers.summary = summary(*(group(name) for name in before))
    world.kube.put(PODS, world.kube.of_kind(PODS)["chat-router-0"] | {"spec": {"nodeName": "node-0"}})
    for name in ("node-0", "node-1"):
        world.cluster.lose_node(name, LONG_AGO)
    await world.reconcile()
    assert world.ready == ("False", "Unreachable") and world.deleted() == set()
    ready = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"}]}
    world.kube.put(NODES, world.kube.of_kind(NODES)["node-0"] | {"status": ready})
    world.now = now
    await world.reconcile()
    assert world.deleted() == (set() if is_kept else before)


async def test_new_operator_asks_routers_before_it_deletes() -> None:
    world = await world_with_routers(replicas=2)
    before = world.groups
    world.routers.summary, world.routers.is_new = None, True
    world.cluster.lose_node("node-0", LONG_AGO)
    await world.reconcile()
    assert world.deleted() == set() and world.next_s == 10.0
    world.routers.is_new = False
    await world.reconcile()
    assert world.deleted() == before
