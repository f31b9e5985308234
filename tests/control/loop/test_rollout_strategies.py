"""Rollout strategies in whole reconciles: surge and its fallback, partition, pause, deadline."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.spec.lifecycle import Drain, Rollout
from phalanx_operator.decide.groups import progress
from phalanx_operator.decide.state.snapshot import RestartRecord
from phalanx_operator.kube.client import PODS, STATEFUL_SETS
from phalanx_operator.render.revision import revision
from tests.control.builders import make_group, make_service, pod_body
from tests.control.loop.scenes import LONG_AFTER, leave_unplaced, revisions, settled_world

LATER = "2026-01-02T03:14:05Z"


@pytest.mark.parametrize(
    ("rollout", "replicas", "surge", "unavailable"),
    [
        ({}, 3, 0, 1),
        ({"maxSurge": "25%"}, 3, 1, 1),
        ({"maxSurge": "50%", "maxUnavailable": 0}, 3, 2, 0),
        ({"maxUnavailable": "50%"}, 5, 0, 2),
        ({"maxUnavailable": "10%"}, 5, 0, 1),
        ({"maxUnavailable": 9}, 3, 0, 3),
        ({"maxUnavailable": 1}, 0, 0, 1),
    ],
)
def test_counts_of_percentages(rollout: dict[str, Any], replicas: int, surge: int, unavailable: int) -> None:
    parsed = Rollout.model_validate(rollout)
    assert (parsed.surge(replicas), parsed.unavailable(replicas)) == (surge, unavailable)


def test_changed_strategy_replaces_no_group() -> None:
    plain = revision(make_service())
    assert revision(make_service(rollout={"maxSurge": 1, "partition": 2, "paused": True})) == plain
    assert revision(make_service(placement={"gang": {"timeoutSeconds": 5}})) == plain
    assert revision(make_service(rollout={"restartId": "a"})) != plain
    assert revision(make_service(placement={"gang": {"mode": "None"}})) != plain
    assert revision(make_service(placement={"nodeSelector": {"pool": "a"}})) != plain


async def test_surge_deletes_a_group_after_its_successor_serves() -> None:
    world = await settled_world(replicas=2, rollout={"maxSurge": 1, "maxUnavailable": 0})
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    assert len(world.groups) == 3 and not world.draining()
    world.cluster.start_pods()
    await world.reconcile()
    assert len(world.draining()) == 1 and set(world.draining()) < old
    await world.settle()
    assert len(world.groups) == 2 and not world.groups & old
    assert world.condition("Progressing") == ("True", "Complete")


async def test_old_groups_keep_size_and_spec_during_a_rollout() -> None:
    """The StatefulSet of an old group creates a lost worker again; the operator does not write it."""
    world = await settled_world(replicas=3, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"mode": "None"}})
    old, sizes, lost = world.kube.of_kind(STATEFUL_SETS), set[tuple[bool, int, int]](), ""
    await world.change(parallelism={"tensor": 4, "gpusPerPod": 1})
    for _ in range(30):
        writes = await world.reconcile()
        assert not {write for write in writes if write.startswith("apply statefulsets")}
        sets = world.kube.of_kind(STATEFUL_SETS)
        sizes |= {(name in old, body["spec"]["replicas"], ranks_in(body)) for name, body in sets.items()}
        if not lost and len(staying := set(old) & set(sets) - world.deleted()) < len(old):
            lost = f"{min(staying)}-1"
            del world.kube.objects["pods", "team", lost]
        world.cluster.start_pods()
    assert sizes == {(True, 2, 2), (False, 4, 4)} and lost
    assert len(world.groups) == 3 and not world.groups & set(old)


def ranks_in(group: dict[str, Any]) -> int:
    """Returns the ranks of a group, by the flags of its pods."""
    (flags,) = (c["args"] for c in group["spec"]["template"]["spec"]["containers"] if c["name"] == "runtime")
    return int(flags[flags.index("--tensor-parallel-size") + 1])


async def test_surge_without_capacity_deletes_first_until_the_end() -> None:
    world = await settled_world(replicas=3, rollout={"maxSurge": 1, "surgeTimeoutSeconds": 60})
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    surge = world.groups - old
    leave_unplaced(world, surge, world.now)
    await world.reconcile()
    assert not world.draining() and not world.deleted(), "it waits"
    world.now = LATER
    await world.reconcile()
    assert world.deleted() == surge, "the surge group is deleted"
    assert world.condition("Progressing") == ("True", "SurgeUnschedulable")
    assert world.events().count(("Warning", "SurgeUnschedulable")) == 1
    world.cluster.start_pods()
    for _ in range(20):
        await world.reconcile()
        removed = old - (world.groups - world.deleted() - set(world.draining()))
        new = world.groups - old - world.deleted()
        assert len(world.groups - world.deleted()) <= 3, "no surge"
        assert len(removed) <= len(new) + 1, "at most one is missing"
        world.cluster.start_pods()
    await world.settle()
    assert not world.groups & old and len(world.groups) == 3
    assert world.condition("Progressing") == ("True", "Complete")


async def test_abandoned_surge_group_ends_the_surge() -> None:
    gang = {"gang": {"mode": "Fallback", "timeoutSeconds": 30}}
    two_pods = {"tensor": 2, "gpusPerPod": 1}
    rollout = {"maxSurge": 1, "surgeTimeoutSeconds": 600}
    world = await settled_world(replicas=1, parallelism=two_pods, placement=gang, rollout=rollout)
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    surge = world.groups - old
    leave_unplaced(world, surge, world.now)
    world.now = LATER
    await world.reconcile()
    assert world.deleted() == surge
    assert world.condition("Progressing") == ("True", "SurgeUnschedulable")
    world.clock += 60.0
    for _ in range(4):
        await world.reconcile()
        world.cluster.start_pods()
        world.clock += 60.0
    await world.settle()
    assert not world.groups & old and len(world.groups) == 1


async def test_surge_without_capacity_waits_at_max_unavailable_zero() -> None:
    world = await settled_world(replicas=2, rollout={"maxSurge": 1, "maxUnavailable": 0, "surgeTimeoutSeconds": 60})
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    surge = world.groups - old
    leave_unplaced(world, surge, world.now)
    world.now = LATER
    for _ in range(3):
        await world.reconcile()
    assert not world.deleted() and not world.draining()
    assert world.condition("Progressing") == ("True", "SurgeUnschedulable")
    assert world.ready == ("False", "InsufficientCapacity")
    await world.settle()
    assert not world.groups & old, "capacity is available again"


async def test_partition_keeps_old_groups_until_it_is_lowered() -> None:
    world = await settled_world(replicas=3, rollout={"partition": 2})
    before = revisions(world)
    await world.change(engine={"maxModelLen": 512})
    await world.settle()
    assert sorted(revisions(world).values()) == [1, 2] and revisions(world)[next(iter(before))] == 2
    assert (world.ready, world.status.updated_replicas) == (("True", "Ready"), 1)
    assert world.condition("Progressing") == ("True", "Complete")
    assert world.status.current_revision != world.status.update_revision
    await world.change(rollout={"partition": 0})
    await world.settle()
    assert list(revisions(world)) == [world.status.update_revision]
    assert world.status.current_revision == world.status.update_revision


async def test_paused_rollout_scales_but_replaces_nothing() -> None:
    world = await settled_world(replicas=2, rollout={"paused": True})
    before = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.settle()
    assert world.groups == before
    assert world.condition("Progressing") == ("Unknown", "Paused")
    assert world.ready == ("False", "RollingOut")
    await world.change(replicas=3)
    await world.settle()
    assert before < world.groups and len(world.groups) == 3
    await world.change(rollout={"paused": False})
    await world.settle()
    assert not before & world.groups
    assert world.ready == ("True", "Ready")


def test_how_long_a_group_has_not_been_ready() -> None:
    now, created = "2026-01-02T03:04:05Z", "2026-01-01T00:00:00Z"
    old = make_group("a", ready=False, created=created)
    broken = replace(old, pods=tuple(replace(pod, unready_since="2026-01-02T03:03:05Z") for pod in old.pods))
    assert progress.unready_s(make_group("a", created=created), Drain(), now) is None
    assert progress.unready_s(broken, Drain(), now) == 60.0, "since its pods report it"
    assert progress.unready_s(replace(old, pods=()), Drain(), now) == progress.PODLESS_S, "not since its creation"
    restarted = replace(broken, restarts=RestartRecord(since="2026-01-02T02:04:05Z"))
    assert (progress.unready_s(restarted, Drain(), now), progress.pods_unready_s(restarted, now)) == (3600.0, 60.0)


async def test_pods_that_nodes_refuse_again_stop_a_rollout() -> None:
    """A kubelet without devices refuses each pod, and the StatefulSet controller creates the next one at once."""
    world = await settled_world(replicas=2, rollout={"progressDeadlineSeconds": 1800}, drain={"timeoutSeconds": 300})
    before = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    await world.reconcile()
    (group,) = world.groups - before
    for clock, reason in (("03:04:05", "Rolling"), ("03:39:19", "Rolling"), ("03:39:20", "ProgressDeadlineExceeded")):
        world.now = f"2026-01-02T{clock}Z"
        body = pod_body(world.kube.of_kind(STATEFUL_SETS)[group], 0, ready=False, uid=f"pod-{clock}")
        world.kube.put(PODS, body | {"metadata": body["metadata"] | {"creationTimestamp": world.now}})
        await world.reconcile()
        assert world.condition("Progressing")[1] == reason, f"at {clock}: 1800 s, and the time of a drain"
    assert len(before & world.groups - world.deleted()) == 1, "the other group serves"


async def test_late_rollout_stops_stalls_and_rolls_back() -> None:
    world = await settled_world(replicas=3, rollout={"maxUnavailable": 2, "progressDeadlineSeconds": 3600})
    first = world.groups
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    assert len(world.draining()) == 2
    await world.reconcile()
    world.cluster.start_pods(ready=False, reason="CrashLoopBackOff")
    for name in first & world.groups:
        pod = world.kube.of_kind(PODS)[f"{name}-0"]
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    world.now = LONG_AFTER
    await world.reconcile()
    await world.reconcile()
    assert world.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    kept = first & (world.groups - world.deleted())
    assert len(kept) == 1 and not world.draining(), "the ready group stays"
    since = [condition.last_transition_time for condition in world.status.conditions if condition.type == "Stalled"]
    writes = await world.reconcile()
    assert not [write for write in writes if "status" in write], "it is reported once"
    assert world.events().count(("Warning", "ProgressDeadlineExceeded")) == 1
    bad = world.groups - kept - world.deleted()
    await world.change(engine={})
    await world.reconcile()
    assert bad <= world.deleted(), "unready groups are deleted first, and at once"
    assert since and "Stalled" not in {condition.type for condition in world.status.conditions}
    await world.settle()
    assert kept < world.groups and len(world.groups) == 3 and world.ready == ("True", "Ready")
