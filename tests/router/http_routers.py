"""Routers at a URL over real leaders' links; only the engines are scripted."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.metrics import RouterMetrics
from phalanx_runtime.engine.open_requests import RequestSink
from tests.frontend.fakes import plain_tokens, tiny_assets
from tests.polling import until
from tests.router.api_servers import FakeEngine, http_server, running_leader
from tests.router.clients import ReceivedStream, read
from tests.router.fakes import make_settings

BODY: Mapping[str, Any] = {"prompt": "hello", "max_tokens": 40, "stream": True, "temperature": 1.0}
KEYS = [ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2")]


def draw(request: wire.Request, index: int) -> int:
    """A printable token that depends on prompt, index and, when sampling, the seed."""
    seed = request.sampling.seed if request.sampling.temperature > 0 else 0
    digest = hashlib.sha256(repr((request.prompt, seed, index)).encode()).digest()
    return plain_tokens()[int.from_bytes(digest[:4], "big") % len(plain_tokens())]


class PrintableEngine(FakeEngine):
    """Samples printable tokens, a step every few milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.known_assets = tiny_assets()
        self.draw = draw
        self.num_submitted = 0

    def submit(self, request: wire.Request, sink: RequestSink, move: str = "") -> int:
        self.num_submitted += 1
        return super().submit(request, sink, move)

    async def run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0.002)


@dataclass(slots=True)
class HttpRouter:
    """A running router at a URL."""

    url: str
    fleet: RouterBackend
    task: asyncio.Task[None]
    registry: CollectorRegistry

    async def kill(self) -> None:
        """Ends its links as a killed process does, without aborts."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def until_linked(self, count: int) -> None:
        """Waits for open links to `count` leaders."""
        await until(lambda: len(self.fleet.links.open_links()) >= count and self.fleet.links.num_ready)


@asynccontextmanager
async def running_router(
    *leaders: str, name: str = "router-1", find_s: float = 3.0, coalesces: bool = False, keys: Sequence[ApiKey] = KEYS
) -> AsyncIterator[HttpRouter]:
    """Serves a router over the leaders with these addresses."""
    settings = make_settings(patience_s=10, find_s=find_s, coalesces=coalesces)
    registry = CollectorRegistry()
    fleet = RouterBackend(settings, RouterMetrics(registry), draw=lambda: 0.0)
    task = asyncio.create_task(fleet.run(StaticLeaders(leaders)))
    app = create_app(fleet, registry=registry, keys=ApiKeys(keys) if keys else None, metrics_prefix="phalanx_router")
    try:
        async with http_server(app) as address:
            router = HttpRouter(f"http://{address}", fleet, task, registry)
            await router.until_linked(1 if leaders else 0)
            yield router
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running_engines(*engines: PrintableEngine) -> AsyncIterator[list[str]]:
    """Serves a leader over each of one or two engines; yields their addresses."""
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(engine.run()) for engine in engines]
        try:
            if len(engines) == 1:
                async with running_leader(engines[0]) as (address, _):
                    yield [address]
            else:
                async with running_leader(engines[0]) as (first, _), running_leader(engines[1]) as (second, _):
                    yield [first, second]
        finally:
            for run in runs:
                run.cancel()


async def undisturbed(body: Mapping[str, Any]) -> ReceivedStream:
    """The same request without a fault. The body contains the seed."""
    async with running_engines(PrintableEngine()) as leaders, running_router(*leaders) as router:
        return await read(router.url, body)
