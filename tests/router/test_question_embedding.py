"""Embeddings of questions: a slow, failing or unlike one is a miss of the semantic cache, and never fails a request."""

import asyncio
import base64
import json
import struct
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_frontend.openai.embedding.inputs import POOLED
from phalanx_frontend.stream.question_vectors import prepare
from phalanx_router.operator_endpoint import PURGE_PATH
from phalanx_router.responses.embedder import MAX_BODY_BYTES, MAX_CONCURRENT, PAUSE_S, Embedded, NotEmbedded, QuestionEmbedder
from tests.frontend.fakes import tiny_assets, tiny_tokenizer
from tests.polling import until
from tests.router.cached_routers import CACHE, SEMANTIC, cached_router, meaning, printing_leader
from tests.router.fakes import TOKEN, make_request
from tests.router.loads import FULL, ROOM, is_same
from tests.router.questions import (
    ASKED,
    CHAT,
    COMMON,
    COMPLETION,
    OTHER,
    SIMILAR,
    body,
    result_of,
    why,
)


async def test_model_without_embeddings_costs_clients_nothing() -> None:
    leader = printing_leader(assets=tiny_assets(embedding=None))
    async with cached_router(leader, cache=SEMANTIC) as router:
        responses = [await router.post(body(text), CHAT) for text in (ASKED, SIMILAR, SIMILAR)]
        assert [result_of(response) for response in responses] == ["miss", "miss", "exact"]
        assert router.num_embedded == 0 and await why(router, "no_embeddings") == 2
        assert await router.metric("embedder_failed", '{why="no_embeddings"}') == 1
        router.set_policy(CACHE)
        router.fleet.balancing.tick()
        assert await router.metric("embedder_failed", '{why="no_embeddings"}') == 0
        router.set_policy(SEMANTIC)
        await router.post(body(OTHER), CHAT)
        assert await router.metric("embedder_failed", '{why="no_embeddings"}') == 1


async def test_groups_without_vectors_are_a_miss() -> None:
    leader = printing_leader()
    leader.state = wire.State(serving=True, incarnation=1)
    async with cached_router(leader, cache=SEMANTIC) as router:
        assert result_of(await router.post(body(ASKED), CHAT)) == "miss"
        assert await why(router, "embeddings_unavailable") == 1 and await router.metric("entries") == 1


async def test_slow_embedding_is_a_miss_and_pauses_others() -> None:
    leader = printing_leader()
    leader.script.embed = lambda request: None
    async with cached_router(leader, cache=SEMANTIC) as router:
        assert result_of(await router.post(body(ASKED), CHAT)) == "miss"
        assert await why(router, "timeout") == 1 and await router.metric("embedder_failed", '{why="timeout"}') == 1
        assert result_of(await router.post(body(OTHER), CHAT)) == "miss"
        assert (await why(router, "paused"), router.num_embedded) == (1, 1) and PAUSE_S > 1
        await until(lambda: leader.aborted)
        assert router.num_computed == 2


async def test_failure_ends_with_the_semantic_half() -> None:
    leader = printing_leader()
    leader.script.embed = lambda request: None
    async with cached_router(leader, cache=SEMANTIC) as router:
        asking = asyncio.create_task(router.post(body(ASKED), CHAT))
        await until(lambda: leader.submitted)
        router.set_policy(CACHE)
        router.fleet.balancing.tick()
        assert result_of(await asking) == "miss" and await why(router, "timeout") == 1
        router.fleet.balancing.tick()
        assert await router.metric("embedder_failed", '{why="timeout"}') == 0


async def test_few_requests_wait_for_embeddings() -> None:
    leader = printing_leader()
    leader.script.embed = lambda request: None
    async with cached_router(leader, cache=SEMANTIC) as router:
        asked = [body(f"question {number}", max_tokens=1) for number in range(MAX_CONCURRENT + 3)]
        responses = await asyncio.gather(*(router.post(one, CHAT) for one in asked))
        assert {result_of(response) for response in responses} == {"miss"}
        assert await why(router, "busy") + await why(router, "paused") >= 3 and router.num_embedded <= MAX_CONCURRENT


