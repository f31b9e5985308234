"""What is not done while many groups fail together, or after a change of the clock, and the condition that says so."""

from dataclasses import replace

import pytest

from phalanx_api.spec.lifecycle import RestartPolicy
from phalanx_api.status import RecoveryStatus
from phalanx_api.summary import Hotspot
from phalanx_operator.decide.groups import recovery
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, RestartRecord
from phalanx_operator.kube.client import EVENTS
from tests.control.builders import NOW, make_group, make_report
from tests.control.loop.scenes import LONG_AFTER, LONG_AGO, make_unready, overdue_world, world_with_routers
from tests.control.summaries import summary
from tests.control.worlds import World

POLICY = RestartPolicy()
MINUTE_AGO, HALF_MINUTE_AGO = "2026-01-02T03:03:05Z", "2026-01-02T03:03:35Z"


def spent(name: str) -> ObservedGroup:
    """Returns an unready group that was restarted more often than allowed."""
    return make_group(name, ready=False, restarts=RestartRecord(at=(NOW,) * (POLICY.max_group_restarts + 1)))


def slow(name: str) -> Hotspot:
    return Hotspot(group=name, cause="straggler", signal=2.5, median=1.0, since_s=61.0, action="evacuate")


@pytest.mark.parametrize(
    ("groups", "former", "lost"),
    [
        ([spent("a"), make_group("b"), make_group("c")], None, "a"),
        ([spent("a"), spent("b"), *(make_group(name) for name in "cdef")], None, "ab"),
        ([spent("a"), spent("b"), make_group("c")], None, "a"),
        ([spent("a"), spent("b"), spent("c")], (1, HALF_MINUTE_AGO), ""),
        ([spent("a"), spent("b"), spent("c")], (1, MINUTE_AGO), "a"),
        ([spent("a"), spent("b"), spent("c")], (2, MINUTE_AGO), ""),
        ([replace(spent("a"), terminating=True), spent("b"), make_group("c")], (1, HALF_MINUTE_AGO), ""),
        ([replace(spent("a"), terminating=True), spent("b"), make_group("c")], (1, MINUTE_AGO), "b"),
        ([spent("a"), make_group("b"), make_group("c")], (0, NOW), ""),
    ],
    ids=[
        *("one", "two of six", "two of three", "within the pause", "after it", "the second pause"),
        *("one terminates", "one terminates, after the pause", "after one of an old revision"),
    ],
)
def test_groups_are_given_up_one_at_a_time(groups: list[ObservedGroup], former: tuple[int, str] | None, lost: str) -> None:
    status = RecoveryStatus(revision="new", given_up=former[0], last_time=former[1]) if former else None
    fleet = Fleet(polled=1, answered=1, groups={group.name: make_report(group.name) for group in groups})
    assessed = recovery.assess(groups, fleet, POLICY, NOW, status)
    assert "".join(group.name for group in assessed if group.assessment.lost_reason) == lost
    kept = [group for group in assessed if group.restarts.at and not group.terminating and group.name not in lost]
    assert all(group.assessment.hold for group in kept)
    assert not any(group.assessment.exceeds_restart_budget for group in kept)


def held(world: World) -> float | None:
    labels = {"namespace": "team", "service": "chat"}
    return world.metrics.registry.get_sample_value("phalanx_service_disruptions_held", labels)


@pytest.mark.parametrize(("num_slow", "drained"), [(1, 1), (2, 0), (3, 0)])
async def test_no_straggler_is_replaced_while_many_are_slow(num_slow: int, drained: int) -> None:
    world = await world_with_routers(replicas=3)
    world.routers.summary = summary(hotspots=[slow(name) for name in sorted(world.groups)[:num_slow]])
    await world.reconcile()
    assert len(world.draining()) == drained
    if not drained:
        assert world.condition("DisruptionsHeld") == ("True", "StragglersTogether")
        assert ("Warning", "StragglersTogether") in world.events() and world.next_s == 10.0
        assert held(world) == 1
        world.routers.summary = summary(hotspots=[slow(min(world.groups))])
        await world.reconcile()
        assert len(world.draining()) == 1 and ("Normal", "DisruptionsResumed") in world.events()


CHANGE = "the API server's clock changed by +18000 s"


async def test_changed_clock_loses_no_group() -> None:
    """A node has just become silent, and the time is hours later at once."""
    world = await world_with_routers(replicas=2)
    before = world.groups
    world.cluster.lose_node("node-0", NOW)
    world.now, world.clock_reason = LONG_AFTER, CHANGE
    for _ in range(2):
        await world.reconcile()
    assert (world.deleted(), world.groups) == (set(), before)
    assert world.condition("DisruptionsHeld") == ("True", "ClockChanged")
    assert any(f"{CHANGE}: no age ends a group" in event["note"] for event in world.kube.of_kind(EVENTS).values())
    assert world.next_s == 10.0
    world.clock_reason = ""
    await world.reconcile()
    assert world.deleted() == before


async def test_changed_clock_ends_no_drain() -> None:
    world = await world_with_routers(replicas=2)
    await world.change(replicas=1)
    await world.reconcile()
    world.now, world.clock_reason = LONG_AFTER, CHANGE
    await world.reconcile()
    assert len(world.draining()) == 1 and world.deleted() == set()
    world.clock_reason = ""
    await world.reconcile()
    assert len(world.deleted()) == 1


async def test_changed_clock_keeps_a_successor() -> None:
    """Of a straggler, with a surge: the hold neither deletes the successor nor drains the straggler."""
    world = await world_with_routers(replicas=2, rollout={"maxUnavailable": 0, "maxSurge": 1})
    world.routers.summary = summary(hotspots=[slow(min(world.groups))])
    await world.reconcile()
    assert len(world.groups) == 3
    world.clock_reason = CHANGE
    for _ in range(2):
        await world.reconcile()
    world.cluster.start_pods()
    await world.reconcile()
    assert (len(world.groups), world.deleted(), world.draining()) == (3, set(), {})
    world.clock_reason = ""
    await world.reconcile()
    assert len(world.draining()) == 1


async def test_leaving_groups_do_not_hide_slow_ones() -> None:
    world = await world_with_routers(replicas=6)
    await world.change(replicas=4)
    await world.reconcile()
    staying = sorted(world.groups - world.draining().keys())
    world.routers.summary = summary(hotspots=[slow(name) for name in staying[:2]])
    await world.reconcile()
    assert len(world.draining()) == 2 and world.condition("DisruptionsHeld") == ("True", "StragglersTogether")


async def test_changed_clock_restarts_no_group() -> None:
    world = await overdue_world()
    world.clock_reason = CHANGE
    assert not [write for write in await world.reconcile() if "delete pods" in write]
    world.clock_reason = ""
    assert [write for write in await world.reconcile() if "delete pods" in write]


async def test_changed_clock_rolls_nothing_back() -> None:
    world = await world_with_routers(replicas=1, rollout={"onFailure": "Rollback", "progressDeadlineSeconds": 60})
    await world.change(engine={"maxModelLen": 512})
    for _ in range(3):
        await world.reconcile()
    make_unready(world, LONG_AGO)
    world.now, world.clock_reason = LONG_AFTER, CHANGE
    await world.reconcile()
    assert world.status.rollback is None
    world.clock_reason = ""
    await world.reconcile()
    assert world.status.rollback is not None
