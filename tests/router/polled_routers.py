"""Routers over fake leaders, polled for their summaries."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec

from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.backend import RouterBackend
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.fakes import TOKEN, FakeLeader, Leaders, make_settings

KEYS = (ApiKey("alice", "sk-alice"),)


class PolledRouter:
    """A router over fake leaders, with a client that polls it as the operator does."""

    def __init__(self, http: httpx.AsyncClient, fleet: RouterBackend, leaders: list[FakeLeader]) -> None:
        self.http = http
        self.fleet = fleet
        self.leaders = leaders

    async def post(self, content: bytes, token: str = TOKEN) -> httpx.Response:
        return await self.http.post(SUMMARY_PATH, content=content, headers={"authorization": f"Bearer {token}"})

    async def poll(self, wait_s: float = 0.0, policy: BalancePolicy | None = None) -> RouterSummary:
        response = await self.post(msgspec.json.encode(SummaryRequest(policy or BalancePolicy(), wait_s)))
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=RouterSummary)

    async def until_ready(self, count: int) -> None:
        await until(lambda: self.fleet.links.num_ready == count)


@asynccontextmanager
async def polled_router(*leaders: FakeLeader, ready: int | None = None) -> AsyncIterator[PolledRouter]:
    """Serves a router over these leaders; `ready` of them serve, all by default."""
    for leader in leaders:
        await leader.start()
    try:
        app, fleet = make_router(
            make_settings(tick_s=0.05), Leaders(*(leader.endpoint() for leader in leaders)), RouterOptions(keys=KEYS)
        )
        async with http_server(app) as address:
            async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=10) as http:
                router = PolledRouter(http, fleet, list(leaders))
                await router.until_ready(len(leaders) if ready is None else ready)
                yield router
    finally:
        for leader in leaders:
            await leader.stop()
