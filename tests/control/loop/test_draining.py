"""Drains: annotated, evacuated by routers, deleted; across operator restarts and cancellations."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api import labels
from phalanx_api.summary import Hotspot
from phalanx_operator.decide.groups.drain import (
    drained_reason,
    due_in_s,
    groups_to_evacuate,
    groups_without_successor,
    is_awaited,
    leader_marks,
)
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup
from phalanx_operator.kube.client import PODS, STATEFUL_SETS, Conflict, Gone
from phalanx_operator.observe.observe import parse_drain_mark
from tests.control.builders import NOW, make_group
from tests.control.fake_kube import FakeKube
from tests.control.loop.scenes import world_with_routers
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import KEY, World

LATER = "2026-01-02T03:14:05Z"
DRAINING = DrainMark("2026-01-02T03:04:00Z", "3 groups, 2 wanted")


def make_draining(**fields: Any) -> ObservedGroup:
    return make_group("a", draining=DRAINING, **fields)


def report(**fields: Any) -> Fleet:
    return fleet_of(summary(group("a", **fields), evacuated=["a"]))


@pytest.mark.parametrize(
    ("fleet", "now", "why"),
    [
        (Fleet(), NOW, "no router could hold a stream"),
        (Fleet(polled=1), NOW, ""),
        (Fleet(polled=1), LATER, "the drain timeout of 300 s is over"),
        (fleet_of(summary(group("a"))), NOW, ""),
        (report(running=2, waiting=0), NOW, ""),
        (report(running=0, waiting=1), NOW, ""),
        (report(running=0, waiting=0), NOW, "it has no streams"),
        (fleet_of(summary(evacuated=["a"]), summary()), NOW, ""),
        (fleet_of(summary(evacuated=["a"]), summary(evacuated=["a"])), NOW, "it has no streams"),
        (fleet_of(summary(evacuated=["a"]), polled=2), NOW, ""),
    ],
    ids=[
        *("no router", "no reports", "timeout", "not empty", "a running request", "a waiting request", "empty"),
        *("one of two", "both", "one of two answers"),
    ],
)
def test_when_a_group_is_drained(fleet: Fleet, now: str, why: str) -> None:
    assert drained_reason(make_draining(), fleet, 300, now) == why


def test_unreadable_drain_mark_does_not_keep_a_group() -> None:
    assert (
        drained_reason(make_group("a", draining=DrainMark("soon", "")), Fleet(polled=1), 300, NOW)
        == "the drain timeout of 300 s is over"
    )


def test_group_without_mark_is_never_drained() -> None:
    assert drained_reason(make_group("a"), Fleet(), 0, LATER) == ""
    assert due_in_s(make_group("a"), 300, NOW) is None
    assert due_in_s(make_draining(), 300, NOW) == 295


def test_routers_evacuate_failing_groups_before_draining_ones() -> None:
    evicted = make_group("z")
    evicted = replace(evicted, pods=(replace(evicted.pods[0], terminating=True, ready=False), *evicted.pods[1:]))
    assert groups_to_evacuate((make_draining(), make_group("b"), evicted, make_group("y", terminating=True)), ()) == [
        "y",
        "z",
        "a",
    ]


def test_leader_marks_follow_the_drain_mark() -> None:
    leader = replace(make_group("a").pods[0], uid="pod-1")
    plain = replace(make_group("a"), pods=(leader,))
    marked = replace(plain, draining=DRAINING)
    on, off = leader_marks((marked,), ()), leader_marks((replace(plain, pods=(replace(leader, is_marked_draining=True),)),), ())
    assert [(m.pod, m.uid, m.draining) for m in (*on, *off)] == [("a-0", "pod-1", True), ("a-0", "pod-1", False)]
    assert (
        leader_marks((plain, replace(marked, terminating=True), replace(marked, pods=(replace(leader, terminating=True),))), ())
        == []
    )


async def test_scale_in_drains_a_group_before_its_deletion() -> None:
    world = await world_with_routers()
    await world.change(replicas=2)
    writes = await world.reconcile()
    (victim,) = world.draining()
    assert world.draining()[victim] == f"{NOW} surplus 3 groups, 2 wanted"
    assert [w for w in writes if "events" not in w and "status" not in w] == [
        f"merge statefulsets {victim}",
        f"merge pods {victim}-0",
    ]
    assert (world.routers.policy.evacuate, world.routers.poll_s, world.next_s) == ([victim], 2.0, 2.0)
    for _ in range(3):
        assert not [w for w in await world.reconcile() if "statefulsets" in w or "pods" in w]
    phases = {g.name: g.phase for g in world.status.groups}
    assert (world.status.replicas, world.status.draining_replicas, phases[victim]) == (2, 1, "Draining")
    assert world.ready == ("True", "Ready")
    world.routers.summary = summary(evacuated=[victim])
    assert f"delete statefulsets {victim}" in await world.reconcile()
    await world.settle()
    assert len(world.groups) == 2 and victim not in world.groups
    assert (world.routers.policy.evacuate, world.routers.poll_s) == ([], 30.0)
    assert [reason for _, reason in world.events()].count("GroupDraining") == 1


async def test_unmovable_streams_delay_a_group_until_its_timeout() -> None:
    world = await world_with_routers(drain={"timeoutSeconds": 600})
    await world.change(replicas=2)
    await world.reconcile()
    world.now = "2026-01-02T03:14:04Z"
    assert not any(w.startswith("delete") for w in await world.reconcile())
    assert world.next_s == 1.0
    world.now = LATER
    (victim,) = world.draining()
    assert f"delete statefulsets {victim}" in await world.reconcile()
    assert f"quick-delete pods {victim}-0" in await world.reconcile()
    assert not any(w.startswith("quick-delete") for w in await world.reconcile())
    assert world.next_s and world.next_s > 1.0, "its deletion wakes the operator"


async def test_new_operator_continues_a_killed_operators_drain() -> None:
    world = await world_with_routers()
    await world.change(replicas=2)
    await world.reconcile()
    (victim,) = world.draining()
    other = World(world.kube)
    other.routers.summary = summary(group(victim, running=5))
    other.now = "2026-01-02T03:05:05Z"
    for _ in range(3):
        await other.reconcile()
    assert list(other.draining()) == [victim] and other.deleted() == set()
    assert other.draining()[victim].startswith(NOW)
    assert other.routers.policy.evacuate == [victim] and other.routers.policy.number > world.routers.policy.number
    other.routers.summary = summary(evacuated=[victim])
    await other.reconcile()
    assert other.deleted() == {victim}


async def test_new_operator_marks_the_leader_of_a_draining_group() -> None:
    world = await world_with_routers()
    await world.change(replicas=2)
    world.kube.failures |= {f"merge pods {name}-0": Gone("killed") for name in world.groups}
    await world.reconcile()
    (victim,) = world.draining()
    world.kube.failures.clear()
    assert f"merge pods {victim}-0" in await World(world.kube).reconcile()
    assert "annotations" in world.kube.of_kind(PODS)[f"{victim}-0"]["metadata"]


async def test_draining_group_that_is_wanted_again_stays() -> None:
    world = await world_with_routers()
    groups = world.groups
    await world.change(replicas=1)
    await world.reconcile()
    assert len(world.draining()) == 2
    await world.change(replicas=3)
    await world.reconcile()
    assert (world.draining(), world.groups, world.routers.policy.evacuate) == ({}, groups, [])
    await world.reconcile()
    assert not any(pod["metadata"].get("annotations") for pod in world.kube.of_kind(PODS).values())
    assert ("Normal", "GroupKept") in world.events()


async def test_stale_informer_chooses_no_second_victim() -> None:
    """Even if another group has fewer KV tokens by then."""
    world = await world_with_routers()
    first, second, third = sorted(world.groups)
    world.routers.summary = summary(group(first, live_tokens=5), group(second, live_tokens=50), group(third, live_tokens=70))
    await world.change(replicas=2)
    await world.reconcile()
    world.routers.summary = summary(group(first, live_tokens=50), group(second, live_tokens=5), group(third, live_tokens=70))
    await world.reconciler.reconcile(("team", "chat"))
    assert list(world.draining()) == [first]
    world.cluster.sync_informers()
    await world.reconcile()
    assert not world.children.pending


@pytest.mark.parametrize("note", [f"{NOW} by hand", None], ids=["replaced", "removed"])
async def test_later_mark_of_a_user_counts_at_once(note: str | None) -> None:
    """The user writes it before the informer reports the operator's own."""
    world = await world_with_routers()
    await world.change(replicas=2)
    await world.reconcile()
    (victim,) = world.draining()
    (uid,) = world.children.pending[KEY].drain_marks
    await world.kube.merge(STATEFUL_SETS, "team", victim, {"metadata": {"annotations": {labels.DRAINING: note}}})
    world.cluster.sync_informers()
    world.children.prune(KEY, NOW)
    assert KEY not in world.children.pending
    (observed,) = (s.group.draining for s in world.children.sets.of_service(KEY) if s.group.uid == uid)
    assert (observed is None) == (note is None)


