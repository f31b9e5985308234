"""A group leaves: noted, emptied by the routers, deleted; also over a restart and a change of mind."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.summary import Hotspot
from phalanx_operator.decide.groups.drain import for_good, is_awaited, left_s, marks, to_empty, why_over
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup
from phalanx_operator.kube.client import PODS, Conflict
from phalanx_operator.observe.observe import draining_of
from tests.control.builders import NOW, make_group
from tests.control.fake_kube import FakeKube
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

LATER = "2026-01-02T03:14:05Z"
GOING = DrainMark("2026-01-02T03:04:00Z", "3 groups, 2 wanted")


def going(**fields: Any) -> ObservedGroup:
    return make_group("a", draining=GOING, **fields)


def seen(**fields: Any) -> Fleet:
    return fleet_of(summary(group("a", **fields), emptied=["a"]))


@pytest.mark.parametrize(
    ("fleet", "now", "why"),
    [
        (Fleet(), NOW, "no router could hold a stream"),
        (Fleet(asked=1), NOW, ""),
        (Fleet(asked=1), LATER, "the drain timeout of 300 s is over"),
        (fleet_of(summary(group("a"))), NOW, ""),
        (seen(running=2, waiting=0), NOW, ""),
        (seen(running=0, waiting=1), NOW, ""),
        (seen(running=0, waiting=0), NOW, "it has no streams"),
        (fleet_of(summary(emptied=["a"]), summary()), NOW, ""),
        (fleet_of(summary(emptied=["a"]), summary(emptied=["a"])), NOW, "it has no streams"),
        (fleet_of(summary(emptied=["a"]), asked=2), NOW, ""),
    ],
    ids=[
        *("no router", "none heard", "time over", "not empty", "a stream of nobody's", "one waits", "empty"),
        *("one of two", "both", "one of two heard"),
    ],
)
def test_when_a_group_may_go(fleet: Fleet, now: str, why: str) -> None:
    assert why_over(going(), fleet, 300, now) == why


def test_unreadable_drain_note_does_not_keep_a_group() -> None:
    assert (
        why_over(make_group("a", draining=DrainMark("soon", "")), Fleet(asked=1), 300, NOW)
        == "the drain timeout of 300 s is over"
    )


def test_a_group_that_stays_is_never_over() -> None:
    assert why_over(make_group("a"), Fleet(), 0, LATER) == ""
    assert left_s(make_group("a"), 300, NOW) is None
    assert left_s(going(), 300, NOW) == 295


def test_routers_empty_failing_groups_before_leaving_ones() -> None:
    evicted = make_group("z")
    evicted = replace(evicted, pods=(replace(evicted.pods[0], leaving=True, ready=False), *evicted.pods[1:]))
    assert to_empty((going(), make_group("b"), evicted, make_group("y", terminating=True)), ()) == ["y", "z", "a"]


def test_marks_follow_the_note_and_come_off_again() -> None:
    leader = replace(make_group("a").pods[0], uid="pod-1")
    plain = replace(make_group("a"), pods=(leader,))
    noted = replace(plain, draining=GOING)
    on, off = marks((noted,), ()), marks((replace(plain, pods=(replace(leader, marked=True),)),), ())
    assert [(m.pod, m.uid, m.draining) for m in (*on, *off)] == [("a-0", "pod-1", True), ("a-0", "pod-1", False)]
    assert marks((plain, replace(noted, terminating=True), replace(noted, pods=(replace(leader, leaving=True),))), ()) == []


async def world_with_routers(replicas: int = 3, routers: int = 1, **spec: Any) -> World:
    world = World(replicas=replicas, **spec)
    world.cluster.start_router_pods(routers)
    world.routers.says = summary()
    await world.settle()
    return world


async def test_scale_in_empties_a_group_before_it_is_deleted() -> None:
    world = await world_with_routers()
    await world.change(replicas=2)
    writes = await world.look()
    (victim,) = world.draining()
    assert world.draining()[victim] == f"{NOW} surplus 3 groups, 2 wanted"
    assert [w for w in writes if "events" not in w and "status" not in w] == [
        f"merge statefulsets {victim}",
        f"merge pods {victim}-0",
    ]
    assert (world.routers.policy.empty, world.routers.hear_s, world.next_s) == ([victim], 2.0, 2.0)
    for _ in range(3):
        assert not [w for w in await world.look() if "statefulsets" in w or "pods" in w]
    phases = {one.name: one.phase for one in world.status.groups}
    assert (world.status.replicas, world.status.draining_replicas, phases[victim]) == (2, 1, "Draining")
    assert world.ready == ("True", "Ready")
    world.routers.says = summary(emptied=[victim])
    assert f"delete statefulsets {victim}" in await world.look()
    await world.settle()
    assert len(world.groups) == 2 and victim not in world.groups
    assert (world.routers.policy.empty, world.routers.hear_s) == ([], 30.0)
    assert [reason for _, reason in world.notes()].count("GroupDraining") == 1


async def test_unmovable_streams_delay_a_group_until_its_timeout() -> None:
    world = await world_with_routers(drain={"timeoutSeconds": 600})
    await world.change(replicas=2)
    await world.look()
    world.now = "2026-01-02T03:14:04Z"
    assert not any(w.startswith("delete") for w in await world.look())
    assert world.next_s == 1.0
    world.now = LATER
    (victim,) = world.draining()
    assert f"delete statefulsets {victim}" in await world.look()
    assert f"hurry pods {victim}-0" in await world.look()
    assert not any(w.startswith("hurry") for w in await world.look())
    assert world.next_s and world.next_s > 1.0, "its end wakes us; nothing else is due"


async def test_new_operator_continues_a_killed_operators_drain() -> None:
    world = await world_with_routers()
    await world.change(replicas=2)
    await world.look()
    (victim,) = world.draining()
    other = World(world.kube)
    other.routers.says = summary(group(victim, running=5))
    other.now = "2026-01-02T03:05:05Z"
    for _ in range(3):
        await other.look()
    assert list(other.draining()) == [victim] and other.deleted() == set()
    assert other.draining()[victim].startswith(NOW)
    assert other.routers.policy.empty == [victim] and other.routers.policy.number > world.routers.policy.number
    other.routers.says = summary(emptied=[victim])
    await other.look()
    assert other.deleted() == {victim}


async def test_operator_killed_after_the_note_marks_the_leader_later() -> None:
    world = await world_with_routers()
    await world.change(replicas=2)
    world.kube.failures |= {f"merge pods {name}-0": Conflict("killed") for name in world.groups}
    await world.look()
    (victim,) = world.draining()
    world.kube.failures.clear()
    assert f"merge pods {victim}-0" in await World(world.kube).look()
    assert "annotations" in world.kube.of(PODS)[f"{victim}-0"]["metadata"]


async def test_wanted_again_group_stays() -> None:
    world = await world_with_routers()
    groups = world.groups
    await world.change(replicas=1)
    await world.look()
    assert len(world.draining()) == 2
    await world.change(replicas=3)
    await world.look()
    assert (world.draining(), world.groups, world.routers.policy.empty) == ({}, groups, [])
    await world.look()
    assert not any(pod["metadata"].get("annotations") for pod in world.kube.of(PODS).values())
    assert ("Normal", "GroupKept") in world.notes()


async def test_stale_informer_chooses_no_second_victim() -> None:
    """Not even when by then another group has fewer tokens in its pages."""
    world = await world_with_routers()
    first, second, third = sorted(world.groups)
    world.routers.says = summary(group(first, live_tokens=5), group(second, live_tokens=50), group(third, live_tokens=70))
    await world.change(replicas=2)
    await world.look()
    world.routers.says = summary(group(first, live_tokens=50), group(second, live_tokens=5), group(third, live_tokens=70))
    await world.reconciler.reconcile(("team", "chat"))
    assert list(world.draining()) == [first]
    world.cluster.tell()
    await world.look()
    assert world.children.notes == {}


async def test_a_rollout_empties_one_group_after_the_other() -> None:
    world = await world_with_routers()
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    for _ in range(30):
        await world.look()
        assert len(world.draining()) + len(world.deleted()) <= 1
        world.routers.says = summary(emptied=list(world.draining()))
        world.cluster.start_pods()
    assert not old & world.groups and len(world.groups) == 3
    assert [reason for _, reason in world.notes()].count("GroupDraining") == 3


async def test_newcomers_are_held_while_the_only_group_is_replaced() -> None:
    world = await world_with_routers(replicas=1)
    assert (world.routers.policy.max_held, world.routers.policy.hold_s) == (0, 0.0)
    await world.change(engine={"maxModelLen": 512})
    await world.look()
    (old,) = world.draining()
    policy = world.routers.policy
    assert (policy.empty, policy.max_held, policy.hold_s) == ([old], 100, 600.0)
    world.routers.says = summary(emptied=[old])
    assert f"delete statefulsets {old}" in await world.look()
    for _ in range(3):
        await world.look()
        assert world.routers.policy.hold_s == 600.0, "its successor starts"
    await world.settle()
    assert (world.routers.policy.empty, world.routers.policy.hold_s) == ([], 0.0)


async def test_requests_are_not_held_for_an_impossible_group() -> None:
    world = await world_with_routers(replicas=1)
    await world.change(suspend=True)
    await world.look()
    assert world.routers.policy.empty and (world.routers.policy.max_held, world.routers.policy.hold_s) == (0, 0.0)


@pytest.mark.parametrize(
    ("groups", "empty", "wanted", "awaited"),
    [
        ((make_group("a"),), [], 1, False),
        ((make_group("a"),), ["a"], 1, True),
        ((make_group("a"),), ["a"], 0, False),
        ((make_group("a"), make_group("b")), ["a"], 1, False),
        ((make_group("a", ready=False, created=NOW),), [], 1, True),
        ((make_group("a", ready=False, created="2026-01-01T00:00:00Z"),), [], 1, False),
        ((), [], 1, False),
    ],
    ids=["serves", "emptied", "none wanted", "another serves", "starts", "broken", "not made yet"],
)
def test_when_newcomers_are_held(groups: tuple[ObservedGroup, ...], empty: list[str], wanted: int, awaited: bool) -> None:
    assert is_awaited(groups, empty, wanted, NOW) is awaited


def test_groups_that_get_no_successor_go_for_good() -> None:
    old, gone = replace(going(), revision="old"), make_group("b", terminating=True, revision="old")
    evicted = make_group("c", revision="older")
    same = replace(make_group("d"), draining=GOING)
    groups, empty = (old, gone, evicted, same), ["a", "b", "c", "d"]
    assert for_good(groups, empty, same.revision, 2) == ["a", "b"]
    assert for_good(groups, empty, same.revision, 0) == ["a", "b", "d"], "none is wanted any more"
    assert for_good(groups, ["d"], same.revision, 2) == []
    kept = make_group("e", revision="old")
    assert for_good((*groups, kept), empty, same.revision, 2) == [], "the group that stays may just be changing its leader's pod"


async def test_routers_receive_the_groups_that_leave() -> None:
    world = await world_with_routers(replicas=1)
    await world.change(engine={"maxModelLen": 512})
    for _ in range(2):
        await world.look()
    (old,) = world.draining()
    assert (world.routers.policy.empty, world.routers.policy.for_good) == ([old], [old])
    assert world.routers.policy.wanted
    other = await world_with_routers(replicas=2)
    await other.change(replicas=1)
    await other.look()
    assert (other.routers.policy.empty, other.routers.policy.for_good) == (list(other.draining()), [])
    await other.change(suspend=True)
    for _ in range(2):
        await other.look()
    assert sorted(other.routers.policy.for_good) == sorted(other.draining()) and len(other.draining()) == 2
    assert not other.routers.policy.wanted


def slow(name: str, since_s: float = 61.0, action: str = "evacuate") -> Hotspot:
    return Hotspot(group=name, cause="straggler", signal=2.5, median=1.0, since_s=since_s, action=action)


async def test_given_up_straggler_stays_given_up_without_reports() -> None:
    world = await world_with_routers(replicas=2)
    victim, other = sorted(world.groups)
    world.routers.says = summary(hotspots=[slow(victim), slow(other)])
    await world.look()
    assert list(world.draining()) == [victim]
    assert world.draining()[victim] == f"{NOW} straggler a straggler for 60 s"
    world.routers.says = summary()
    for _ in range(3):
        await world.look()
    assert list(world.draining()) == [victim]
    world.routers.says = summary(emptied=[victim], hotspots=[slow(other)])
    await world.look()
    assert world.deleted() == {victim} and len(world.groups) == 3
    world.now = "2026-01-01T00:09:00Z"  # the successor is minutes old
    world.cluster.start_pods()
    await world.look()
    assert world.draining() == {}


@pytest.mark.parametrize(
    "hotspot",
    [
        slow("x", since_s=59.0),
        slow("x", action="weigh"),
        Hotspot(group="x", cause="kv", signal=1.0, median=0.5, since_s=99.0, action="migrate"),
    ],
)
async def test_nothing_else_replaces_a_group_that_serves(hotspot: Hotspot) -> None:
    world = await world_with_routers(replicas=2)
    told = {name: getattr(hotspot, name) for name in hotspot.__struct_fields__}
    world.routers.says = summary(hotspots=[Hotspot(**told | {"group": name}) for name in world.groups])
    await world.look()
    assert world.draining() == {}


@pytest.mark.parametrize(
    ("note", "draining"),
    [
        ("2026-01-02T03:04:00Z straggler too slow", DrainMark("2026-01-02T03:04:00Z", "too slow", "straggler")),
        ("2026-01-02T03:04:00Z by hand", DrainMark("2026-01-02T03:04:00Z", "by hand")),
        ("", DrainMark("", "")),
    ],
)
def test_notes_of_people_are_read_too(note: str, draining: DrainMark) -> None:
    assert draining_of({"annotations": {"phalanx.dev/draining": note}}) == draining


async def test_routers_empty_a_group_that_loses_a_pod() -> None:
    world = await world_with_routers(replicas=2)
    name = sorted(world.groups)[0]
    pod = world.kube.of(PODS)[f"{name}-0"]
    world.kube.put(PODS, pod | {"metadata": pod["metadata"] | {"deletionTimestamp": NOW}})
    await world.look()
    assert world.routers.policy.empty == [name]
    assert world.draining() == {} and world.deleted() == set()


async def test_drain_note_of_a_recreated_group_is_ignored() -> None:
    class Replaced(FakeKube):
        async def merge(self, resource: Any, namespace: str, name: str, patch: Any, *, subresource: str | None = None) -> Any:
            if resource.plural == "statefulsets":
                raise Conflict("metadata.uid: field is immutable")
            return await super().merge(resource, namespace, name, patch, subresource=subresource)

    world = World(Replaced(), replicas=2)
    world.cluster.start_router_pods()
    await world.settle()
    await world.change(replicas=1)
    await world.look()
    assert world.draining() == {} and world.children.notes == {}


@pytest.mark.parametrize(("replicas", "there"), [(2, True), (1, False), (0, False)])
async def test_disruption_budget_exists_for_more_than_one_group(replicas: int, there: bool) -> None:
    world = World(replicas=3)
    await world.settle()
    await world.change(replicas=replicas)
    await world.settle()
    budgets = {where[2]: body["spec"] for where, body in world.kube.objects.items() if where[0] == "poddisruptionbudgets"}
    assert ("chat-groups" in budgets) is there
    assert budgets["chat-router"]["maxUnavailable"] == 1
    if there:
        ours = budgets["chat-groups"]
        assert (ours["maxUnavailable"], ours["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
