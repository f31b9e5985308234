"""Routers that are peers: streams survive the loss of their router, with copies at another one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKeys
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_router.backend import RouterBackend
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Endpoint, StaticLeaders
from phalanx_router.metrics import RouterMetrics
from phalanx_router.resume import peer_wire
from phalanx_router.resume.journal_store import JournalStore, PeerCopies
from phalanx_router.resume.peers import PeerConnection, PeerEndpoint, Peers, peer_order
from tests.polling import until
from tests.router.api_servers import http_server, slow_path
from tests.router.clients import ReceivedStream, chars, read
from tests.router.fakes import TOKEN, Leaders, make_settings
from tests.router.http_routers import BODY, KEYS, HttpRouter, PrintableEngine, running_engines, undisturbed


class AnsweringPeer:
    """A connection to a router that has no stream."""

    close_code, close_reason = None, None

    async def send(self, message: bytes) -> None:
        pass

    async def recv(self, decode: Literal[False]) -> bytes:
        return peer_wire.encode(peer_wire.JournalAnswer([]))

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


def peer(name: str, is_leaving: bool = False) -> Endpoint:
    return Endpoint(key=name, address=f"{name}:1", group=name, is_leaving=is_leaving)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ("b", "abc", "ca"), ("c", "abc", "ab"), ("a", "abc", "bc"), ("x", "ab", "ab"), ("a", "a", ""),
    ],
)  # fmt: skip
def test_each_router_is_the_peer_of_another(own: str, others: str, expected: str) -> None:
    assert [found.group for found in peer_order(own, map(peer, others))] == list(expected)
    assert [found.group for found in peer_order("a", [peer("b", is_leaving=True), peer("c")])] == ["c", "b"]


@asynccontextmanager
async def router_with_peers(
    name: str, leaders: list[str], peers: Leaders, coalesces: bool = False
) -> AsyncIterator[tuple[HttpRouter, Peers, str]]:
    """A router with peers, built as by `make_router`."""
    base = make_settings(patience_s=10, coalesces=coalesces)
    settings = replace(base, link=replace(base.link, router=name))
    registry = CollectorRegistry()
    fleet = RouterBackend(settings, RouterMetrics(registry), draw=lambda: 0.0)
    replication = fleet.stream_registry.replication = Peers(settings.link, fleet.stream_registry.open_sessions)
    app = create_app(fleet, registry=registry, keys=ApiKeys(KEYS), metrics_prefix="phalanx_router")
    app.router.routes.append(PeerEndpoint(ServiceToken([TOKEN]), fleet.stream_registry.copies).route())

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.run(StaticLeaders(leaders)))
            tasks.create_task(replication.run(peers))

    task = asyncio.create_task(both())
    try:
        async with http_server(app) as address:
            router = HttpRouter(f"http://{address}", fleet, task, registry)
            await router.until_linked(1)
            yield router, replication, address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_router_that_is_cut_off_keeps_its_streams() -> None:
    """A client that reaches another router retries until the first one answers."""
    body = {**BODY, "seed": 77}
    whole, engine, others = await undisturbed(body), PrintableEngine(), Leaders()
    async with running_engines(engine) as leaders, AsyncExitStack() as stack:
        first, _, address = await stack.enter_async_context(router_with_peers("a", leaders, Leaders()))
        second, _, _ = await stack.enter_async_context(router_with_peers("b", leaders, others))
        path = await stack.enter_async_context(slow_path(address))
        received = await read(first.url, body, stop=chars(10))
        path.held.set()
        others.change(Endpoint(key="a", address=path.address, group="a"))
        late = await read(second.url, body, replace(received))
        assert (late.status, late.error["code"]) == (503, "routers_silent")
        path.held.clear()
        received = await read(second.url, body, received)
    assert (received.texts, received.ends, received.is_done) == (whole.texts, whole.ends, True)


@pytest.mark.parametrize(
    ("error", "silence_s", "is_complete"),
    [(TimeoutError, 60.0, False), (TimeoutError, 0.0, True), (ConnectionRefusedError, 60.0, True)],
    ids=["silent", "silent for long", "ended"],
)
async def test_silence_counts_for_a_while(
    error: type[OSError], silence_s: float, is_complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx_router.resume.peers.SILENCE_S", silence_s)
    fails, listed = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def dial(peer: Endpoint, settings: LinkSettings) -> AsyncIterator[PeerConnection]:
        listed.set()
        if fails.is_set():
            raise error
        yield AnsweringPeer()

    peers = Peers(make_settings().link, lambda: [], dial=dial)
    running = asyncio.create_task(peers.run(Leaders(Endpoint(key="a", address="a", group="a"))))
    try:
        await listed.wait()
        fails.set()
        assert await peers.query(["one"]) == ([], is_complete)
        fails.clear()
        assert await peers.query(["one"]) == ([], True)
    finally:
        running.cancel()


async def until_copied(router: HttpRouter, count: int) -> None:
    await until(lambda: len(router.fleet.stream_registry.copies) == count)


async def test_a_stream_survives_its_router_and_its_group_together() -> None:
    """The orphan is lost with its group; a third router queries the others and finds the copy."""
    body = {**BODY, "seed": 77, "n": 2}
    whole = await undisturbed(body)
    dying, other = PrintableEngine(), PrintableEngine()
    dying.hold = 20
    async with running_engines(dying, other) as leaders, AsyncExitStack() as stack:
        lists = [Leaders(), Leaders(), Leaders()]
        first, journals, _ = await stack.enter_async_context(router_with_peers("a", leaders[:1], lists[0]))
        second, _, address = await stack.enter_async_context(router_with_peers("b", leaders[1:], lists[1]))
        third, _, _ = await stack.enter_async_context(router_with_peers("c", leaders[1:], lists[2]))
        for found in lists:
            found.change(Endpoint(key="b", address=address, group="b"))
        await until(lambda: journals.peer is not None)
        received = ReceivedStream({}, {})
        reading = asyncio.create_task(read(first.url, body, received))
        await until(lambda: received.last.endswith(":19,19"))
        await until_copied(second, 2)
        copied = [session.stream.journal for session in first.fleet.stream_registry.open_sessions()]
        await until(lambda: all(copy_at(second, journal.id) == journal.delivered for journal in copied))
        dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        await first.kill()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        received = await read(third.url, body, received)
        assert (received.texts, received.ends, received.is_done) == (whole.texts, whole.ends, True)
        assert other.num_submitted == 2


async def test_joined_streams_survive_their_router_and_group() -> None:
    body = {**BODY, "temperature": 0}
    whole, dying, other = await undisturbed(body), PrintableEngine(), PrintableEngine()
    dying.hold = other.hold = 20
    async with running_engines(dying, other) as leaders, AsyncExitStack() as stack:
        peers = Leaders()
        first, journals, _ = await stack.enter_async_context(router_with_peers("a", leaders[:1], peers, coalesces=True))
        second, _, address = await stack.enter_async_context(router_with_peers("b", leaders[1:], Leaders(), coalesces=True))
        peers.change(Endpoint(key="b", address=address, group="b"))
        await until(lambda: journals.peer is not None)
        received = [ReceivedStream({}, {}) for _ in range(2)]
        reading = [asyncio.create_task(read(first.url, body, some)) for some in received]
        await until(lambda: all(some.last.endswith(":19") for some in received))
        await until_copied(second, 2)
        copied = [session.stream.journal for session in first.fleet.stream_registry.open_sessions()]
        await until(lambda: all(len(copy_at(second, journal.id)) == 20 for journal in copied))
        dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        await first.kill()
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        resuming = [asyncio.create_task(read(second.url, body, some)) for some in received]
        await until(lambda: len(list(second.fleet.stream_registry.open_sessions())) == 2)
        other.hold = 10**9  # both have joined
        await asyncio.gather(*resuming)
    assert [(some.texts, some.ends, some.is_done) for some in received] == [(whole.texts, whole.ends, True)] * 2
    assert (dying.num_submitted, other.num_submitted) == (1, 1)


async def test_late_peer_receives_the_original_requests() -> None:
    """Its router has all prompt details already."""
    body = {**BODY, "seed": 77, "echo": True, "logprobs": 1}
    whole, dying, other = await undisturbed(body), PrintableEngine(), PrintableEngine()
    dying.hold = 20
    async with running_engines(dying, other) as leaders, AsyncExitStack() as stack:
        peers, received = Leaders(), ReceivedStream({}, {})
        first, _, _ = await stack.enter_async_context(router_with_peers("a", leaders[:1], peers))
        second, _, address = await stack.enter_async_context(router_with_peers("b", leaders[1:], Leaders()))
        reading = asyncio.create_task(read(first.url, body, received))
        await until(lambda: received.last.endswith(":19"))
        peers.change(Endpoint(key="b", address=address, group="b"))
        await until_copied(second, 1)
        dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        await first.kill()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await read(second.url, body, received)
    assert received == replace(whole, last=received.last) and len(received.tokens[0]) > 40
    assert other.num_submitted == 1


def copy_at(router: HttpRouter, id: str) -> list[int]:
    found = router.fleet.stream_registry.copies.find([id])
    return found[0].request.delivered if found else []


async def test_lost_peer_is_replaced() -> None:
    engine = PrintableEngine()
    engine.hold = 20
    async with running_engines(engine) as leaders, AsyncExitStack() as stack:
        peers = Leaders()
        first, journals, _ = await stack.enter_async_context(router_with_peers("a", leaders, peers))
        others = [await stack.enter_async_context(router_with_peers(name, leaders, Leaders())) for name in "bc"]
        reading = asyncio.create_task(read(first.url, BODY))
        ends = [Endpoint(key=name, address=address, group=name) for name, (_, _, address) in zip("bc", others, strict=True)]
        peers.change(*ends)
        for place, (other, _, _) in enumerate(others):
            await until_copied(other, 1)
            assert journals.peer == ends[place]
            peers.change(*ends[place + 1 :])
        await until(lambda: journals.peer is None)
        engine.hold = 10**9
        assert (await reading).is_done


async def test_peer_without_token_may_neither_send_nor_query() -> None:
    async with http_server(peer_app()) as address:
        url = f"ws://{address}{peer_wire.PEER_PATH}"
        with pytest.raises(InvalidStatus) as refused:
            await connect(url, proxy=None)
        assert refused.value.response.status_code == 401
        for message in (b"\xc1", "text", peer_wire.encode(peer_wire.JournalQuery([]))):
            async with connect(url, proxy=None, additional_headers={"Authorization": f"Bearer {TOKEN}"}) as connection:
                await connection.send(message)
                with pytest.raises(ConnectionClosed) as closed:
                    await connection.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400


def peer_app() -> Any:
    return Starlette(routes=[PeerEndpoint(ServiceToken([TOKEN]), PeerCopies(JournalStore(lambda: 0.0))).route()])
