"""Routers with a response cache over scripted leaders, at a URL."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from fastapi import FastAPI

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy, ResponseCachePolicy
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_router.app import make_router
from phalanx_router.backend import RouterBackend
from tests.frontend.fakes import tiny_assets
from tests.frontend.serving import served
from tests.polling import until
from tests.router.fakes import FakeLeader, Leaders, Script, make_settings
from tests.router.http_routers import draw

CACHE = ResponseCachePolicy()
NAME = "phalanx_router_response_cache"


def printing_leader(group: str = "group-a", assets: wire.Assets | None = None, hold_at: int | None = None) -> FakeLeader:
    """A leader with printable tokens."""
    return FakeLeader(group, Script(assets=assets or tiny_assets(), draw=draw, hold_at=hold_at))


@dataclass(slots=True)
class CachedRouter:
    """A router with a client of its own."""

    http: httpx.AsyncClient
    fleet: RouterBackend
    source: Leaders
    leaders: Sequence[FakeLeader]

    @property
    def num_computed(self) -> int:
        """Requests that groups have received."""
        return sum(len(leader.submitted) for leader in self.leaders)

    async def post(
        self, body: Mapping[str, Any], path: str = "/v1/completions", key: str = "sk-1", **headers: str
    ) -> httpx.Response:
        """Posts a body with an API key."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await self.http.post(path, json=dict(body), headers={"authorization": f"Bearer {key}"} | names)
        assert response.status_code == 200, response.text
        return response

    async def metric(self, name: str, labels: str = "") -> float:
        """Value of a sample of the response cache."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{NAME}_{name}{labels} ")), 0.0)

    def set_policy(self, cache: ResponseCachePolicy | None) -> None:
        """Sends the router a policy, as the operator does."""
        number = self.fleet.balancing.policy.number + 1
        self.fleet.balancing.set_policy(BalancePolicy(number=number, response_cache=cache))


@asynccontextmanager
async def cached_router(
    *leaders: FakeLeader, cache: ResponseCachePolicy | None = CACHE, coalesces: bool = False
) -> AsyncIterator[CachedRouter]:
    """Serves a router over these leaders."""
    for leader in leaders:
        await leader.start()
    policy = BalancePolicy(response_cache=cache, coalesce_requests=coalesces)
    source = Leaders(*(leader.endpoint(created=str(number)) for number, leader in enumerate(leaders)))
    app, fleet = make_router(
        replace(make_settings(), policy=policy), source, keys=(ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2"))
    )
    assert isinstance(app, FastAPI)
    try:
        async with served(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:
            await until(lambda: fleet.links.num_ready == len(leaders))
            yield CachedRouter(http, fleet, source, leaders)
    finally:
        for leader in leaders:
            await leader.stop()