async def test_conflict_of_an_annotation_is_no_end() -> None:
    """The error has it written again; another object of the name has a UID of its own."""
    world = await world_with_routers()
    await world.change(replicas=2)
    world.kube.failures |= {f"merge statefulsets {name}": Conflict("others write too") for name in world.groups}
    with pytest.raises(Conflict):
        await world.reconcile()
    assert world.draining() == {}
    world.kube.failures.clear()
    await world.reconcile()
    assert len(world.draining()) == 1


async def test_rollout_drains_groups_one_by_one() -> None:
    world = await world_with_routers()
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    for _ in range(30):
        await world.reconcile()
        assert len(world.draining()) + len(world.deleted()) <= 1
        world.routers.summary = summary(evacuated=list(world.draining()))
        world.cluster.start_pods()
    assert not old & world.groups and len(world.groups) == 3
    assert [reason for _, reason in world.events()].count("GroupDraining") == 3


async def test_requests_are_held_while_the_only_group_is_replaced() -> None:
    world = await world_with_routers(replicas=1)
    assert (world.routers.policy.max_held, world.routers.policy.hold_s) == (0, 0.0)
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    (old,) = world.draining()
    policy = world.routers.policy
    assert (policy.evacuate, policy.max_held, policy.hold_s) == ([old], 100, 600.0)
    world.routers.summary = summary(evacuated=[old])
    assert f"delete statefulsets {old}" in await world.reconcile()
    for _ in range(3):
        await world.reconcile()
        assert world.routers.policy.hold_s == 600.0, "its successor starts"
    await world.settle()
    assert (world.routers.policy.evacuate, world.routers.policy.hold_s) == ([], 0.0)


