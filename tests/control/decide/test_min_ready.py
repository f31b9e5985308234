"""How long a group has to be ready until the rollout counts on it: `rollout.minReadySeconds`."""

from dataclasses import replace

import pytest

from phalanx_api.conditions import find_condition
from phalanx_api.spec.lifecycle import Rollout
from phalanx_operator.decide.conditions.status import status
from phalanx_operator.decide.groups import progress
from phalanx_operator.decide.groups.rollout import next_step, run_to_end
from phalanx_operator.decide.state.groups import live, staying
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedPod
from phalanx_operator.kube.client import PODS
from tests.control.builders import NOW, make_desired, make_group, make_snapshot
from tests.control.conftest import Check
from tests.control.decide.test_rollout import shown, start_one
from tests.control.decide.test_rollout_small_cases import MOST_STEPS, STRATEGIES, checked, starts
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

MINUTE_AGO, NOT_YET = "2026-01-02T03:03:05Z", "2026-01-02T03:03:06Z"


def ready_since(*moments: str) -> ObservedGroup:
    pods = tuple(
        ObservedPod(name=f"a-{i}", index=i, owner_uid="uid-a", ready=True, ready_since=since) for i, since in enumerate(moments)
    )
    return make_group("a", pods=pods, size=len(pods))


@pytest.mark.parametrize(
    ("seen", "least_s", "young", "left_s"),
    [
        (ready_since(MINUTE_AGO), 60, False, None),
        (ready_since(NOT_YET), 60, True, 1.0),
        (ready_since(MINUTE_AGO, NOT_YET), 60, True, 1.0),
        (ready_since(NOW), 0, False, None),
        (ready_since(""), 60, False, None),
        (make_group("a", ready=False), 60, False, None),
    ],
    ids=["just long enough", "a second too short", "all pods count", "no time is asked for", "nobody knows", "not ready"],
)
def test_group_is_available_after_min_ready_seconds(seen: ObservedGroup, least_s: int, young: bool, left_s: float | None) -> None:
    rollout = Rollout.model_validate({"minReadySeconds": least_s})
    (found,) = progress.assess((seen,), rollout, NOW)
    assert (found.young, found.available) == (young, seen.ready and not young)
    if seen.ready:
        assert progress.left_s((seen,), "other", rollout, NOW) == left_s


@pytest.mark.parametrize("surge", [0, 1])
def test_no_group_is_given_up_while_another_is_young(surge: int) -> None:
    old = make_group("a", "old")
    groups = (old, make_group("b", "old"), make_group("c", young=True), *([make_group("d")] if surge else []))
    desired = make_desired(3, max_unavailable=1 - surge, max_surge=surge)
    assert next_step(desired, groups) is None
    step = next_step(desired, tuple(replace(each, young=False) for each in groups))
    assert step and len(step.drain) == 1


def aged(groups: tuple[ObservedGroup, ...], before: tuple[ObservedGroup, ...]) -> tuple[ObservedGroup, ...]:
    """A slow world in which who becomes ready is young for a moment."""
    was_ready = {each.uid for each in before if each.ready}
    return tuple(replace(each, young=each.ready and each.uid not in was_ready) for each in groups)


def test_golden_rollout(golden: Check) -> None:
    """Before the next group goes there is a step in which nothing is done: the last one has to prove itself."""
    groups = tuple(make_group(name, "old", created=name) for name in "abc")
    history = run_to_end(make_desired(3), groups, lambda now: aged(start_one(now), now))
    golden("rollouts/min-ready.txt", "\n".join(shown(*moment) for moment in history) + "\n")


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_every_small_rollout_ends_with_enough_available_groups(unavailable: int, surge: int) -> None:
    waits = 0
    for replicas in range(4):
        desired = make_desired(replicas, max_unavailable=unavailable, max_surge=surge)
        for start in starts():
            groups = start
            for moment in range(2 * MOST_STEPS):
                before = sum(each.available for each in staying(groups))
                step, after = checked(desired, groups, moment)
                if step and any(one.purpose == "revision" for one in step.drain):
                    kept = sum(each.available for each in staying(after))
                    assert kept >= min(before, replicas if surge else replicas - unavailable), (start, step)
                settled = aged(start_one(after), after)
                waits += step is None and any(each.young for each in groups)
                if step is None and settled == groups:
                    break
                groups = settled
            else:
                raise AssertionError(f"no end: {start}")
            assert [each.available for each in live(groups)] == [True] * replicas, start
    assert waits > 0, "a young group was waited for"


def test_new_groups_count_as_ready_not_available() -> None:
    seen = make_snapshot(make_group("a"), make_group("b", young=True))
    fleet = fleet_of(summary(group("a"), group("b")))
    told = status(seen, make_desired(2), fleet, suspended=False, now=NOW)
    assert (told.ready_replicas, told.available_replicas) == (2, 1)
    ready = find_condition(told.conditions, "Ready")
    assert ready and (ready.status, ready.reason) == ("False", "GroupsNotReady")
    assert ready.message == "1 of 2 groups have been ready for spec.rollout.minReadySeconds"
    available = find_condition(told.conditions, "Available")
    assert available and available.status == "True", "requests go there already"


def make_ready(world: World, groups: set[str], since: str) -> None:
    """The pods of these groups are ready since then."""
    for name, pod in world.kube.of(PODS).items():
        if name.rpartition("-")[0] in groups:
            condition = {"type": "Ready", "status": "True", "lastTransitionTime": since}
            world.kube.put(PODS, pod | {"status": {"conditions": [condition]}})


async def test_rollout_waits_min_ready_seconds_and_reconciles_in_time() -> None:
    world = World(replicas=2, rollout={"minReadySeconds": 120})
    await world.settle()
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.look()
    (first,) = world.draining()
    await world.look()
    assert world.deleted() == {first}
    world.cluster.start_pods()
    new = world.groups - old
    make_ready(world, new, NOW)
    await world.look()
    assert len(new) == 1 and not world.draining(), "the new one is too young"
    assert world.ready == ("False", "RollingOut") and world.next_s == 120.0
    world.now = "2026-01-02T03:06:05Z"
    await world.look()
    assert set(world.draining()) == old - {first}
    await world.look()
    world.cluster.start_pods()
    make_ready(world, world.groups - new, world.now)
    make_ready(world, new, NOW)
    await world.look()
    assert world.ready == ("False", "GroupsNotReady") and world.condition("Progressing") == ("True", "Scaling")
    world.now = "2026-01-02T03:08:05Z"
    await world.look()
    assert world.ready == ("True", "Ready") and world.condition("Progressing") == ("True", "Complete")
