"""An operator that is killed at any write leaves a state from which a new operator reaches the same end.

Killed before the write, or after it and before its answer. The API server stays; informers, caches and clocks start again.
"""

import copy
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from phalanx_operator.kube.client import STATEFUL_SETS, Json, Resource
from tests.control.fake_kube import FakeKube, ObjectKey
from tests.control.loop.scenes import revisions
from tests.control.summaries import summary
from tests.control.worlds import World

T = TypeVar("T")
SPEC: dict[str, Any] = {"replicas": 2, "parallelism": {"tensor": 2, "gpusPerPod": 1}}
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

    async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None) -> Json:
        return await self._answer(super().apply(resource, body, subresource=subresource))

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


@dataclass
class Run:
    """Operators, one after another, on one API server. Routers move all streams of a draining group at once."""

    kube: CrashingKube
    deaths: int = 0
    world: World = field(init=False)

    def __post_init__(self) -> None:
        self.start_operator()

    def start_operator(self) -> None:
        self.kube.is_down = False
        self.world = World(self.kube)

    async def settle(self) -> None:
        """Reconciles until nothing is written; a killed operator is replaced."""
        for _ in range(MAX_RECONCILES):
            self.world.cluster.start_pods()
            self.world.cluster.start_routers()
            self.world.cluster.start_router_pods()
            self.world.routers.summary = summary(emptied=sorted(self.world.draining()))
            try:
                if not await self.world.reconcile():
                    return
            except Killed:
                self.deaths += 1
                self.start_operator()
        raise AssertionError(f"no end: {self.kube.calls[-8:]}")

    def end(self) -> dict[str, Any]:
        """Returns everything that must not depend on the crash: groups, shared objects, and conditions."""
        return {
            "revisions": revisions(self.world),
            "sets": len(self.world.groups),
            "shared": {key: _content(body) for key, body in self.kube.objects.items() if key[0] not in OWN_KINDS},
            "conditions": {(found.type, found.status, found.reason) for found in self.world.status.conditions},
            "replicas": self.world.service["spec"]["replicas"],
        }


def _content(body: Json) -> Json:
    """Returns an object without the fields that the API server sets."""
    metadata = {name: value for name, value in body["metadata"].items() if name in ("labels", "annotations")}
    return body | {"metadata": metadata}


async def start_objects(scene: str, strategy: str) -> dict[ObjectKey, Json]:
    """Returns the objects at the start: a service without groups, or a settled one with a new spec."""
    world = World(**SPEC, rollout=STRATEGIES[strategy])
    if scene == "rollout":
        world.routers.summary = summary()
        world.cluster.start_router_pods()
        await world.settle()
        await world.change(engine={"maxModelLen": 512})
    return world.kube.objects


async def run_with(crash: Crash, objects: dict[ObjectKey, Json]) -> Run:
    run = Run(CrashingKube(crash, objects))
    await run.settle()
    return run


@pytest.mark.parametrize("is_done", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scene", ["new service", "rollout"])
async def test_killed_at_any_write_ends_the_same(scene: str, strategy: str, is_done: bool) -> None:
    objects = await start_objects(scene, strategy)
    undisturbed = await run_with(Crash(), objects)
    expected, limit = undisturbed.end(), SPEC["replicas"] + STRATEGIES[strategy]["maxSurge"]
    assert undisturbed.world.ready == ("True", "Ready") and list(expected["revisions"].values()) == [2]
    assert not undisturbed.deaths and undisturbed.kube.max_groups <= limit and len(undisturbed.kube.calls) > 10
    for write, call in enumerate(undisturbed.kube.calls, start=1):
        run = await run_with(Crash(write, is_done), objects)
        assert run.deaths == 1, call
        assert run.end() == expected, f"killed at write {write}: {call}"
        assert run.kube.max_groups <= limit, f"killed at write {write}: {call}"