async def test_requests_are_not_held_for_an_impossible_group() -> None:
    world = await world_with_routers(replicas=1)
    await world.change(suspend=True)
    await world.reconcile()
    assert world.routers.policy.evacuate and (world.routers.policy.max_held, world.routers.policy.hold_s) == (0, 0.0)


@pytest.mark.parametrize(
    ("groups", "evacuate", "replicas", "awaited"),
    [
        ((make_group("a"),), [], 1, False),
        ((make_group("a"),), ["a"], 1, True),
        ((make_group("a"),), ["a"], 0, False),
        ((make_group("a"), make_group("b")), ["a"], 1, False),
        ((make_group("a", ready=False, created=NOW),), [], 1, True),
        ((make_group("a", ready=False, created="2026-01-01T00:00:00Z"),), [], 1, False),
        ((), [], 1, False),
    ],
    ids=["serves", "evacuated", "no group wanted", "another serves", "starts", "broken", "no group yet"],
)
def test_when_requests_are_held(groups: tuple[ObservedGroup, ...], evacuate: list[str], replicas: int, awaited: bool) -> None:
    assert is_awaited(groups, evacuate, replicas, NOW) is awaited


def test_groups_without_successor_of_their_revision() -> None:
    old, terminating = replace(make_draining(), revision="old"), make_group("b", terminating=True, revision="old")
    evicted = make_group("c", revision="older")
    same = replace(make_group("d"), draining=DRAINING)
    groups, evacuate = (old, terminating, evicted, same), ["a", "b", "c", "d"]
    assert groups_without_successor(groups, evacuate, same.revision, 2) == ["a", "b"]
    assert groups_without_successor(groups, evacuate, same.revision, 0) == ["a", "b", "d"], "no group is wanted"
    assert groups_without_successor(groups, ["d"], same.revision, 2) == []
    kept = make_group("e", revision="old")
    assert groups_without_successor((*groups, kept), evacuate, same.revision, 2) == [], "a group of that revision stays"


async def test_routers_receive_the_groups_without_successor() -> None:
    world = await world_with_routers(replicas=1)
    await world.change(engine={"maxModelLen": 512})
    for _ in range(2):
        await world.reconcile()
    (old,) = world.draining()
    assert (world.routers.policy.evacuate, world.routers.policy.without_successor) == ([old], [old])
    assert world.routers.policy.wanted
    other = await world_with_routers(replicas=2)
    await other.change(replicas=1)
    await other.reconcile()
    assert (other.routers.policy.evacuate, other.routers.policy.without_successor) == (list(other.draining()), [])
    await other.change(suspend=True)
    for _ in range(2):
        await other.reconcile()
    assert sorted(other.routers.policy.without_successor) == sorted(other.draining()) and len(other.draining()) == 2
    assert not other.routers.policy.wanted


async def test_routers_that_end_are_polled_for_their_streams() -> None:
    """A group that drains is not deleted before they are without streams there, and requests that they hold keep a group."""
    world = await world_with_routers(replicas=2, routers=2)
    leaving = world.kube.of_kind(PODS)["chat-router-1"]
    world.kube.put(PODS, leaving | {"metadata": leaving["metadata"] | {"deletionTimestamp": NOW}})
    await world.reconcile()
    assert [(target.uid, target.is_ready, target.is_leaving) for target in world.routers.targets] == [
        ("router-0", True, False),
        ("router-1", False, True),
    ]
    assert world.routers.policy.routers == 1, "quotas are of those that accept requests"


