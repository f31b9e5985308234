"""The OpenAI suite over a router, its link and a leader that samples like a model."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy, ResponseCachePolicy
from phalanx_router.app import make_router
from phalanx_router.links.endpoints import Leaders
from tests.frontend.fakes import plain_tokens, tiny_assets
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import Target
from tests.frontend.serving import served_in_thread
from tests.router.fakes import FakeLeader, Script, make_settings


def draw_like_a_model(request: wire.Request, index: int) -> int:
    """A token that depends on prompt, index and, when sampling, the seed."""
    seed = request.sampling.seed if request.sampling.temperature > 0 else 0
    digest = hashlib.sha256(repr((request.prompt, seed, index)).encode()).digest()
    return plain_tokens()[int.from_bytes(digest[:4], "big") % len(plain_tokens())]


class LeaderOfItsOwn:
    """A source that runs its leader in the router's event loop."""

    async def run(self, on_change: Callable[[Leaders], None]) -> None:
        leader = FakeLeader(script=Script(assets=tiny_assets(), draw=draw_like_a_model, endless_from=200))
        await leader.start()
        try:
            on_change({"a": leader.endpoint()})
            await asyncio.Event().wait()
        finally:
            await leader.stop()


REUSE = BalancePolicy(coalesce_requests=True, response_cache=ResponseCachePolicy())


@pytest.fixture(scope="module", params=[BalancePolicy(), REUSE], ids=["each computed", "equal ones reused"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    app, _ = make_router(replace(make_settings(), policy=request.param), LeaderOfItsOwn())
    assert isinstance(app, FastAPI)
    with served_in_thread(app) as url, httpx.Client(trust_env=False) as http:
        while http.get(f"{url}/v1/models").status_code != 200:
            pass
        yield Target(url, "tiny", metrics_prefix="phalanx_router")


class TestRouter(OpenAISuite):
    """Everything in the suite."""
