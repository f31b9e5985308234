"""Group creation without a gang scheduler: one by one, and an incomplete group releases its devices."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.conditions import find_condition
from phalanx_api.status import Status
from phalanx_operator.decide.groups import admission
from phalanx_operator.decide.state.actions import CreateGroup, Plan
from phalanx_operator.decide.state.snapshot import ObservedGroup
from phalanx_operator.kube.client import EVENTS, PODS, Denied
from phalanx_operator.loop.placement_queue import MAX_PAUSE_S, REPORT_AFTER_S, TURN_TIMEOUT_S
from phalanx_operator.render.gangs import NoGang
from tests.control.builders import NOW, make_group, make_service
from tests.control.loop.scenes import make_unschedulable
from tests.control.worlds import World

GPU = "nvidia.com/gpu"
EARLIER = "2026-01-02T02:34:05Z"


async def test_waiting_service_is_woken_when_the_turn_is_free() -> None:
    world, other = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}), ("team", "other")
    queue = world.queue
    queue.take(GPU, other, "other-g-a", world.clock)
    await world.reconcile()
    assert (world.groups, world.next_s) == (set(), REPORT_AFTER_S)
    queue.forget(other)  # the service of this world is first in the queue
    queue.set_queued(GPU, other, is_queued=True)
    await world.reconcile()
    assert len(world.groups) == 1 and world.woken == []
    world.cluster.start_pods()
    await world.reconcile()
    assert world.woken == [other]
    world.service["metadata"]["deletionTimestamp"] = NOW
    world.clock += TURN_TIMEOUT_S
    await world.reconcile()
    assert world.woken == [other, other]


def resources_of(accelerator: str, template: str) -> dict[str, Any]:
    claims = [{"name": "gpus", "resourceClaimTemplateName": template}] if template else []
    return {"accelerator": {"resourceName": accelerator}, "claims": claims}


@pytest.mark.parametrize(
    ("ours", "theirs", "waits"),
    [
        ((GPU, ""), (GPU, ""), True),
        ((GPU, ""), ("amd.com/gpu", ""), False),
        ((GPU, "nic"), (GPU, ""), True),
        (("", "two-gpus"), ("", "two-gpus"), True),
        (("", "two-gpus"), ("", "four-gpus"), True),
        (("", "two-gpus"), (GPU, "nic"), False),
    ],
    ids=[
        *("same resource", "other resource", "same resource and a claim", "same template name", "other template"),
        "claim beside a resource",
    ],
)
async def test_services_of_all_namespaces_wait_for_shared_devices(
    ours: tuple[str, str], theirs: tuple[str, str], waits: bool
) -> None:
    spec: dict[str, Any] = {"replicas": 1, "parallelism": {"tensor": 2, "gpusPerPod": 1}}
    world = World(**spec, resources=resources_of(*ours))
    other = make_service(namespace="elsewhere", **spec, resources=resources_of(*theirs))
    todo = Plan(actions=(CreateGroup(name="other-g-a", why="too few"),), status=Status(), poll_s=1.0)
    world.reconciler.placement.apply(("elsewhere", "other"), other, NoGang("Fallback"), todo)
    await world.reconcile()
    assert len(world.groups) == (0 if waits else 1)


def incomplete(since: str, gang: str = "Fallback") -> ObservedGroup:
    group = make_group("a", ready=False, gang=gang, created=since)
    return replace(group, pods=(group.pods[0], replace(group.pods[1], node="", created=since)))


@pytest.mark.parametrize(
    ("group", "is_unplaced", "is_lost"),
    [
        (incomplete(EARLIER), True, True),
        (incomplete(NOW), True, False),
        (incomplete(EARLIER, "Native"), False, False),
        (replace(incomplete(NOW), pods=()), True, False),
        (replace(incomplete(NOW), pods=(), incomplete_since=EARLIER), True, True),
        (replace(incomplete(EARLIER), pods=incomplete(EARLIER).pods[:1], incomplete_since=NOW), True, False),
        (replace(incomplete(EARLIER), pods=incomplete(EARLIER).pods[:1], incomplete_since=EARLIER), True, True),
        (make_group("a", gang="Fallback"), False, False),
        (replace(incomplete(EARLIER), terminating=True), False, False),
    ],
    ids=[
        *("incomplete for long", "incomplete", "another scheduler", "no pods yet", "no pods for long"),
        *("a pod was just deleted", "a pod is rejected for long", "complete", "terminating"),
    ],
)
def test_unplaced_and_lost_groups(group: ObservedGroup, is_unplaced: bool, is_lost: bool) -> None:
    assert bool(admission.unplaced_groups([group])) is is_unplaced
    assert (group.uid in admission.placement_failures([group], 300.0, NOW)) is is_lost


def place(world: World, count: int, since: str) -> None:
    """Places the first `count` pods of each group; the others wait since `since`."""
    world.cluster.start_pods(ready=False)
    for name, pod in list(world.kube.of_kind(PODS).items()):
        if int(name.rpartition("-")[2]) >= count:
            world.kube.put(PODS, make_unschedulable(pod, since))


async def test_groups_are_created_one_after_another() -> None:
    world = World(replicas=3, parallelism={"tensor": 2, "gpusPerPod": 1})
    for count in (1, 2, 3):
        await world.reconcile()
        assert len(world.groups) == count
        await world.reconcile()
        assert len(world.groups) == count, "the last group has pods without nodes"
        world.cluster.start_pods()
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert world.condition("CapacityAvailable") == ("True", "Scheduled")
    assert world.status.gang == "Fallback"


async def test_groups_of_one_pod_are_created_at_once() -> None:
    world = World(replicas=3)
    await world.reconcile()
    assert (len(world.groups), world.status.gang) == (3, "None")


async def test_incomplete_group_releases_devices_and_retries() -> None:
    world = World(replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.reconcile()
    first = world.groups
    place(world, 1, world.now)
    await world.reconcile()
    assert world.groups == first and not world.deleted()
    assert world.condition("CapacityAvailable") == ("False", "Unschedulable")
    world.now = "2026-01-02T03:05:06Z"
    await world.reconcile()
    assert world.deleted() == first
    assert ("Normal", "GroupDeleted") in world.events()
    await world.reconcile()
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting")
    condition = find_condition(world.status.conditions, "CapacityAvailable")
    reason = "1 of its 2 pods got nodes within 60 s: 0/2 nodes: no gpu"
    message = f"the next attempt follows after a pause; group {next(iter(first))} was given up: {reason}"
    assert condition and condition.message == message
    for where in [w for w in world.kube.objects if w[0] in ("pods", "statefulsets")]:
        del world.kube.objects[where]
    await world.reconcile()
    assert world.groups == set(), "it pauses before the next attempt"
    world.clock += MAX_PAUSE_S
    await world.reconcile()
    assert len(world.groups) == 1


async def test_incomplete_group_retries_after_a_pause() -> None:
    """Without a pause it would take the devices again before any other service."""
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.settle()
    complete = world.groups
    await world.change(replicas=2)
    await world.reconcile()
    (partial,) = world.groups - complete
    place_first_pod(world, partial, world.now)
    world.now = "2026-01-02T03:05:06Z"
    await world.reconcile()
    assert world.deleted() == {partial}
    await world.reconcile()
    assert world.groups == complete | {partial}, "no group is created while this one terminates"
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting")
    for where in [w for w in world.kube.objects if w[2].startswith(partial)]:
        del world.kube.objects[where]
    await world.reconcile()
    assert world.groups == complete
    world.clock += MAX_PAUSE_S
    await world.reconcile()
    assert len(world.groups) == 2


def place_first_pod(world: World, group: str, since: str) -> None:
    """Places the first pod of a group; the others wait since `since`."""
    world.cluster.start_pods()
    for name, pod in list(world.kube.of_kind(PODS).items()):
        if name.startswith(group) and not name.endswith("-0"):
            world.kube.put(PODS, make_unschedulable(pod, since))


async def test_group_with_a_rejected_pod_releases_the_turn() -> None:
    """A quota allows only the first pod, so no pod waits for a node."""
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.reconcile()
    first = world.groups
    world.cluster.start_pods(ready=False)
    del world.kube.objects["pods", "team", f"{next(iter(first))}-1"]
    await world.reconcile()
    assert (world.condition("CapacityAvailable"), world.next_s) == (("True", "Scheduled"), 10.0), "the pod may appear soon"
    queue, other = world.queue, ("team", "other")
    assert queue.turn(GPU, other, (), world.clock).why, "the group has the turn"
    world.now = "2026-01-02T03:04:20Z"
    await world.reconcile()
    assert world.condition("CapacityAvailable") == ("False", "Rejected") and not world.deleted()
    world.now = "2026-01-02T03:05:06Z"
    await world.reconcile()
    assert world.deleted() == first
    message = next(note["note"] for note in world.kube.of_kind(EVENTS).values() if note["reason"] == "GroupDeleted")
    assert message.endswith(f"1 could not be created: kubectl describe statefulset {next(iter(first))}")
    await world.reconcile()
    assert queue.turn(GPU, other, (), world.clock).why == ""


async def test_group_that_just_lost_a_pod_is_kept() -> None:
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.settle()
    before = world.groups
    world.now = "2026-01-05T00:00:00Z"
    for index in (0, 1):
        del world.kube.objects["pods", "team", f"{next(iter(before))}-{index}"]
    await world.reconcile()
    assert (world.groups, world.deleted()) == (before, set())
    await world.settle()
    assert world.ready == ("True", "Ready") and not world.children.incomplete


async def test_a_service_that_is_being_deleted_holds_no_turn() -> None:
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1})
    await world.reconcile()
    queue, other = world.queue, ("team", "other")
    assert queue.turn(GPU, other, (), world.clock).why
    world.service["metadata"]["deletionTimestamp"] = NOW
    await world.reconcile()
    assert queue.turn(GPU, other, (), world.clock).why == ""


@pytest.mark.parametrize("call", ["create statefulsets", "apply services"])
async def test_rejected_service_holds_no_turn(call: str) -> None:
    spec: dict[str, Any] = {"replicas": 1, "parallelism": {"tensor": 2, "gpusPerPod": 1}}
    rejected = next(write for write in await World(**spec).reconcile() if write.startswith(call))
    world, other = World(**spec), ("team", "other")
    world.kube.failures[rejected] = Denied("no")
    queue = world.queue
    for service in (("team", "chat"), other):
        queue.set_queued(GPU, service, is_queued=True)
    with pytest.raises(Denied):
        await world.reconcile()
    assert queue.turn(GPU, other, (), world.clock).why == ""
    assert world.woken == [other]


async def test_service_with_an_invalid_spec_holds_no_turn() -> None:
    world, other = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}), ("team", "other")
    queue = world.queue
    await world.reconcile()
    queue.set_queued(GPU, other, is_queued=queue.turn(GPU, other, (), world.clock).is_queued)
    await world.change(parallelism={"tensor": 3, "gpusPerPod": 2})
    await world.reconcile()
    assert world.ready == ("False", "SpecInvalid")
    assert world.woken == [other]
    assert queue.turn(GPU, other, (), world.clock).why == ""


async def test_serving_group_is_kept_while_its_successor_would_wait() -> None:
    world = World(replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1})
    await world.settle()
    world.queue.take(GPU, ("team", "other"), "other-g-a", world.clock)
    await world.change(engine={"maxModelLen": 512})
    await world.reconcile()
    assert not world.draining() and not world.deleted()
    world.queue.forget(("team", "other"))
    await world.reconcile()
    assert len(world.draining()) == 1
