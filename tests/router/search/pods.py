"""The API server's lists of leader and router pods, as routers watch them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from bench.virtual.cuts import Cuts
from bench.virtual.net import Process
from phalanx_router.links.endpoints import Endpoint, Leaders

WATCH_S = 0.5


class Pods:
    """Endpoints by UID. A watch of a router that is cut off from the API server keeps its last list."""

    def __init__(self, cuts: Cuts) -> None:
        self.api = Process("api")
        self.endpoints: dict[str, Endpoint] = {}
        self._cuts = cuts
        self._version = 0
        self._changed = asyncio.Event()

    def put(self, endpoint: Endpoint) -> None:
        """Adds or replaces a pod."""
        self.endpoints = {**self.endpoints, endpoint.key: endpoint}
        self._change()

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def leave(self, key: str) -> None:
        """Marks a pod as leaving."""
        if key in self.endpoints:
            self.put(replace(self.endpoints[key], is_leaving=True))

    def remove(self, key: str) -> None:
        """Removes a pod."""
        self.endpoints = {other: endpoint for other, endpoint in self.endpoints.items() if other != key}
        self._change()

    def watch(self, router: Process) -> "PodWatch":
        """Returns a router's watch."""
        return PodWatch(self, router)

    @property
    def version(self) -> int:
        """Number of changes."""
        return self._version

    async def next_change(self) -> None:
        """Waits until a pod changes."""
        await self._changed.wait()

    def can_reach(self, router: Process) -> bool:
        """Whether events reach the router."""
        return not self._cuts.is_cut(self.api, router)


class PodWatch:
    """Implements `phalanx_router.links.endpoints.LeaderSource`."""

    def __init__(self, pods: Pods, router: Process) -> None:
        self._pods, self._router = pods, router

    async def run(self, on_change: Callable[[Leaders], None]) -> None:
        """Calls `on_change` after each change that reaches the router."""
        seen = -1
        while True:
            if seen != self._pods.version and self._pods.can_reach(self._router):
                seen = self._pods.version
                on_change(self._pods.endpoints)
            if seen == self._pods.version:
                await self._pods.next_change()
            await asyncio.sleep(WATCH_S)
