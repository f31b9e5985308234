"""One group after another where no scheduler places pods together: never two half ones, and a half one gives its devices back."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_operator.decide.groups import admission
from phalanx_operator.decide.state.snapshot import ObservedGroup
from phalanx_operator.kube.client import EVENTS, PODS, Denied
from phalanx_operator.kube.store import Key
from phalanx_operator.loop.placement_queue import CALLED_S, LONGEST_S, TOLD_S
from tests.control.builders import NOW, make_group
from tests.control.worlds import World

ONE, OTHER = ("team", "one"), ("team", "other")
GPU = "nvidia.com/gpu"
EARLIER = "2026-01-02T02:34:05Z"


async def test_waiting_service_is_woken_when_the_turn_is_free() -> None:
    world, other = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}), ("team", "other")
    woken: list[Key] = []
    world.reconciler = replace(world.reconciler, wake=woken.append)
    turns = world.reconciler.turns
    turns.take(GPU, other, "other-g-a", world.clock)
    await world.look()
    assert (world.groups, world.next_s) == (set(), TOLD_S)
    turns.forget(other)  # the service of this world is the first in line now
    turns.line(GPU, other, waits=True)
    await world.look()
    assert len(world.groups) == 1 and woken == []
    world.cluster.start_pods()
    await world.look()
    assert woken == [other]
    world.service["metadata"]["deletionTimestamp"] = NOW
    world.clock += CALLED_S
    await world.look()
    assert woken == [other, other]


def half(since: str, gang: str = "Fallback") -> ObservedGroup:
    group = make_group("a", ready=False, gang=gang, created=since)
    return replace(group, pods=(group.pods[0], replace(group.pods[1], node="", created=since)))


@pytest.mark.parametrize(
    ("group", "waits", "gives_up"),
    [
        (half(EARLIER), True, True),
        (half(NOW), True, False),
        (half(EARLIER, "Native"), False, False),
        (replace(half(NOW), pods=()), True, False),
        (replace(half(NOW), pods=(), short_since=EARLIER), True, True),
        (replace(half(EARLIER), pods=half(EARLIER).pods[:1], short_since=NOW), True, False),
        (replace(half(EARLIER), pods=half(EARLIER).pods[:1], short_since=EARLIER), True, True),
        (make_group("a", gang="Fallback"), False, False),
        (replace(half(EARLIER), terminating=True), False, False),
    ],
    ids=[
        *("half for long", "half", "another scheduler's", "no pods yet", "no pods for long"),
        *("a pod went a moment ago", "a pod is refused for long", "whole", "going"),
    ],
)
def test_which_groups_wait_and_which_give_up(group: ObservedGroup, waits: bool, gives_up: bool) -> None:
    assert bool(admission.unplaced([group])) is waits
    assert (group.uid in admission.given_up([group], 300.0, NOW)) is gives_up


def place(world: World, count: int, since: str) -> None:
    """Of every group that count of pods has a node, the others wait since then."""
    world.cluster.start_pods(ready=False)
    for name, pod in list(world.kube.of(PODS).items()):
        if int(name.rpartition("-")[2]) >= count:
            world.kube.put(PODS, waiting(pod, since))


def waiting(pod: dict[str, Any], since: str) -> dict[str, Any]:
    """The pod, as one that finds no node since then."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no gpu"}
    metadata = pod["metadata"] | {"creationTimestamp": since}
    return {**pod, "metadata": metadata, "spec": {}, "status": {"conditions": [condition]}}


async def test_groups_are_created_one_after_another() -> None:
    world = World(replicas=3, parallelism={"tensor": 2, "gpusPerPod": 1})
    for count in (1, 2, 3):
        await world.look()
        assert len(world.groups) == count
        await world.look()
        assert len(world.groups) == count, "not before all pods of the last one have nodes"
        world.cluster.start_pods()
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert world.condition("CapacityAvailable") == ("True", "Scheduled")
    assert world.status.gang == "Fallback"


async def test_groups_of_one_pod_are_created_at_once() -> None:
    world = World(replicas=3)
    await world.look()
    assert (len(world.groups), world.status.gang) == (3, "None")


