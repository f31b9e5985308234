"""Several real clients of one router with equal requests: one computation, and the texts of separate ones."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.polling import until
from tests.router.clients import ReceivedStream, chars, read
from tests.router.http_routers import BODY, HttpRouter, PrintableEngine, running_engines, running_router

GREEDY: Mapping[str, Any] = {"model": "tiny", "prompt": "once upon", "max_tokens": 60, "temperature": 0}
SEEDED: Mapping[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 11}
CHAT: Mapping[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 60,
    "temperature": 0,
}


@asynccontextmanager
async def client_of(router: HttpRouter, key: str = "sk-1") -> AsyncIterator[AsyncOpenAI]:
    """A client with connections of its own."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http) as client:
        yield client


async def ask(router: HttpRouter, body: Mapping[str, Any], *, streamed: bool, stop: int = 10**9, key: str = "sk-1") -> str:
    """Text of one answer, by a client of its own that leaves a stream after `stop` characters."""
    async with client_of(router, key) as client:
        create: Any = client.chat.completions.create if "messages" in body else client.completions.create
        if not streamed:
            choice = (await create(**body)).choices[0]
            return str(choice.message.content if "messages" in body else choice.text)
        text = ""
        stream = await create(**body, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                text += (choice.delta.content or "") if "messages" in body else choice.text
            if len(text) >= stop:
                await stream.close()
                break
        return text


async def undisturbed(body: Mapping[str, Any]) -> str:
    async with running_engines(PrintableEngine()) as leaders, running_router(*leaders) as router:
        return await ask(router, body, streamed=False)


def joined(router: HttpRouter) -> float:
    return router.registry.get_sample_value("phalanx_router_coalesced_requests_total") or 0.0


@pytest.mark.parametrize("body", [GREEDY, SEEDED, CHAT], ids=["greedy", "seeded", "chat"])
async def test_clients_at_once_get_the_text_of_one_computation(body: Mapping[str, Any]) -> None:
    whole, engine = await undisturbed(body), PrintableEngine()
    engine.hold = 0
    async with running_engines(engine) as leaders, running_router(*leaders, coalesces=True) as router:
        clients = [asyncio.create_task(ask(router, body, streamed=True))]
        await until(lambda: engine.num_submitted == 1)
        clients += [asyncio.create_task(ask(router, body, streamed=bool(number % 2))) for number in range(5)]
        await until(lambda: joined(router) == 5)
        engine.hold = 10**9
        assert await asyncio.gather(*clients) == [whole] * 6
    assert (engine.num_submitted, engine.aborted) == (1, [])


@pytest.mark.parametrize("seed", range(2))
async def test_clients_come_and_leave_at_random(seed: int) -> None:
    chance, whole, engine = random.Random(seed), await undisturbed(GREEDY), PrintableEngine()
    async with running_engines(engine) as leaders, running_router(*leaders, coalesces=True) as router:

        async def visit(number: int) -> str:
            await asyncio.sleep(chance.uniform(0, 0.15))
            stop = chance.choice([1, 20, 10**9])
            text = await ask(router, GREEDY, streamed=chance.random() < 0.7 or stop < 100, stop=stop)
            assert text == whole if stop > 100 else whole.startswith(text) and len(text) >= stop
            return text

        await asyncio.gather(*(visit(number) for number in range(10)))
        await until(lambda: not router.fleet.sessions)
        assert joined(router) == 10 - engine.num_submitted > 0
    assert not engine.submitted, "no computation is left over"


async def test_choices_of_one_greedy_request_are_computed_once() -> None:
    engine = PrintableEngine()
    async with (
        running_engines(engine) as leaders,
        running_router(*leaders, coalesces=True) as router,
        client_of(router) as client,
    ):
        answer = await client.completions.create(**GREEDY, n=3)
        assert len({choice.text for choice in answer.choices}) == 1
        assert (engine.num_submitted, joined(router)) == (1, 2)
        sampled = await client.completions.create(**SEEDED, n=3)
        assert len({choice.text for choice in sampled.choices}) == 3, "each choice has its own seed"
        assert engine.num_submitted == 4


async def test_each_client_has_its_own_stop_strings() -> None:
    whole, engine = await undisturbed(GREEDY), PrintableEngine()
    engine.hold = 0
    stop = whole[20:23]
    async with running_engines(engine) as leaders, running_router(*leaders, coalesces=True) as router:
        first = asyncio.create_task(ask(router, {**GREEDY, "stop": [stop]}, streamed=True))
        await until(lambda: engine.num_submitted == 1)
        second = asyncio.create_task(ask(router, GREEDY, streamed=True))
        await until(lambda: joined(router) == 1)
        engine.hold = 10**9
        assert (await first, await second) == (whole[: whole.index(stop)], whole)
    assert engine.num_submitted == 1


async def test_tenants_share_no_computation() -> None:
    engine = PrintableEngine()
    async with running_engines(engine) as leaders, running_router(*leaders, coalesces=True) as router:
        texts = await asyncio.gather(*(ask(router, GREEDY, streamed=True, key=key) for key in ("sk-1", "sk-2")))
        assert (len(set(texts)), engine.num_submitted, joined(router)) == (1, 2, 0)


async def test_joined_streams_are_resumed() -> None:
    body = {**BODY, "temperature": 0, "max_tokens": 60}
    engine = PrintableEngine()
    async with running_engines(engine) as leaders, running_router(*leaders, coalesces=True) as router:
        whole = (await read(router.url, body)).texts
        engine.hold = 30
        received = await asyncio.gather(*(read(router.url, body, stop=chars(10)) for _ in range(3)))
        assert joined(router) == 2
        engine.hold = 10**9
        ends = await asyncio.gather(*(read(router.url, body, some) for some in received))
        assert [(end.texts, end.is_done) for end in ends] == [(whole, True)] * 3
    assert engine.num_submitted <= 3, "the rest is computed at most once"


async def test_joined_streams_survive_the_only_router() -> None:
    """Streams join no request that the group aborts then."""
    body = {**BODY, "temperature": 0, "max_tokens": 60}
    engine = PrintableEngine()
    async with running_engines(engine) as leaders:
        async with running_router(*leaders, coalesces=True) as lost:
            whole = (await read(lost.url, body)).texts
            engine.hold = 30
            plain = asyncio.create_task(read(lost.url, {**body, "stream": False}))
            await until(lambda: engine.num_submitted == 2)
            received = await asyncio.gather(*(read(lost.url, body, stop=chars(10)) for _ in range(3)))
            assert (engine.num_submitted, joined(lost)) == (3, 2)
            await lost.kill()
        await asyncio.gather(plain, return_exceptions=True)
        engine.hold = 10**9
        async with running_router(*leaders, coalesces=True) as router:
            ends = await asyncio.gather(*(read(router.url, body, some) for some in received))
            assert [(end.texts, end.is_done) for end in ends] == [(whole, True)] * 3


async def test_an_orphan_is_computed_once_for_all_its_streams() -> None:
    """The clients resume one after the other, the one whose request it is at last."""
    body = {**BODY, "temperature": 0, "max_tokens": 60}
    engine, received = PrintableEngine(), [ReceivedStream({}, {}) for _ in range(3)]
    async with running_engines(engine) as leaders:
        async with running_router(*leaders, coalesces=True) as lost:
            whole = (await read(lost.url, body)).texts
            engine.hold = 10
            clients = list[asyncio.Task[ReceivedStream]]()
            for stream in received:
                clients.append(asyncio.create_task(read(lost.url, body, stream)))
                await until(lambda: (engine.num_submitted, joined(lost)) == (2, len(clients) - 1))
            await until(lambda: all(stream.last.endswith(":9") for stream in received))
            await lost.kill()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        async with running_router(*leaders, coalesces=True) as router:
            clients = []
            for stream in reversed(received):
                clients.append(asyncio.create_task(read(router.url, body, stream)))
                await until(lambda: len(router.fleet.sessions) == len(clients))
            assert joined(router) == 2
            engine.hold = 10**9
            await asyncio.gather(*clients)
    assert [(stream.texts, stream.is_done) for stream in received] == [(whole, True)] * 3
    assert (engine.num_submitted, engine.aborted) == (2, [])


async def test_answer_reports_the_usage_of_the_request() -> None:
    engine = PrintableEngine()
    engine.hold = 0
    async with running_engines(engine) as leaders, running_router(*leaders, coalesces=True) as router:
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers={"authorization": "Bearer sk-1"}) as http:
            asking = [asyncio.create_task(http.post(f"{router.url}/v1/completions", json=dict(GREEDY))) for _ in range(2)]
            await until(lambda: joined(router) == 1)
            engine.hold = 10**9
            first, second = [answer.json() for answer in await asyncio.gather(*asking)]
        assert first["usage"] == second["usage"] and first["usage"]["completion_tokens"] == 60
        assert first["id"] != second["id"]
