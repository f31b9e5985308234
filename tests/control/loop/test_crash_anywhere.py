"""An operator that is killed at any write leaves a state from which a new operator reaches the same end.

Killed before the write, or after it and before its answer. The API server stays; informers, caches and clocks start again.
"""

import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from phalanx_api import labels
from phalanx_api.labels import MANAGER
from phalanx_operator.kube.client import PODS, STATEFUL_SETS, Json, Resource
from tests.control.builders import NOW
from tests.control.fake_kube import FakeKube, ObjectKey
from tests.control.loop.scenes import LONG_AFTER, LONG_AGO, revisions
from tests.control.summaries import summary
from tests.control.worlds import World

T = TypeVar("T")
SPEC: dict[str, Any] = {"parallelism": {"tensor": 2, "gpusPerPod": 1}}
STRATEGIES = {"surge": {"maxSurge": 1, "maxUnavailable": 0}, "in place": {"maxSurge": 0, "maxUnavailable": 1}}
OWN_KINDS = {"statefulsets", "pods", "events", "inferenceservices"}
"""Kinds with drawn names, and the service with its conditions."""
MAX_RECONCILES = 40


class Killed(Exception):
    """The operator no longer runs."""


@dataclass(frozen=True)
class Crash:
    """The write that ends the operator, from 1; 0: no write does. `is_done`: the write happens, its answer is lost."""

    write: int = 0
    is_done: bool = False


class CrashingKube(FakeKube):
    """An API server with an operator that is killed at one write. Records the most groups at any write."""

    def __init__(self, crash: Crash, objects: dict[ObjectKey, Json]) -> None:
        super().__init__()
        self.objects = copy.deepcopy(objects)
        self._count = 1000  # above the versions of these objects
        self.crash = crash
        self.is_down = False
        self.max_groups = 0

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        return await self._answer(super().create(resource, body, dry_run=dry_run))

    async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = MANAGER) -> Json:
        return await self._answer(super().apply(resource, body, subresource=subresource, manager=manager))

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Any, *, subresource: str | None = None) -> Json:
        return await self._answer(super().merge(resource, namespace, name, patch, subresource=subresource))

    async def replace(self, resource: Resource, body: Json) -> Json:
        return await self._answer(super().replace(resource, body))

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        await self._answer(super().delete(resource, namespace, name, uid, grace_s=grace_s))

    async def _answer(self, write: Awaitable[T]) -> T:
        before = len(self.calls)
        try:
            answer = await write
        finally:
            live = [body for body in self.of_kind(STATEFUL_SETS).values() if "deletionTimestamp" not in body["metadata"]]
            self.max_groups = max(self.max_groups, len(live))
            if self.crash.is_done and before < self.crash.write == len(self.calls):
                self.is_down = True
        if self.is_down:
            raise Killed
        return answer

    def _record(self, verb: str, resource: Resource, name: str, subresource: str | None = None, *, write: bool = True) -> None:
        if self.is_down:
            raise Killed
        super()._record(verb, resource, name, subresource, write=write)
        if write and not self.crash.is_done and len(self.calls) == self.crash.write:
            self.is_down = True
            raise Killed


@dataclass(frozen=True)
class Start:
    """The API server's objects, and what the cluster does with them."""

    objects: dict[ObjectKey, Json]
    now: str = NOW
    hung: frozenset[str] = frozenset()
    """UIDs of pods, and revisions of groups, that never become ready."""

    def is_hung(self, pod: Json) -> bool:
        return bool(self.hung & {pod["metadata"]["uid"], pod["metadata"]["labels"].get(labels.REVISION)})


@dataclass
class Run:
    """Operators, one after another, on one API server. Routers move all streams of a draining group at once."""

    kube: CrashingKube
    start: Start
    deaths: int = 0
    world: World = field(init=False)

    def __post_init__(self) -> None:
        self.start_operator()

    def start_operator(self) -> None:
        self.kube.is_down = False
        self.world = World(self.kube)
        self.world.now = self.start.now

    async def settle(self) -> None:
        """Reconciles until nothing is written; a killed operator is replaced."""
        for _ in range(MAX_RECONCILES):
            self._start_pods()
            self.world.cluster.start_routers()
            self.world.cluster.start_router_pods()
            self.world.routers.summary = summary(evacuated=sorted(self.world.draining()))
            try:
                if not await self.world.reconcile():
                    return
            except Killed:
                self.deaths += 1
                self.start_operator()
        raise AssertionError(f"no end: {self.kube.calls[-8:]}")

    def _start_pods(self) -> None:
        """Replaces deleted pods, and starts all that are not hung."""
        former = self.kube.of_kind(PODS)
        for pod in former.values():
            if "deletionTimestamp" in pod["metadata"]:
                kept = {name: value for name, value in pod["metadata"].items() if not name.startswith("deletion")}
                self.kube.put(PODS, pod | {"metadata": kept | {"uid": f"new-{kept['uid']}"}})
        self.world.cluster.start_pods()
        for name, pod in self.kube.of_kind(PODS).items():
            if self.start.is_hung(pod):
                status = former[name]["status"] if name in former else unready(self.start.now)
                self.kube.put(PODS, pod | {"status": status})

    def end(self) -> dict[str, Any]:
        """Returns everything that must not depend on the crash: groups, pods, restarts, shared objects, and conditions."""
        return {
            "revisions": revisions(self.world),
            "sets": len(self.world.groups),
            "shared": {key: _content(body) for key, body in self.kube.objects.items() if key[0] not in OWN_KINDS},
            "restarts": sorted(
                body["metadata"].get("annotations", {}).get(labels.RESTARTS, "")
                for body in self.kube.of_kind(STATEFUL_SETS).values()
            ),
            "pods": sorted(pod["metadata"]["uid"] for pod in self.kube.of_kind(PODS).values()),
            "conditions": {(found.type, found.status, found.reason) for found in self.world.status.conditions},
            "replicas": self.world.service["spec"]["replicas"],
        }