async def test_half_scheduled_group_releases_devices_and_retries() -> None:
    world = World(replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.look()
    first = world.groups
    place(world, 1, world.now)
    await world.look()
    assert world.groups == first and not world.deleted()
    assert world.condition("CapacityAvailable") == ("False", "Unschedulable")
    world.now = "2026-01-02T03:05:06Z"
    await world.look()
    assert world.deleted() == first
    assert ("Normal", "GroupDeleted") in world.notes()
    await world.look()
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting")
    said = next(one.message for one in world.status.conditions if one.type == "CapacityAvailable")
    words = "1 of its 2 pods got nodes within 60 s: 0/2 nodes: no gpu"
    assert said == f"the next attempt follows after a pause; group {next(iter(first))} was given up: {words}", (
        "it names what is short"
    )
    for where in [w for w in world.kube.objects if w[0] in ("pods", "statefulsets")]:
        del world.kube.objects[where]
    await world.look()
    assert world.groups == set(), "it waits before it tries again"
    world.clock += LONGEST_S
    await world.look()
    assert len(world.groups) == 1


async def test_half_scheduled_group_retries_after_a_pause() -> None:
    """Otherwise it would take its devices again at once, and nobody else would ever get them."""
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.settle()
    whole = world.groups
    await world.change(replicas=2)
    await world.look()
    (half,) = world.groups - whole
    leave_half(world, half, world.now)
    world.now = "2026-01-02T03:05:06Z"
    await world.look()
    assert world.deleted() == {half}
    await world.look()
    assert world.groups == whole | {half}, "no other one is made while this one goes"
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting")
    for where in [w for w in world.kube.objects if w[2].startswith(half)]:
        del world.kube.objects[where]
    await world.look()
    assert world.groups == whole
    world.clock += LONGEST_S
    await world.look()
    assert len(world.groups) == 2


def leave_half(world: World, group: str, since: str) -> None:
    """The first pod of a group has a node, the others wait since then."""
    world.cluster.start_pods()
    for name, pod in list(world.kube.of(PODS).items()):
        if name.startswith(group) and not name.endswith("-0"):
            world.kube.put(PODS, waiting(pod, since))


async def test_group_with_a_refused_pod_releases_the_turn() -> None:
    """No pod waits for a node: the quota lets the StatefulSet make only the first one."""
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.look()
    first = world.groups
    world.cluster.start_pods(ready=False)
    del world.kube.objects["pods", "team", f"{next(iter(first))}-1"]
    await world.look()
    assert (world.condition("CapacityAvailable"), world.next_s) == (("True", "Scheduled"), 10.0), "it may come in a moment"
    turns, other = world.reconciler.turns, ("team", "other")
    assert turns.look(GPU, other, (), world.clock).why, "it has the turn"
    world.now = "2026-01-02T03:04:20Z"
    await world.look()
    assert world.condition("CapacityAvailable") == ("False", "Rejected") and not world.deleted()
    world.now = "2026-01-02T03:05:06Z"
    await world.look()
    assert world.deleted() == first
    message = next(note["note"] for note in world.kube.of(EVENTS).values() if note["reason"] == "GroupDeleted")
    assert message.endswith(f"1 could not be created: kubectl describe statefulset {next(iter(first))}")
    await world.look()
    assert turns.look(GPU, other, (), world.clock).why == ""


async def test_group_that_just_lost_a_pod_is_kept() -> None:
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"timeoutSeconds": 60}})
    await world.settle()
    before = world.groups
    world.now = "2026-01-05T00:00:00Z"
    for index in (0, 1):
        del world.kube.objects["pods", "team", f"{next(iter(before))}-{index}"]
    await world.look()
    assert (world.groups, world.deleted()) == (before, set())
    await world.settle()
    assert world.ready == ("True", "Ready") and not world.children.short


async def test_a_service_that_is_being_deleted_holds_no_turn() -> None:
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1})
    await world.look()
    turns, other = world.reconciler.turns, ("team", "other")
    assert turns.look(GPU, other, (), world.clock).why
    world.service["metadata"]["deletionTimestamp"] = NOW
    await world.look()
    assert turns.look(GPU, other, (), world.clock).why == ""


@pytest.mark.parametrize("what", ["create statefulsets", "apply services"])
async def test_a_service_that_is_refused_holds_no_turn(what: str) -> None:
    spec: dict[str, Any] = {"replicas": 1, "parallelism": {"tensor": 2, "gpusPerPod": 1}}
    refused = next(write for write in await World(**spec).look() if write.startswith(what))
    world, other = World(**spec), ("team", "other")
    world.kube.failures[refused] = Denied("no")
    woken: list[Key] = []
    world.reconciler = replace(world.reconciler, wake=woken.append)
    turns = world.reconciler.turns
    for service in (("team", "chat"), other):
        turns.line(GPU, service, waits=True)
    with pytest.raises(Denied):
        await world.look()
    assert turns.look(GPU, other, (), world.clock).why == ""
    assert woken == [other]


async def test_service_with_an_invalid_spec_holds_no_turn() -> None:
    world, other = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1}), ("team", "other")
    woken: list[Key] = []
    world.reconciler = replace(world.reconciler, wake=woken.append)
    turns = world.reconciler.turns
    await world.look()
    turns.line(GPU, other, waits=turns.look(GPU, other, (), world.clock).in_line)
    await world.change(parallelism={"tensor": 3, "gpusPerPod": 2})
    await world.look()
    assert world.ready == ("False", "SpecInvalid")
    assert woken == [other]
    assert turns.look(GPU, other, (), world.clock).why == ""


async def test_serving_group_is_kept_while_its_successor_would_wait() -> None:
    world = World(replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1})
    await world.settle()
    world.reconciler.turns.take(GPU, ("team", "other"), "other-g-a", world.clock)
    await world.change(engine={"maxModelLen": 512})
    await world.look()
    assert not world.draining() and not world.deleted()
    world.reconciler.turns.forget(("team", "other"))
    await world.look()
    assert len(world.draining()) == 1
