"""Streams survive their router: a client that repeats its request at another router receives the rest.

Real routers over real leaders' links, through HTTP; only the engines are scripted.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from phalanx_api import wire
from tests.frontend.fakes import tiny_assets
from tests.polling import until
from tests.router.api_servers import slow_path
from tests.router.clients import ReceivedStream, chars, read
from tests.router.http_routers import BODY, PrintableEngine, running_engines, running_router, undisturbed


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("which", ["another router", "the next router"])
async def test_client_resumes_when_its_router_is_lost(which: str, n: int) -> None:
    body = {**BODY, "n": n, "seed": 12345678901234567}
    whole = await undisturbed(body)
    engine = PrintableEngine()
    engine.hold = 30
    async with running_engines(engine) as leaders, AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(*leaders))
        if which == "another router":
            second = await stack.enter_async_context(running_router(*leaders, name="router-2"))
        received = await read(first.url, body, stop=chars(10 * n))
        assert received.last and not received.is_done
        await first.kill()
        if which == "the next router":
            second = await stack.enter_async_context(running_router(*leaders))
        engine.hold = 10**9
        received = await read(second.url, body, received)
    assert (received.texts, received.ends, received.is_done) == (whole.texts, whole.ends, True)
    assert engine.num_submitted == n, "the streams were adopted, and not computed again"
    assert engine.aborted == []


async def test_stream_is_resumed_after_its_adapter_was_unloaded() -> None:
    """Its group has ended no request with it, and a router that has just started knows no such name."""
    engine, adapter = PrintableEngine(), wire.Adapter("legal", "hash of legal")
    engine.known_assets = wire.with_adapters(tiny_assets(), [adapter])
    engine.hold = 20
    body = {**BODY, "seed": 77, "model": "legal"}
    async with running_engines(engine) as leaders:
        async with running_router(*leaders) as router:
            received = await read(router.url, body, stop=chars(10))
            await router.kill()
        engine.known_assets = tiny_assets()
        async with running_router(*leaders) as router:
            assert not router.fleet.assets().adapters
            engine.hold = 10**9
            received = await read(router.url, body, received)
            assert (await read(router.url, body)).error["code"] == "model_not_found"
    assert received.texts == (await undisturbed({**BODY, "seed": 77})).texts and received.is_done
    assert (engine.num_submitted, engine.aborted) == (1, [])


async def test_disconnected_client_resumes_at_the_same_router() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), PrintableEngine()
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        received = await read(router.url, body, stop=chars(10))
        engine.hold = 10**9
        received = await read(router.url, body, received)
        assert (received.texts, received.ends, received.is_done) == (whole.texts, whole.ends, True)
        assert not router.fleet.sessions


async def test_waiting_stream_ends_when_its_client_resumes() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), PrintableEngine()
    engine.hold = 20
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        seen = ReceivedStream({}, {})
        first = asyncio.create_task(read(router.url, body, seen))
        await until(lambda: seen.last.endswith(":19"))
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        again = asyncio.create_task(read(router.url, body, ReceivedStream(dict(seen.texts), {}, seen.last)))
        assert (await first).error["code"] == "resumed", "though no group is there"
        engine.hold = 10**9
        engine.change(wire.State(serving=True, incarnation=2))
        received = await again
    assert (received.texts, received.ends, received.is_done) == (whole.texts, whole.ends, True)
    assert engine.num_submitted == 2


async def test_ended_stream_can_be_read_once_more() -> None:
    body = {**BODY, "seed": 77}
    engine = PrintableEngine()
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        whole = await read(first.url, body)
        assert whole.is_done
        half = ReceivedStream({0: whole.texts[0]}, {}, whole.last)
        for router in (first, None):
            if router is None:
                await first.kill()
                async with running_router(*leaders, name="router-2") as second:
                    again = await read(second.url, body, replace(half))
            else:
                again = await read(router.url, body, replace(half))
            assert (again.texts, again.ends, again.is_done) == (whole.texts, whole.ends, True)
    assert engine.num_submitted == 1


async def test_orphan_of_a_lost_group_continues_elsewhere() -> None:
    body = {**BODY, "seed": 77}
    whole, engine, other = await undisturbed(body), PrintableEngine(), PrintableEngine()
    engine.hold = 30
    async with running_engines(engine, other) as leaders, running_router(leaders[0]) as first:
        received = await read(first.url, body, stop=chars(10))
        await first.kill()
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        async with running_router(*leaders, name="router-2") as second:
            received = await read(second.url, body, received)
            assert (received.texts, received.ends) == (whole.texts, whole.ends)
        assert other.num_submitted == 1


async def test_replayed_stream_is_adopted_as_originally_requested() -> None:
    """The second group received it with output, so it sent no prompt details."""
    body = {**BODY, "seed": 77, "echo": True, "logprobs": 1}
    whole, engines = await undisturbed(body), [PrintableEngine(), PrintableEngine()]
    for engine in engines:
        engine.hold = 20
    async with running_engines(*engines) as leaders, running_router(*leaders) as first:
        await first.until_linked(2)
        reading = asyncio.create_task(read(first.url, body, stop=lambda _: sum(engine.num_submitted for engine in engines) == 2))
        await until(lambda: [len(session.stream.journal.delivered) for session in first.fleet.sessions] == [20])
        dying, other = sorted(engines, key=lambda engine: not engine.submitted)
        other.hold = 30
        dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        received = await reading
        assert other.num_submitted == 1 and not received.is_done
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            other.hold = 10**9
            received = await read(second.url, body, received)
    assert received == replace(whole, last=received.last) and len(whole.tokens[0]) > 40


async def test_a_leader_that_answers_late_keeps_the_stream() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), PrintableEngine()
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as first, slow_path(leaders[0]) as path:
        received = await read(first.url, body, stop=chars(10))
        await first.kill()
        async with running_router(path.address, name="router-2", find_s=0.1) as second:
            path.held.set()
            late = await read(second.url, body, replace(received))
            assert (late.status, late.error["code"]) == (503, "groups_silent")
            path.held.clear()
            engine.hold = 10**9
            received = await read(second.url, body, received)
    assert (received.texts, received.ends, received.is_done) == (whole.texts, whole.ends, True)
    assert (engine.num_submitted, engine.aborted) == (1, [])


async def test_no_other_client_gets_a_stream() -> None:
    engine = PrintableEngine()
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        received = await read(first.url, BODY, stop=chars(10))
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            stolen = await read(second.url, BODY, replace(received), key="sk-2")
            unknown = await read(second.url, BODY, ReceivedStream({}, {}, "cmpl-" + "0" * 32 + ":3"))
            assert (stolen.status, unknown.status) == (404, 404) and stolen.error == unknown.error
            assert stolen.error["code"] == "unknown_stream"
            engine.hold = 10**9
            mine = await read(second.url, BODY, received)
            assert (mine.status, mine.is_done) == (200, True)


@pytest.mark.parametrize("which", ["its own router", "another router"])
async def test_foreign_key_ends_no_stream(which: str) -> None:
    engine = PrintableEngine()
    engine.hold = 20
    async with running_engines(engine) as leaders, running_router(*leaders) as first, running_router(*leaders) as second:
        seen, came = ReceivedStream({}, {}), asyncio.Event()

        def stop(received: ReceivedStream) -> bool:
            seen.last = received.last
            came.set()
            return engine.hold > 20 and received.num_chars >= 30

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(first.url, BODY, stop=stop))
            await came.wait()
            thief = first if which == "its own router" else second
            stolen = await read(thief.url, BODY, ReceivedStream({}, {}, seen.last), key="sk-2")
            assert (stolen.status, stolen.error["code"]) == (404, "unknown_stream")
            engine.hold = 10**9
        assert reading.result().error is None and reading.result().num_chars >= 30
        assert engine.num_submitted == 1


async def test_an_adopted_stream_keeps_its_weights() -> None:
    engine = PrintableEngine()
    engine.present = wire.State(serving=True, incarnation=1, served=wire.Served("weights-1"))
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        received = await read(first.url, BODY, stop=chars(10))
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(read(second.url, BODY, received))
                await until(lambda: second.fleet.sessions)
                [run] = second.fleet.sessions
                assert (run.model_hash, run.stream.journal.epoch) == ("weights-1", 0)
                engine.hold = 10**9
            assert reading.result().is_done


async def test_leaving_router_names_the_id_to_resume_from() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), PrintableEngine()
    engine.hold = 20
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        reading = asyncio.create_task(read(first.url, body))
        await until(lambda: [len(session.stream.journal.delivered) for session in first.fleet.sessions] == [20])
        first.fleet.refuse()
        refused = await read(first.url, body)
        assert (refused.status, refused.error["code"]) == (503, "router_leaving")
        first.fleet.close()
        received = await reading
        assert received.error["code"] == "router_leaving" and received.error["message"].endswith(
            f"Last-Event-ID: {received.last}"
        )
        assert engine.aborted == [], "its groups go on"
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            engine.hold = 10**9
            received = await read(second.url, body, received)
    assert (received.texts, received.ends, received.error, engine.num_submitted) == (whole.texts, whole.ends, None, 1)
