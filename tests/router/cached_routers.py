"""Routers with a response cache over scripted leaders, at a URL."""

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from fastapi import FastAPI

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy, ResponseCachePolicy
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_frontend.stream.question_vectors import prepare
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.resume.peers import Peers
from tests.frontend.fakes import EMBEDDING, tiny_assets, tiny_tokenizer
from tests.frontend.serving import served
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.fakes import FakeLeader, Leaders, Script, make_settings
from tests.router.http_routers import draw

CACHE = ResponseCachePolicy()
SEMANTIC = ResponseCachePolicy(semantic=True, similarity=0.95, recheck_share=0.0)
NAME = "phalanx_router_response_cache"


def meaning(request: wire.Request) -> bytes:
    """Vector of a text: its first letter is the topic, and each `please` moves it: to a similarity of 0.995, three to 0.958."""
    text = tiny_tokenizer().decode(request.prompt)
    before, after = prepare("\0").split("\0")
    words = text.removeprefix(before).removesuffix(after).lower().replace(",", "").split()
    vector = [0.0] * EMBEDDING.size
    topic = next((word for word in words if word != "please"), words[0])
    vector[ord(topic[0]) % (EMBEDDING.size - 1)] = 3.0
    vector[-1] = 0.3 * words.count("please")
    return struct.pack(f"<{EMBEDDING.size}f", *vector)


def printing_leader(group: str = "group-a", assets: wire.Assets | None = None, hold_at: int | None = None) -> FakeLeader:
    """A leader with printable tokens."""
    return FakeLeader(group, Script(assets=assets or tiny_assets(), draw=draw, hold_at=hold_at, embed=meaning))


async def no_stop() -> None:
    """Does nothing: the router stops with the test."""


@dataclass(slots=True)
class CachedRouter:
    """A router with a client of its own."""

    http: httpx.AsyncClient
    fleet: RouterBackend
    source: Leaders
    leaders: Sequence[FakeLeader]
    stop: Callable[[], Awaitable[None]] = no_stop

    @property
    def num_computed(self) -> int:
        """Requests that groups have received, without embeddings."""
        return len(self._received()) - self.num_embedded

    @property
    def num_embedded(self) -> int:
        """Embeddings that groups have received."""
        return sum(request.pooling is not None for request in self._received())

    def _received(self) -> list[wire.Request]:
        return [submit.request for leader in self.leaders for submit in leader.submitted]

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
    *leaders: FakeLeader,
    cache: ResponseCachePolicy | None = CACHE,
    coalesces: bool = False,
    keys: Sequence[ApiKey] = (ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2")),
) -> AsyncIterator[CachedRouter]:
    """Serves a router over these leaders."""
    for leader in leaders:
        await leader.start()
    policy = BalancePolicy(response_cache=cache, coalesce_requests=coalesces)
    source = Leaders(*(leader.endpoint(created=str(number)) for number, leader in enumerate(leaders)))
    app, fleet = make_router(replace(make_settings(), policy=policy), source, RouterOptions(keys=keys))
    assert isinstance(app, FastAPI)
    try:
        async with served(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:
            await until(lambda: fleet.links.num_ready == len(leaders))
            yield CachedRouter(http, fleet, source, leaders)
    finally:
        for leader in leaders:
            await leader.stop()


@asynccontextmanager
async def sharing_routers(
    names: Sequence[str], leader: FakeLeader, cache: ResponseCachePolicy | None
) -> AsyncIterator[list[CachedRouter]]:
    """Serves routers that are peers, over one leader."""
    await leader.start()
    base = replace(make_settings(), policy=BalancePolicy(response_cache=cache, routers=len(names)))
    lists, routers, peers = [Leaders() for _ in names], list[CachedRouter](), dict[str, Endpoint]()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(leader.stop)
        for name, found in zip(names, lists, strict=True):
            settings, source = replace(base, link=replace(base.link, router=name)), Leaders(leader.endpoint())
            app, fleet = make_router(
                settings, source, RouterOptions(keys=(ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2")), peers=found)
            )
            server = await stack.enter_async_context(AsyncExitStack())
            address = await server.enter_async_context(http_server(app))
            client = httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=20)
            routers.append(CachedRouter(await stack.enter_async_context(client), fleet, source, [leader], server.aclose))
            peers[name] = Endpoint(key=name, address=address, group=name)
        for router, found in zip(routers, lists, strict=True):
            found.change(*peers.values())
            replication = router.fleet.stream_registry.replication
            assert isinstance(replication, Peers)
            await until(lambda replication=replication: replication.peer is not None)  # type: ignore[misc]
            await until(lambda router=router: router.fleet.links.num_ready == 1)  # type: ignore[misc]
        yield routers