def straggler(name: str, since_s: float = 61.0, action: str = "evacuate") -> Hotspot:
    return Hotspot(group=name, cause="straggler", signal=2.5, median=1.0, since_s=since_s, action=action)


async def test_draining_straggler_is_replaced_without_reports() -> None:
    world = await world_with_routers(replicas=2)
    victim, other = sorted(world.groups)
    world.routers.summary = summary(hotspots=[straggler(victim)])
    await world.reconcile()
    assert list(world.draining()) == [victim]
    assert world.draining()[victim] == f"{NOW} straggler a straggler for 60 s"
    world.routers.summary = summary()
    for _ in range(3):
        await world.reconcile()
    assert list(world.draining()) == [victim]
    world.routers.summary = summary(evacuated=[victim], hotspots=[straggler(other)])
    await world.reconcile()
    assert world.deleted() == {victim} and len(world.groups) == 3
    world.now = "2026-01-01T00:09:00Z"  # the successor is minutes old
    world.cluster.start_pods()
    await world.reconcile()
    assert world.draining() == {}


async def test_stragglers_successor_serves_first_with_a_surge() -> None:
    world = await world_with_routers(replicas=2, rollout={"maxUnavailable": 0, "maxSurge": 1})
    before = world.groups
    victim = min(before)
    world.routers.summary = summary(hotspots=[straggler(victim)])
    await world.reconcile()
    (successor,) = world.groups - before
    body = world.kube.of_kind(STATEFUL_SETS)[successor]
    world.kube.put(STATEFUL_SETS, body | {"metadata": body["metadata"] | {"creationTimestamp": NOW}})
    for _ in range(3):
        await world.reconcile()
    assert (world.deleted(), world.draining()) == (set(), {}), "the successor starts"
    world.cluster.start_pods()
    await world.reconcile()
    assert list(world.draining()) == [victim]


@pytest.mark.parametrize(
    "hotspot",
    [
        straggler("x", since_s=59.0),
        straggler("x", action="weigh"),
        Hotspot(group="x", cause="kv", signal=1.0, median=0.5, since_s=99.0, action="migrate"),
    ],
)
async def test_no_other_hotspot_replaces_a_serving_group(hotspot: Hotspot) -> None:
    world = await world_with_routers(replicas=2)
    fields = {name: getattr(hotspot, name) for name in hotspot.__struct_fields__}
    world.routers.summary = summary(hotspots=[Hotspot(**fields | {"group": name}) for name in world.groups])
    await world.reconcile()
    assert world.draining() == {}


@pytest.mark.parametrize(
    ("note", "draining"),
    [
        ("2026-01-02T03:04:00Z straggler too slow", DrainMark("2026-01-02T03:04:00Z", "too slow", "straggler")),
        ("2026-01-02T03:04:00Z by hand", DrainMark("2026-01-02T03:04:00Z", "by hand")),
        ("", DrainMark("", "")),
    ],
)
def test_drain_marks_of_users_are_parsed(note: str, draining: DrainMark) -> None:
    assert parse_drain_mark({"annotations": {"phalanx.dev/draining": note}}) == draining


async def test_routers_evacuate_a_group_that_loses_a_pod() -> None:
    world = await world_with_routers(replicas=2)
    name = sorted(world.groups)[0]
    pod = world.kube.of_kind(PODS)[f"{name}-0"]
    world.kube.put(PODS, pod | {"metadata": pod["metadata"] | {"deletionTimestamp": NOW}})
    await world.reconcile()
    assert world.routers.policy.evacuate == [name]
    assert world.draining() == {} and world.deleted() == set()


async def test_drain_of_a_recreated_group_is_ignored() -> None:
    class Replaced(FakeKube):
        async def merge(self, resource: Any, namespace: str, name: str, patch: Any, *, subresource: str | None = None) -> Any:
            if resource.plural == "statefulsets":
                self.objects["statefulsets", namespace, name]["metadata"]["uid"] = "another"
                raise Conflict("metadata.uid: field is immutable")
            return await super().merge(resource, namespace, name, patch, subresource=subresource)

    world = World(Replaced(), replicas=2)
    world.cluster.start_router_pods()
    await world.settle()
    await world.change(replicas=1)
    await world.reconcile()
    assert world.draining() == {} and not world.children.pending


@pytest.mark.parametrize(("replicas", "exists"), [(2, True), (1, False), (0, False)])
async def test_disruption_budget_exists_for_more_than_one_group(replicas: int, exists: bool) -> None:
    world = World(replicas=3)
    await world.settle()
    await world.change(replicas=replicas)
    await world.settle()
    budgets = {where[2]: body["spec"] for where, body in world.kube.objects.items() if where[0] == "poddisruptionbudgets"}
    assert ("chat-groups" in budgets) is exists
    assert budgets["chat-router"]["maxUnavailable"] == 1
    if exists:
        budget = budgets["chat-groups"]
        assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