async def test_client_that_leaves_ends_its_embedding() -> None:
    leader = printing_leader()
    leader.script.embed = lambda request: None
    async with cached_router(leader, cache=SEMANTIC) as router:
        headers = {"authorization": "Bearer sk-1"}
        asking = asyncio.create_task(router.http.post(CHAT, json=body(ASKED), headers=headers))
        await until(lambda: leader.submitted)
        asking.cancel()
        await until(lambda: leader.aborted)
        assert router.num_computed == 0 and await router.metric("misses_total") == 0


async def test_queued_requests_come_before_embeddings() -> None:
    leader = printing_leader()
    async with cached_router(leader, cache=SEMANTIC) as router:
        leader.load = FULL
        links = router.fleet.links
        await until(lambda: any(is_same(link.group_report.load, FULL) for link in links.serving()))
        asking = [asyncio.create_task(router.post({**COMMON, "prompt": [5, 6]}, COMPLETION))]
        await until(lambda: len(router.fleet.dispatcher.queue) == 1)
        asking.append(asyncio.create_task(router.post(body(ASKED), CHAT)))
        await until(lambda: len(router.fleet.dispatcher.queue) == 2)
        assert router.num_embedded == 0 and await why(router, "busy") == 1
        leader.load = ROOM
        assert [result_of(response) for response in await asyncio.gather(*asking)] == ["miss", "miss"]


async def test_vector_without_direction_is_a_miss() -> None:
    leader = printing_leader()
    leader.script.embed = lambda request: bytes(32)
    async with cached_router(leader, cache=SEMANTIC) as router:
        assert result_of(await router.post(body(ASKED), CHAT)) == "miss"
        assert await why(router, "no_direction") == 1


async def test_another_service_embeds() -> None:
    own, other = printing_leader(assets=tiny_assets(embedding=None)), printing_leader("other")
    async with cached_router(other, cache=None, keys=()) as embedder:
        policy = msgspec.structs.replace(SEMANTIC, embedder=embedder.http.base_url.netloc.decode())
        async with cached_router(own, cache=policy) as router:
            responses = [await router.post(body(text), CHAT) for text in (ASKED, SIMILAR)]
            assert result_of(responses[0]) == "miss" and str(result_of(responses[1])).startswith("semantic")
            assert (router.num_embedded, router.num_computed, embedder.num_embedded) == (0, 1, 2)


class PooledByLast:
    """A model whose questions and other texts are pooled alike."""

    async def pooled(self, text: str, *, is_question: bool) -> wire.Request:
        tokens = tiny_tokenizer().encode(text, add_special_tokens=False).ids
        return msgspec.structs.replace(make_request(tokens), sampling=POOLED, pooling="last")

    def text(self, tokens: Sequence[int]) -> str:
        raise NotImplementedError


async def test_vectors_of_another_prompt_do_not_compare() -> None:
    """Routers of two versions share vectors during an update."""
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        embedder = QuestionEmbedder(router.fleet, lambda why: None, time.monotonic)
        embedded = [await embedder.embed("france", PooledByLast(), "", is_question=is_question) for is_question in (True, False)]
        question, text = embedded
        assert isinstance(question, Embedded) and isinstance(text, Embedded)
        assert question.vector == text.vector and question.space != text.space and prepare("") in question.space


async def test_busy_threads_hold_up_no_request() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        may_end, threads = threading.Event(), ThreadPoolExecutor(1)
        threads.submit(may_end.wait)
        asyncio.get_running_loop().set_default_executor(threads)
        embedder = QuestionEmbedder(router.fleet, lambda why: None, time.monotonic, load_timeout_s=0.05)
        try:
            async with asyncio.timeout(20):
                assert await embedder.embed("france", PooledByLast(), "", is_question=True) == NotEmbedded("timeout")
        finally:
            may_end.set()


