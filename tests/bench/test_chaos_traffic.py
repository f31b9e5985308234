"""Clients of the chaos benchmark read the API server's streams."""

import asyncio

import pytest

from bench.chaos.traffic import TOKENS, Traffic
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError
from tests.frontend.fakes import FakeBackend, Script, seeded_script
from tests.router.api_servers import http_server


def refusing(_: object) -> list[Exception]:
    return [BackendError(503, "no_group", "no group is ready", retry_after_s=1.0)]


@pytest.mark.parametrize(
    ("script", "end"), [(seeded_script, "completed"), (refusing, "HTTP 503 no_group")], ids=["completed", "refused"]
)
async def test_answers_are_counted_by_how_they_ended(script: Script, end: str) -> None:
    backend = FakeBackend(script)
    (model, *_) = backend.assets().served_names
    served: list[bool] = []
    async with http_server(create_app(backend)) as address:
        traffic = Traffic(f"http://{address}", model, 2, lambda: served.append(True))
        traffic.start()
        async with asyncio.timeout(20):
            while not traffic.ends:
                await asyncio.sleep(0.02)
        ends = await asyncio.to_thread(traffic.stop)
    assert set(ends) == {end}, ends
    assert bool(served) == (end == "completed")
    assert {request.sampling.max_tokens for request in backend.requests} == {TOKENS}
