"""Streams outlive their router: a client that repeats its request at another router, or the next one, gets the rest.

Real routers over real leaders' links, through HTTP; only the engines are scripted.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.metrics import RouterMetrics
from phalanx_runtime.server.link.gateway import EngineSink
from tests.frontend.fakes import plain_tokens, tiny_assets
from tests.router.api_servers import FakeEngine, http_server, running_leader, slow_path
from tests.router.clients import Told, chars, read
from tests.router.fakes import make_settings

BODY: Mapping[str, Any] = {"prompt": "hello", "max_tokens": 40, "stream": True, "temperature": 1.0}
KEYS = [ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2")]


def draw(request: wire.Request, index: int) -> int:
    """A printable token that depends on prompt, seed and index, as a model's would."""
    digest = hashlib.sha256(repr((request.prompt, request.sampling.seed, index)).encode()).digest()
    return plain_tokens()[int.from_bytes(digest[:4], "big") % len(plain_tokens())]


class Engine(FakeEngine):
    """Draws printable tokens, a step every few milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.known_assets = tiny_assets()
        self.draw = draw
        self.num_submitted = 0

    def submit(self, request: wire.Request, sink: EngineSink, move: str = "") -> int:
        self.num_submitted += 1
        return super().submit(request, sink, move)

    async def run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0.002)


@dataclass(slots=True)
class Router:
    """A router, as its clients see it."""

    url: str
    fleet: RouterBackend
    task: asyncio.Task[None]
    registry: CollectorRegistry

    async def kill(self) -> None:
        """Ends its links as a killed process does: nothing is aborted."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def until_linked(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.fleet.links.open_links()) < count or self.fleet.links.num_ready < 1:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def running_router(*leaders: str, name: str = "router-1", find_s: float = 3.0) -> AsyncIterator[Router]:
    settings = make_settings(patience_s=10, find_s=find_s)
    registry = CollectorRegistry()
    fleet = RouterBackend(settings, RouterMetrics(registry), draw=lambda: 0.0)
    task = asyncio.create_task(fleet.run(StaticLeaders(leaders)))
    app = create_app(fleet, registry=registry, keys=ApiKeys(KEYS), metrics_prefix="phalanx_router")
    try:
        async with http_server(app) as address:
            router = Router(f"http://{address}", fleet, task, registry)
            await router.until_linked(1 if leaders else 0)
            yield router
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running_engines(*engines: Engine) -> AsyncIterator[list[str]]:
    """Leaders over these engines: their addresses."""
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(engine.run()) for engine in engines]
        try:
            if len(engines) == 1:
                async with running_leader(engines[0]) as (address, _):
                    yield [address]
            else:
                async with running_leader(engines[0]) as (first, _), running_leader(engines[1]) as (second, _):
                    yield [first, second]
        finally:
            for run in runs:
                run.cancel()


async def undisturbed(body: Mapping[str, Any]) -> Told:
    """The same request without any fault. Its seed is in the body."""
    async with running_engines(Engine()) as leaders, running_router(*leaders) as router:
        return await read(router.url, body)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("which", ["another router", "the next router"])
async def test_client_resumes_when_its_router_is_lost(which: str, n: int) -> None:
    body = {**BODY, "n": n, "seed": 12345678901234567}
    whole = await undisturbed(body)
    engine = Engine()
    engine.hold = 30
    async with running_engines(engine) as leaders, AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(*leaders))
        if which == "another router":
            second = await stack.enter_async_context(running_router(*leaders, name="router-2"))
        told = await read(first.url, body, stop=chars(10 * n))
        assert told.last and not told.is_done
        await first.kill()
        if which == "the next router":
            second = await stack.enter_async_context(running_router(*leaders))
        engine.hold = 10**9
        told = await read(second.url, body, told)
    assert (told.texts, told.ends, told.is_done) == (whole.texts, whole.ends, True)
    assert engine.num_submitted == n, "the streams were adopted, and not computed again"
    assert engine.aborted == []


async def test_disconnected_client_resumes_at_the_same_router() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), Engine()
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        told = await read(router.url, body, stop=chars(10))
        engine.hold = 10**9
        told = await read(router.url, body, told)
        assert (told.texts, told.ends, told.is_done) == (whole.texts, whole.ends, True)
        assert not router.fleet.runs


async def test_waiting_stream_ends_when_its_client_resumes() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), Engine()
    engine.hold = 20
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        seen = Told({}, {})
        first = asyncio.create_task(read(router.url, body, seen))
        async with asyncio.timeout(20):
            while not seen.last.endswith(":19"):
                await asyncio.sleep(0.002)
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        again = asyncio.create_task(read(router.url, body, Told(dict(seen.texts), {}, seen.last)))
        assert (await first).error["code"] == "resumed", "though no group is there"
        engine.hold = 10**9
        engine.change(wire.State(serving=True, incarnation=2))
        told = await again
    assert (told.texts, told.ends, told.is_done) == (whole.texts, whole.ends, True)
    assert engine.num_submitted == 2


