"""Worlds in a state from which several tests of the loop start, and changes of their pods."""

from typing import Any

from phalanx_api import labels
from phalanx_operator.kube.client import PODS, STATEFUL_SETS
from tests.control.fake_kube import FakeKube
from tests.control.summaries import summary
from tests.control.worlds import World

LONG_AGO = "2026-01-01T00:00:00Z"
LONG_AFTER = "2026-01-02T09:00:00Z"


async def settled_world(**spec: Any) -> World:
    world = World(**spec)
    await world.settle()
    return world


async def world_with_routers(replicas: int = 3, routers: int = 1, **spec: Any) -> World:
    """Returns a settled world with idle router pods."""
    world = World(replicas=replicas, **spec)
    world.cluster.start_router_pods(routers)
    world.routers.summary = summary()
    await world.settle()
    return world


async def overdue_world(kube: FakeKube | None = None) -> World:
    """Returns a world with one group that has been unready past its startup time."""
    world = World(kube, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"mode": "None"}})
    await world.settle()
    make_unready(world, LONG_AGO)
    return world


def make_unready(world: World, since: str, uid: str = "") -> None:
    """Makes every pod unready since then; `uid` replaces the pods."""
    for name, pod in list(world.kube.of_kind(PODS).items()):
        if pod["metadata"]["labels"][labels.COMPONENT] != "group":
            continue
        condition = {"type": "Ready", "status": "False", "lastTransitionTime": since}
        kept = {field: value for field, value in pod["metadata"].items() if not field.startswith("deletion")}
        metadata = kept | {"uid": f"{uid}-{name}"} if uid else pod["metadata"]
        world.kube.put(PODS, {**pod, "metadata": metadata, "status": {"conditions": [condition]}})


def make_unschedulable(pod: dict[str, Any], since: str) -> dict[str, Any]:
    """Returns the pod, unschedulable since then."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no gpu"}
    metadata = pod["metadata"] | {"creationTimestamp": since}
    return {**pod, "metadata": metadata, "spec": {}, "status": {"conditions": [condition]}}


def leave_unplaced(world: World, names: set[str], since: str) -> None:
    """Makes the first pods of these groups unschedulable; all others run."""
    world.cluster.start_pods()
    for name in names:
        world.kube.put(PODS, make_unschedulable(world.kube.of_kind(PODS)[f"{name}-0"], since))


def revisions(world: World) -> dict[str, int]:
    """Returns the number of groups by revision, without terminating ones."""
    counts: dict[str, int] = {}
    for name, body in world.kube.of_kind(STATEFUL_SETS).items():
        if name not in world.deleted():
            label = body["metadata"]["labels"]["phalanx.dev/revision"]
            counts[label] = counts.get(label, 0) + 1
    return counts