@asynccontextmanager
async def slow_embedder(body: bytes, status: int = 200) -> AsyncIterator[str]:
    """Serves `body`, of which the second half arrives later, at an address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.readline()).strip():
            pass
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        half = len(body) // 2
        writer.write(head.encode() + body[:half])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(body[half:])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


async def test_embedding_arrives_in_parts() -> None:
    vector = base64.b64encode(struct.pack("<4096f", *range(4096))).decode()
    answer = json.dumps({"data": [{"embedding": vector}], "model": "m"}).encode()
    async with slow_embedder(answer) as address:
        policy = msgspec.structs.replace(SEMANTIC, embedder=address)
        async with cached_router(printing_leader(), cache=policy) as router:
            responses = [await router.post(body(text), CHAT) for text in (ASKED, SIMILAR)]
            assert [result_of(response) for response in responses] == ["miss", "semantic; similarity=1.00"]


async def test_too_long_embedding_is_a_miss() -> None:
    async with slow_embedder(b" " * (MAX_BODY_BYTES + 2)) as address:
        async with cached_router(printing_leader(), cache=msgspec.structs.replace(SEMANTIC, embedder=address)) as router:
            assert result_of(await router.post(body(ASKED), CHAT)) == "miss"
            assert await why(router, "long_response") == 1


async def test_text_too_long_for_the_embedder_pauses_nothing() -> None:
    other = printing_leader("other", assets=tiny_assets(max_model_len=40))
    async with cached_router(other, cache=None, keys=()) as embedder:
        policy = msgspec.structs.replace(SEMANTIC, embedder=embedder.http.base_url.netloc.decode())
        async with cached_router(printing_leader(), cache=policy) as router:
            responses = [await router.post(body(text), CHAT) for text in (ASKED + " or" * 40, ASKED, SIMILAR)]
            assert [str(result_of(response))[:8] for response in responses] == ["miss", "miss", "semantic"]
            assert await why(router, "context_length_exceeded") == 1 and await why(router, "paused") == 0
            assert await router.metric("embedder_failed", '{why="context_length_exceeded"}') == 0


async def test_question_embedded_before_a_purge_is_not_stored() -> None:
    """The purge may follow a change of the embedder's weights."""
    own, other = printing_leader(), printing_leader("other")
    async with cached_router(other, cache=None, keys=()) as embedder:
        policy = msgspec.structs.replace(SEMANTIC, embedder=embedder.http.base_url.netloc.decode())
        async with cached_router(own, cache=policy) as router:
            own.load = FULL
            links = router.fleet.links
            await until(lambda: any(is_same(link.group_report.load, FULL) for link in links.serving()))
            asking = asyncio.create_task(router.post(body(ASKED), CHAT))
            await until(lambda: len(router.fleet.dispatcher.queue) == 1)
            await router.http.post(PURGE_PATH, headers={"authorization": f"Bearer {TOKEN}"})
            own.load = ROOM
            assert result_of(await asking) == "miss" and await router.metric("entries") == 1
            assert result_of(await router.post(body(SIMILAR), CHAT)) == "miss" and await why(router, "no_candidate") == 2
            assert result_of(await router.post(body(ASKED), CHAT)) == "exact"


async def test_purge_during_an_embedding_pauses_nothing() -> None:
    leader = printing_leader()
    async with cached_router(leader, cache=SEMANTIC) as router:

        def purge_first(request: wire.Request) -> bytes:
            router.fleet.forget_revisions()
            leader.script.embed = meaning
            return meaning(request)

        leader.script.embed = purge_first
        responses = [await router.post(body(text), CHAT) for text in (ASKED, OTHER, "please " + OTHER)]
        assert [str(result_of(response))[:8] for response in responses] == ["miss", "miss", "semantic"]
        assert await why(router, "unknown_revision") == 1 and await why(router, "paused") == 0


@pytest.mark.parametrize(("keys", "code"), [((ApiKey("x", "sk-9"),), "invalid_api_key"), (None, "unreachable")])
async def test_refusing_service_is_a_miss(keys: tuple[ApiKey, ...] | None, code: str) -> None:
    other = printing_leader("other")
    async with cached_router(other, cache=None, keys=keys or ()) as embedder:
        address = embedder.http.base_url.netloc.decode() if keys else "127.0.0.1:1"
        async with cached_router(printing_leader(), cache=msgspec.structs.replace(SEMANTIC, embedder=address)) as router:
            assert result_of(await router.post(body(ASKED), CHAT)) == "miss"
            assert await why(router, code) == 1
