"""Clients of the chaos benchmark read the API server's streams."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from bench.chaos.questions import TOKENS, Question, shared_prompts
from bench.chaos.rungs import COMPRESSED, COUNTERS, PLAIN, Sizes, counts_of, with_rungs
from bench.chaos.traffic import COMPLETED, OTHER_TOKENS, Traffic
from phalanx_api import wire
from phalanx_api.spec.inference_service import InferenceService, parse
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError
from tests.cluster import service as svc
from tests.frontend.fakes import FakeBackend, Script, Step, seeded_script
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.http_routers import PrintableEngine, running_engines, running_router


def refusing(_: object) -> list[Exception]:
    return [BackendError(500, "no_group", "a group failed")]


def broken(request: wire.Request) -> list[Step]:
    return [*seeded_script(request)[:5], BackendError(502, "no_group", "a group failed")]


@pytest.mark.parametrize(
    ("script", "end"),
    [(seeded_script, COMPLETED), (refusing, "HTTP 500 no_group"), (broken, "error no_group")],
    ids=["completed", "refused", "lost"],
)
async def test_answers_are_counted_by_how_they_ended(script: Script, end: str) -> None:
    backend = FakeBackend(script)
    (model, *_) = backend.assets().served_names
    served: list[bool] = []
    async with http_server(create_app(backend)) as address:
        traffic = Traffic([f"http://{address}"], model, 2, lambda: served.append(True))
        traffic.start()
        async with asyncio.timeout(20):
            while not traffic.ends:
                await asyncio.sleep(0.02)
        ends = await asyncio.to_thread(traffic.stop)
    assert set(ends) == {end}, ends
    assert bool(served) == (script is not refusing)
    assert {request.sampling.max_tokens for request in backend.requests} == {TOKENS}


async def test_an_answer_with_other_tokens_is_counted() -> None:
    backend = FakeBackend(seeded_script)
    (model, *_) = backend.assets().served_names
    async with http_server(create_app(backend)) as address:
        traffic = Traffic([f"http://{address}"], model, 1, lambda: None, [Question("a", 1, (1,) * TOKENS)])
        traffic.start()
        async with asyncio.timeout(20):
            while not traffic.ends:
                await asyncio.sleep(0.02)
        assert set(await asyncio.to_thread(traffic.stop)) == {OTHER_TOKENS}


async def test_clients_resume_when_a_router_is_lost() -> None:
    """The routers and links are real, the engine is scripted."""
    engine = PrintableEngine()
    engine.hold = TOKENS // 2
    async with running_engines(engine) as leaders, AsyncExitStack() as stack:
        lost = await stack.enter_async_context(AsyncExitStack())
        first = await lost.enter_async_context(running_router(*leaders, keys=()))
        second = await stack.enter_async_context(running_router(*leaders, name="router-2", keys=()))
        served: list[bool] = []
        traffic = Traffic([first.url, second.url], "tiny", 1, lambda: served.append(True))
        traffic.start()
        await until(lambda: bool(served))
        await first.kill()
        await lost.aclose()
        engine.hold = 10**9
        await until(lambda: traffic.connections["resumed"] == 1)
        ends = await asyncio.to_thread(traffic.stop)
    assert set(ends) == {COMPLETED}, ends
    assert ends.total() == engine.num_submitted, "the stream was not computed again"
    assert traffic.connections["restarted"] == 0


def test_shared_prompts_differ_after_long_prefixes() -> None:
    prompts = shared_prompts()
    assert len(set(prompts)) == len(prompts) == 32
    assert len({prompt[:640] for prompt in prompts}) == 8


@pytest.mark.parametrize("sizes", [COMPRESSED, PLAIN], ids=["compressed", "plain"])
def test_manifest_with_rungs_is_valid(sizes: Sizes) -> None:
    body = svc.manifest("chaos", model="pvc://models/wide", replicas=3, router={"replicas": 2})
    service = parse(with_rungs(body | {"metadata": {"name": "chaos", "namespace": "n", "uid": "u"}}, sizes))
    assert isinstance(service, InferenceService), service
    spec = service.spec
    assert spec.router.response_cache.exact
    assert spec.engine.get_setting("host_cache_memory") == sizes.host_cache_memory
    assert spec.engine.get_setting("disk_cache_path") is not None


def test_counts_of_rungs_are_sums_over_pods() -> None:
    page = "# TYPE phalanx_host_loaded_pages counter\nphalanx_host_loaded_pages_total 3.0\n"
    assert counts_of([page, page]) == dict.fromkeys(COUNTERS, 0) | {"pages loaded from host memory": 6}
