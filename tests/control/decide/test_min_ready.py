"""Groups count as available after `rollout.minReadySeconds`."""

import pytest

from phalanx_api.conditions import find_condition
from phalanx_api.status import Status
from phalanx_operator.decide.conditions.status import service_status
from phalanx_operator.decide.groups import progress
from phalanx_operator.decide.groups.rollout import next_step
from phalanx_operator.decide.state.groups import live_groups, staying_groups
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedPod, with_assessment
from phalanx_operator.kube.client import PODS
from tests.control.builders import NOW, make_desired, make_group, make_service, make_snapshot
from tests.control.conftest import Check
from tests.control.decide.rollouts import MAX_STEPS, STRATEGIES, check_step, describe, run_rollout, small_starts, start_one
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

MINUTE_AGO, TOO_LATE = "2026-01-02T03:03:05Z", "2026-01-02T03:03:06Z"


def ready_since(*moments: str) -> ObservedGroup:
    pods = tuple(
        ObservedPod(name=f"a-{i}", index=i, owner_uid="uid-a", ready=True, ready_since=since) for i, since in enumerate(moments)
    )
    return make_group("a", pods=pods, size=len(pods))


@pytest.mark.parametrize(
    ("observed", "min_ready_s", "is_below_min_ready", "due_in_s"),
    [
        (ready_since(MINUTE_AGO), 60, False, None),
        (ready_since(TOO_LATE), 60, True, 1.0),
        (ready_since(MINUTE_AGO, TOO_LATE), 60, True, 1.0),
        (ready_since(NOW), 0, False, None),
        (ready_since(""), 60, False, None),
        (make_group("a", ready=False), 60, False, None),
    ],
    ids=["long enough", "a second too short", "all pods count", "no minimum", "unknown time", "not ready"],
)
def test_group_is_available_after_min_ready_seconds(
    observed: ObservedGroup, min_ready_s: int, is_below_min_ready: bool, due_in_s: float | None
) -> None:
    spec = make_service(rollout={"minReadySeconds": min_ready_s}).spec
    (assessed,) = progress.assess((observed,), spec.rollout, NOW)
    assert assessed.assessment.is_below_min_ready == is_below_min_ready
    assert assessed.available == (observed.ready and not is_below_min_ready)
    if observed.ready:
        assert progress.due_in_s((observed,), Status(), "other", spec, NOW) == due_in_s


@pytest.mark.parametrize(("max_unavailable", "num_drained"), [(0, 1), (1, 2)])
def test_a_scale_in_spares_available_groups(max_unavailable: int, num_drained: int) -> None:
    """In a rollout the groups that remain may not be available yet."""
    old = tuple(make_group(name, "old") for name in "abc")
    new = tuple(make_group(name, is_below_min_ready=True) for name in "de")
    desired = make_desired(2, max_unavailable=max_unavailable, max_surge=1)
    assert len(next_step(desired, old + new).drain) == num_drained
    assert len(next_step(desired, old + tuple(with_assessment(g, is_below_min_ready=False) for g in new)).drain) >= 2


@pytest.mark.parametrize("surge", [0, 1])
def test_no_group_drains_while_another_is_below_min_ready(surge: int) -> None:
    old = make_group("a", "old")
    groups = (old, make_group("b", "old"), make_group("c", is_below_min_ready=True), *([make_group("d")] if surge else []))
    desired = make_desired(3, max_unavailable=1 - surge, max_surge=surge)
    assert next_step(desired, groups).actions == ()
    step = next_step(desired, tuple(with_assessment(g, is_below_min_ready=False) for g in groups))
    assert len(step.drain) == 1


def mark_new(groups: tuple[ObservedGroup, ...], before: tuple[ObservedGroup, ...]) -> tuple[ObservedGroup, ...]:
    """Marks the groups that became ready since `before`."""
    was_ready = {g.uid for g in before if g.ready}
    return tuple(with_assessment(g, is_below_min_ready=g.ready and g.uid not in was_ready) for g in groups)


def test_golden_rollout(golden: Check) -> None:
    """There is a step without actions before the next group drains."""
    groups = tuple(make_group(name, "old", created=name) for name in "abc")
    history = run_rollout(make_desired(3), groups, lambda after: mark_new(start_one(after), after))
    golden("rollouts/min-ready.txt", "\n".join(describe(*moment) for moment in history) + "\n")


@pytest.mark.parametrize(("unavailable", "surge"), STRATEGIES)
def test_every_small_rollout_ends_with_enough_available_groups(unavailable: int, surge: int) -> None:
    waits = 0
    for replicas in range(4):
        desired = make_desired(replicas, max_unavailable=unavailable, max_surge=surge)
        for start in small_starts():
            groups = start
            for moment in range(2 * MAX_STEPS):
                before = sum(g.available for g in staying_groups(groups))
                step, after = check_step(desired, groups, moment)
                if any(action.purpose == "revision" for action in step.drain):
                    kept = sum(g.available for g in staying_groups(after))
                    assert kept >= min(before, replicas if surge else replicas - unavailable), (start, step)
                settled = mark_new(start_one(after), after)
                waits += not step.actions and any(g.assessment.is_below_min_ready for g in groups)
                if not step.actions and settled == groups:
                    break
                groups = settled
            else:
                raise AssertionError(f"no end: {start}")
            assert [g.available for g in live_groups(groups)] == [True] * replicas, start
    assert waits > 0, "no step waited"


def test_new_groups_count_as_ready_not_available() -> None:
    snapshot = make_snapshot(make_group("a"), make_group("b", is_below_min_ready=True))
    fleet = fleet_of(summary(group("a"), group("b")))
    status = service_status(snapshot, make_desired(2), fleet, suspended=False, now=NOW)
    assert (status.ready_replicas, status.available_replicas) == (2, 1)
    ready = find_condition(status.conditions, "Ready")
    assert ready and (ready.status, ready.reason) == ("False", "GroupsNotReady")
    assert ready.message == "1 of 2 groups have been ready for spec.rollout.minReadySeconds"
    available = find_condition(status.conditions, "Available")
    assert available and available.status == "True", "it receives requests"


def make_ready(world: World, groups: set[str], since: str) -> None:
    """Sets since when the pods of these groups are ready."""
    for name, pod in world.kube.of_kind(PODS).items():
        if name.rpartition("-")[0] in groups:
            condition = {"type": "Ready", "status": "True", "lastTransitionTime": since}
            world.kube.put(PODS, pod | {"status": {"conditions": [condition]}})


async def test_rollout_waits_min_ready_seconds_and_reconciles_in_time() -> None:
    world = World(replicas=2, rollout={"minReadySeconds": 120})
    await world.settle()
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    (first,) = world.draining()
    await world.reconcile()
    assert world.deleted() == {first}
    world.cluster.start_pods()
    new = world.groups - old
    make_ready(world, new, NOW)
    await world.reconcile()
    assert len(new) == 1 and not world.draining(), "the new group is below the minimum"
    assert world.ready == ("False", "RollingOut") and world.next_s == 120.0
    world.now = "2026-01-02T03:06:05Z"
    await world.reconcile()
    assert set(world.draining()) == old - {first}
    await world.reconcile()
    world.cluster.start_pods()
    make_ready(world, world.groups - new, world.now)
    make_ready(world, new, NOW)
    await world.reconcile()
    assert world.ready == ("False", "GroupsNotReady") and world.condition("Progressing") == ("True", "Scaling")
    world.now = "2026-01-02T03:08:05Z"
    await world.reconcile()
    assert world.ready == ("True", "Ready") and world.condition("Progressing") == ("True", "Complete")
