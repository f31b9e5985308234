"""Clients of the chaos benchmark read the API server's streams."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from bench.chaos.__main__ import Result
from bench.chaos.questions import TOKENS, Question, answered, shared_questions, short_questions
from bench.chaos.rungs import COMPRESSED, COUNTERS, PLAIN, Sizes, counts_of, sibling_of, with_rungs
from bench.chaos.traffic import COMPLETED, OTHER_TOKENS, Traffic
from phalanx_api import wire
from phalanx_api.spec.inference_service import InferenceService, parse
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError
from phalanx_frontend.stream.lexical_guard import differs
from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.frontend.fakes import FakeBackend, Script, Step, seeded_script
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.http_routers import PrintableEngine, running_engines, running_router

METADATA = {"name": "chaos", "namespace": "n", "uid": "u"}


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
        traffic = Traffic([f"http://{address}"], model, 1, lambda: None, [Question("a", 1, frozenset({(1,) * TOKENS}), "b")])
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


def test_spellings_of_a_question_differ_by_spaces_alone() -> None:
    questions = shared_questions()
    assert len(set(questions)) == len(questions) == 32
    assert len({question.context for question in questions}) == 8
    for question in questions:
        alike = [other for other in questions if other.context == question.context and not differs(other.prompt, question.prompt)]
        assert {other.seed for other in alike} == {question.seed} and len(alike) == 2


@pytest.mark.parametrize("sizes", [COMPRESSED, PLAIN], ids=["compressed", "plain"])
def test_manifest_with_rungs_is_valid(sizes: Sizes) -> None:
    body = svc.manifest("chaos", model="pvc://models/wide", replicas=3, router={"replicas": 2})
    body = with_rungs(body, sizes)
    service, sibling = (parse(one | {"metadata": METADATA}) for one in (body, sibling_of(body, "sibling")))
    assert isinstance(service, InferenceService) and isinstance(sibling, InferenceService), (service, sibling)
    spec = service.spec
    assert spec.router.response_cache.exact and spec.router.response_cache.semantic
    assert spec.engine.get_setting("host_cache_memory") == sizes.host_cache_memory
    assert spec.engine.get_setting("host_cache_adaptive") and not sibling.spec.engine.get_setting("host_cache_adaptive")
    assert spec.engine.get_setting("disk_cache_path") is not None and sibling.spec.engine.get_setting("disk_cache_path") is None
    assert spec.rebalancing.share_pages and sibling.spec.rebalancing.share_pages


def test_counts_of_rungs_are_sums_over_pods() -> None:
    page = "# TYPE phalanx_host_loaded_pages counter\nphalanx_host_loaded_pages_total 3.0\n"
    hits = "# TYPE phalanx_router_response_cache_hits counter\n" + "".join(
        f'phalanx_router_response_cache_hits_total{{kind="{kind}"}} {count}\n' for kind, count in (("exact", 2), ("semantic", 1))
    )
    expected = {
        "pages loaded from host memory": 6,
        "requests answered from stored responses": 2,
        "requests answered from those to similar questions": 1,
    }
    assert counts_of([page, page, hits], [page, hits]) == dict.fromkeys(COUNTERS, 0) | expected


def test_answers_that_began_again_fail_the_run() -> None:
    result = Result(
        1, 1.0, [("pod", "chat-0", 1.0)], [], [], [], {COMPLETED: 3}, (5, 5), {}, connections={"restarted": 0, "broken": 2}
    )
    assert result.holds
    assert not replace(result, connections={"restarted": 1}).holds
    assert replace(result, connections={"restarted": 1}, rungs={"pages": 1}).holds


def test_short_questions_have_the_tokens_of_an_engine() -> None:
    questions = answered(short_questions()[:2], tiny_model.folder() / tiny_model.NAME, {"dtype": "float32"})
    assert [len(tokens) for question in questions for tokens in question.answers] == [TOKENS, TOKENS]
    assert questions[0].answers != questions[1].answers