def _content(body: Json) -> Json:
    """Returns an object without the fields that the API server sets."""
    metadata = {name: value for name, value in body["metadata"].items() if name in ("labels", "annotations")}
    return body | {"metadata": metadata}


def unready(since: str) -> Json:
    """Returns the status of an unready pod."""
    return {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": since}]}


def make_hung(world: World, group: str, since: str) -> frozenset[str]:
    """Makes the pods of a group unready since then. Returns their UIDs."""
    pods = [pod for name, pod in world.kube.of_kind(PODS).items() if name.startswith(f"{group}-")]
    return frozenset(world.kube.put(PODS, pod | {"status": unready(since)})["metadata"]["uid"] for pod in pods)


async def new_service(world: World) -> Start:
    return Start(World(**world.service["spec"]).kube.objects)


async def rollout(world: World) -> Start:
    await world.change(engine={"maxModelLen": 512})
    return Start(world.kube.objects)


async def scale_in(world: World) -> Start:
    await world.change(replicas=1)
    return Start(world.kube.objects)


async def hanging_group(world: World) -> Start:
    hung = make_hung(world, min(world.groups), LONG_AGO)
    return Start(world.kube.objects, hung=hung)


async def late_rollout(world: World) -> Start:
    """The new revision's first group misses its deadline."""
    first = world.groups
    await world.change(engine={"maxModelLen": 512})
    for _ in range(MAX_RECONCILES):
        await world.reconcile()
        world.routers.summary = summary(evacuated=sorted(world.draining()))
        world.cluster.start_pods()
        if new := world.groups - first:
            break
    make_hung(world, min(new), NOW)
    return Start(world.kube.objects, LONG_AFTER, frozenset({world.status.update_revision}))


async def too_few_replicas(world: World) -> Start:
    autoscaling = {"minReplicas": 4, "maxReplicas": 9, "targets": {"ttftP95Ms": 2000}}
    await world.change(autoscaling=autoscaling)
    return Start(world.kube.objects)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A change of a settled service."""

    change: Callable[[World], Awaitable[Start]]
    write: str
    """Start of a write that this change causes."""
    replicas: int = 2
    """Before the change."""
    groups: int = 2
    """After it."""
    ready: tuple[str, str] = ("True", "Ready")


SCENES = {
    "new service": Scene(change=new_service, write="create statefulsets"),
    "rollout": Scene(change=rollout, write="delete statefulsets"),
    "scale-in": Scene(change=scale_in, write="merge pods", replicas=3, groups=1),
    "restart": Scene(change=hanging_group, write="quick-delete pods"),
    "rollback": Scene(change=late_rollout, write="delete statefulsets", ready=("False", "RolledBack")),
    "autoscaler": Scene(change=too_few_replicas, write="merge inferenceservices/scale", groups=4),
}


async def start_of(scene: Scene, strategy: str) -> Start:
    """Returns the start of a scene: a settled service, and its change."""
    rollout = STRATEGIES[strategy] | {"progressDeadlineSeconds": 3600, "onFailure": "Rollback"}
    world = World(**SPEC, replicas=scene.replicas, rollout=rollout)
    world.routers.summary = summary()
    world.cluster.start_router_pods()
    await world.settle()
    return await scene.change(world)


async def run_with(crash: Crash, start: Start) -> Run:
    run = Run(CrashingKube(crash, start.objects), start)
    await run.settle()
    return run


@pytest.mark.parametrize("is_done", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SCENES)
async def test_killed_at_any_write_ends_the_same(name: str, strategy: str, is_done: bool) -> None:
    scene = SCENES[name]
    start = await start_of(scene, strategy)
    undisturbed = await run_with(Crash(), start)
    expected, limit = undisturbed.end(), max(scene.replicas, scene.groups) + STRATEGIES[strategy]["maxSurge"]
    assert (undisturbed.world.ready, list(expected["revisions"].values())) == (scene.ready, [scene.groups])
    assert any(call.startswith(scene.write) for call in undisturbed.kube.calls)
    assert not undisturbed.deaths and undisturbed.kube.max_groups <= limit
    assert not any(start.is_hung(pod) for pod in undisturbed.kube.of_kind(PODS).values())
    for write, call in enumerate(undisturbed.kube.calls, start=1):
        run = await run_with(Crash(write, is_done), start)
        assert run.deaths == 1, call
        assert run.end() == expected, f"killed at write {write}: {call}"
        assert run.kube.max_groups <= limit, f"killed at write {write}: {call}"