async def test_ended_stream_can_be_read_once_more() -> None:
    body = {**BODY, "seed": 77}
    engine = Engine()
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        whole = await read(first.url, body)
        assert whole.is_done
        half = Told({0: whole.texts[0]}, {}, whole.last)
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
    whole, engine, other = await undisturbed(body), Engine(), Engine()
    engine.hold = 30
    async with running_engines(engine, other) as leaders, running_router(leaders[0]) as first:
        told = await read(first.url, body, stop=chars(10))
        await first.kill()
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        async with running_router(*leaders, name="router-2") as second:
            told = await read(second.url, body, told)
            assert (told.texts, told.ends) == (whole.texts, whole.ends)
        assert other.num_submitted == 1


async def test_replayed_stream_is_adopted_as_originally_requested() -> None:
    """Its second group had it with output, and told nothing of the prompt."""
    body = {**BODY, "seed": 77, "echo": True, "logprobs": 1}
    whole, engines = await undisturbed(body), [Engine(), Engine()]
    for engine in engines:
        engine.hold = 20
    async with running_engines(*engines) as leaders, running_router(*leaders) as first:
        await first.until_linked(2)
        reading = asyncio.create_task(read(first.url, body, stop=lambda _: sum(engine.num_submitted for engine in engines) == 2))
        while not first.fleet.runs or len(next(iter(first.fleet.runs)).stream.journal.delivered) < 20:
            await asyncio.sleep(0.002)
        dying, other = sorted(engines, key=lambda engine: not engine.submitted)
        other.hold = 30
        dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        told = await reading
        assert other.num_submitted == 1 and not told.is_done
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            other.hold = 10**9
            told = await read(second.url, body, told)
    assert told == replace(whole, last=told.last) and len(whole.tokens[0]) > 40


async def test_a_leader_that_answers_late_keeps_the_stream() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), Engine()
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as first, slow_path(leaders[0]) as path:
        told = await read(first.url, body, stop=chars(10))
        await first.kill()
        async with running_router(path.address, name="router-2", find_s=0.1) as second:
            path.held.set()
            late = await read(second.url, body, replace(told))
            assert (late.status, late.error["code"]) == (503, "groups_silent")
            path.held.clear()
            engine.hold = 10**9
            told = await read(second.url, body, told)
    assert (told.texts, told.ends, told.is_done) == (whole.texts, whole.ends, True)
    assert (engine.num_submitted, engine.aborted) == (1, [])


async def test_no_other_client_gets_a_stream() -> None:
    engine = Engine()
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        told = await read(first.url, BODY, stop=chars(10))
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            stolen = await read(second.url, BODY, replace(told), key="sk-2")
            unknown = await read(second.url, BODY, Told({}, {}, "cmpl-" + "0" * 32 + ":3"))
            assert (stolen.status, unknown.status) == (404, 404) and stolen.error == unknown.error
            assert stolen.error["code"] == "unknown_stream"
            engine.hold = 10**9
            mine = await read(second.url, BODY, told)
            assert (mine.status, mine.is_done) == (200, True)


@pytest.mark.parametrize("which", ["its own router", "another router"])
async def test_foreign_key_ends_no_stream(which: str) -> None:
    engine = Engine()
    engine.hold = 20
    async with running_engines(engine) as leaders, running_router(*leaders) as first, running_router(*leaders) as second:
        seen, came = Told({}, {}), asyncio.Event()

        def stop(told: Told) -> bool:
            seen.last = told.last
            came.set()
            return engine.hold > 20 and told.num_chars >= 30

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(first.url, BODY, stop=stop))
            await came.wait()
            thief = first if which == "its own router" else second
            stolen = await read(thief.url, BODY, Told({}, {}, seen.last), key="sk-2")
            assert (stolen.status, stolen.error["code"]) == (404, "unknown_stream")
            engine.hold = 10**9
        assert reading.result().error is None and reading.result().num_chars >= 30
        assert engine.num_submitted == 1


async def test_an_adopted_stream_keeps_its_weights() -> None:
    engine = Engine()
    engine.present = wire.State(serving=True, incarnation=1, served=wire.Served("weights-1"))
    engine.hold = 30
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        told = await read(first.url, BODY, stop=chars(10))
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(read(second.url, BODY, told))
                while not second.fleet.runs:
                    await asyncio.sleep(0.01)
                [run] = second.fleet.runs
                assert (run.model_hash, run.stream.journal.epoch) == ("weights-1", 0)
                engine.hold = 10**9
            assert reading.result().is_done


async def test_leaving_router_names_the_id_to_resume_from() -> None:
    body = {**BODY, "seed": 77}
    whole, engine = await undisturbed(body), Engine()
    engine.hold = 20
    async with running_engines(engine) as leaders, running_router(*leaders) as first:
        reading = asyncio.create_task(read(first.url, body))
        while not first.fleet.runs or len(next(iter(first.fleet.runs)).stream.journal.delivered) < 20:
            await asyncio.sleep(0.002)
        first.fleet.refuse()
        refused = await read(first.url, body)
        assert (refused.status, refused.error["code"]) == (503, "router_leaving")
        first.fleet.close()
        told = await reading
        assert told.error["code"] == "router_leaving" and told.error["message"].endswith(f"Last-Event-ID: {told.last}")
        assert engine.aborted == [], "its groups go on"
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            engine.hold = 10**9
            told = await read(second.url, body, told)
    assert (told.texts, told.ends, told.error, engine.num_submitted) == (whole.texts, whole.ends, None, 1)
