"""Scripted routers over HTTP, and the operator's poller of their summaries."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from phalanx_operator.apply.certificates import OperatorIdentity
from phalanx_operator.kube.client import SECRETS
from phalanx_operator.kube.store import Key
from phalanx_operator.routers import PollTiming, RouterPoller, RouterTarget, poll_session
from tests.control.fake_kube import FakeKube

KEY = ("team", "chat")
TOKEN = "t0ken"
TIMING = PollTiming(pause_s=0.0, first_retry_s=0.01, max_bytes=100_000)


@dataclass
class FakeRouter:
    """Sends `answers` in order; without one, the poll hangs."""

    answers: asyncio.Queue[RouterSummary | int | bytes] = field(default_factory=asyncio.Queue)
    bodies: list[bytes] = field(default_factory=list)
    requests: list[SummaryRequest] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    address: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization", ""))
        self.bodies.append(await request.read())
        self.requests.append(msgspec.json.decode(self.bodies[-1], type=SummaryRequest))
        answer = await self.answers.get()
        if isinstance(answer, int):
            return web.Response(status=answer)
        return web.Response(body=answer if isinstance(answer, bytes) else msgspec.json.encode(answer))


@dataclass
class Scene:
    """Two routers and the operator's poller."""

    routers: list[FakeRouter]
    poller: RouterPoller
    kube: FakeKube
    woken: list[Key]
    now: list[float]
    """Time of the operator's clock."""

    @property
    def targets(self) -> list[RouterTarget]:
        return [RouterTarget(f"uid-{i}", router.address) for i, router in enumerate(self.routers)]

    def publish(self, *, poll_s: float = 15.0, count: int = 1, **policy: object) -> None:
        self.poller.publish(KEY, self.targets[:count], BalancePolicy(**policy), poll_s)  # type: ignore[arg-type]


@asynccontextmanager
async def polled_routers() -> AsyncIterator[Scene]:
    """Serves two routers; yields them with a poller of their summaries."""
    kube, woken, now = FakeKube(), list[Key](), [0.0]
    secret = {"token": base64.b64encode(TOKEN.encode()).decode()}
    kube.put(SECRETS, {"metadata": {"name": "chat-token", "namespace": "team"}, "data": secret})
    routers = [FakeRouter(), FakeRouter()]
    servers = []
    for router in routers:
        app = web.Application()
        app.router.add_post(SUMMARY_PATH, router.handle)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        router.address = f"127.0.0.1:{servers[-1].port}"
    async with poll_session() as http:
        poller = RouterPoller(kube, http, woken.append, OperatorIdentity(kube), TIMING, clock=lambda: now[0])
        try:
            yield Scene(routers, poller, kube, woken, now)
        finally:
            await poller.close()
            for server in servers:
                await server.close()
