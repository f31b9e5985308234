"""Copies of journals at a peer: equal to the journals, archived when their router is lost, and bounded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from phalanx_router.resume.backlog import PeerBacklog
from phalanx_router.resume.journal_store import ENTRY_BYTES, LIVE_BYTES, TOKEN_BYTES, JournalStore, PeerCopies
from phalanx_router.resume.peer_wire import JournalCopy, JournalEnd
from phalanx_router.resume.peers import PeerConnection, PeerEndpoint, Peers, peer_order
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import StreamSession
from phalanx_router.streams.stream import Stream
from tests.polling import until
from tests.router.api_servers import http_server, slow_path
from tests.router.clients import ReceivedStream, chars, read
from tests.router.fakes import TOKEN, Leaders, make_request, make_settings
from tests.router.http_routers import BODY, KEYS, HttpRouter, PrintableEngine, running_engines, undisturbed


def make_session(id: str = "a") -> StreamSession:
    request = msgspec.structs.replace(make_request(id=id, max_tokens=10**6), can_resume=True)
    return StreamSession(stream=Stream(request), tokenizer=None, keys=PromptKeys(request.prompt, "", ""))


def extend(session: StreamSession, count: int) -> None:
    journal = session.stream.journal
    for _ in range(count):
        journal.accept(journal.epoch, len(journal.delivered), 7 * len(journal.delivered) + 1)


class AnsweringPeer:
    """A connection to a router that has no stream."""

    close_code, close_reason = None, None

    async def send(self, message: bytes) -> None:
        pass

    async def recv(self, decode: Literal[False]) -> bytes:
        return peer_wire.encode(peer_wire.JournalAnswer([]))

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from("open grow replay close forget send".split()), st.integers(0, 4)), max_size=60))
def test_peer_copy_equals_the_journals_at_each_frame(steps: list[tuple[str, int]]) -> None:
    store = JournalStore(Clock())
    copies, backlog = PeerCopies(store), PeerBacklog([])
    receiver = copies.receiver()
    sessions: dict[int, StreamSession] = {}
    for step, which in [*steps, ("send", 0)]:
        session = sessions.get(which)
        if step == "open" and session is None:
            sessions[which] = make_session(str(which))
            backlog.opened(sessions[which])
        elif step == "grow" and session is not None:
            extend(session, which + 1)
            backlog.extended(session)
        elif step == "replay" and session is not None:
            session.stream.journal.next_epoch()
            extend(session, which + 1)
            backlog.extended(session)
        elif step in ("close", "forget") and session is not None:
            backlog.closed(sessions.pop(which), "stop", step == "forget")
        elif step == "send" and (changes := backlog.take()) is not None:
            decoded = peer_wire.decode(peer_wire.encode(changes))
            assert isinstance(decoded, peer_wire.JournalChanges)
            receiver.apply(decoded)
    assert len(copies) == len(sessions)
    for which, session in sessions.items():
        [copy] = copies.find([str(which)])
        assert copy.request == session.stream.journal.replay()
    receiver.close()
    assert len(copies) == 0 and all(copies.find([str(which)]) for which in sessions), "a lost router's streams are kept"


def test_ended_streams_are_kept_and_forgotten_ones_dropped() -> None:
    clock = Clock()
    copies, backlog = PeerCopies(JournalStore(clock)), PeerBacklog([])
    receiver, kept, forgotten = copies.receiver(), make_session("kept"), make_session("forgotten")
    for session in (kept, forgotten):
        backlog.opened(session)
    first = backlog.take()
    assert first is not None
    receiver.apply(first)
    extend(kept, 3)
    backlog.closed(kept, "length", False)
    backlog.closed(forgotten, None, True)
    second = backlog.take()
    assert second is not None
    receiver.apply(second)
    [copy] = copies.find(["kept", "forgotten"])
    assert (copy.request.delivered, copy.finish) == ([1, 8, 15], "length")
    clock.now = 61
    assert copies.find(["kept"]) == []


def test_copy_that_may_displace_no_other_needs_room() -> None:
    clock = Clock()
    copies = [JournalCopy(make_request(id=id)) for id in "abcd"]
    store = JournalStore(clock, max_bytes=2 * (ENTRY_BYTES + len(peer_wire.encode(copies[0]))))
    for copy, displaces in zip(copies, (True, False, False, True), strict=True):
        store.put(copy, displaces=displaces)
        clock.now += 1
    assert [store.get(id) is not None for id in "abcd"] == [False, True, False, True]
    clock.now = 62
    store.put(copies[2], displaces=False)
    assert store.get("c") is not None, "expired copies leave room"


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed at once"])
def test_copy_of_a_queued_stream_gets_its_weights(closes: bool) -> None:
    copies, backlog, session = PeerCopies(JournalStore(Clock())), PeerBacklog([]), make_session()
    receiver = copies.receiver()

    def send() -> JournalCopy:
        changes = backlog.take()
        assert changes is not None
        receiver.apply(changes)
        [copy] = copies.find(["a"])
        return copy

    backlog.opened(session)
    assert send().model_hash == ""
    session.model_hash = "model-1"
    extend(session, 3)
    backlog.extended(session)
    if closes:
        backlog.closed(session, None, False)
    copy = send()
    assert (copy.model_hash, copy.request.delivered) == ("model-1", session.stream.journal.delivered)
    if not closes:
        extend(session, 2)
        backlog.extended(session)
        assert send().request.delivered == session.stream.journal.delivered


def test_copies_of_joined_streams_have_their_deaths() -> None:
    copies, backlog, computing, joined = PeerCopies(JournalStore(Clock())), PeerBacklog([]), make_session("a"), make_session("b")
    receiver = copies.receiver()
    joined.sharing.computed_by = computing
    backlog.opened(joined)
    for num_deaths in range(3):
        computing.failures.num_deaths, computing.stream.journal.is_alone = num_deaths, num_deaths == 2
        if num_deaths:
            computing.stream.journal.next_epoch()
            backlog.extended(joined)
        changes = backlog.take()
        assert changes is not None
        receiver.apply(changes)
        [copy] = copies.find(["b"])
        assert (copy.request.epoch, copy.deaths, copy.request.alone) == (num_deaths, num_deaths, num_deaths == 2)


def test_replay_sends_no_prompt_again() -> None:
    """A group that dies has many streams."""
    sizes = []
    for num_prompt in (1, 8192):
        copies, backlog = PeerCopies(JournalStore(Clock())), PeerBacklog([])
        receiver = copies.receiver()
        request = msgspec.structs.replace(make_request([1] * num_prompt), can_resume=True)
        session = StreamSession(stream=Stream(request), tokenizer=None, keys=PromptKeys(request.prompt, "", ""))
        backlog.opened(session)
        for replays in range(2):
            if replays:
                session.stream.journal.next_epoch()
                session.failures.num_deaths += 1
                extend(session, 1)
                backlog.extended(session)
            changes = backlog.take()
            assert changes is not None
            receiver.apply(changes)
        assert changes is not None
        sizes.append(len(peer_wire.encode(changes)))
        [copy] = copies.find([request.id])
        assert copy == JournalCopy(session.stream.journal.replay(), deaths=1)
        older = msgspec.msgpack.decode(peer_wire.encode(changes))[:-1]  # of a router without the field
        assert peer_wire.decode(msgspec.msgpack.encode(older)) == msgspec.structs.replace(changes, replayed=[])
    assert sizes[0] == sizes[1] < 40


def test_copies_are_bounded() -> None:
    copies = PeerCopies(JournalStore(Clock(), max_bytes=400), max_bytes=2000)
    receiver = copies.receiver()
    for number in range(9):
        receiver.apply(
            peer_wire.JournalChanges(
                opened=[(number, JournalCopy(make_request(id=f"r{number}")))], numbers=[number], counts=[1], tokens=[5], closed=[]
            )
        )
    assert 0 < len(copies) < 9 and copies.num_dropped == 9 - len(copies)
    held = len(copies)
    receiver.apply(
        peer_wire.JournalChanges(opened=[], numbers=[], counts=[], tokens=[], closed=[JournalEnd(number) for number in range(9)])
    )
    assert len(copies) == 0 and 0 < sum(bool(copies.find([f"r{number}"])) for number in range(9)) < max(held, 2)


def test_bounded_copy_is_shorter() -> None:
    copy = JournalCopy(make_request(id="a"))
    copies = PeerCopies(JournalStore(Clock()), max_bytes=LIVE_BYTES + len(peer_wire.encode(copy)) + 4 * TOKEN_BYTES)
    receiver = copies.receiver()
    receiver.apply(peer_wire.JournalChanges(opened=[(1, copy)], numbers=[1], counts=[3], tokens=[5, 6, 7], closed=[]))
    for token in (8, 9, 10):
        receiver.apply(peer_wire.JournalChanges(opened=[], numbers=[1], counts=[2], tokens=[token, token], closed=[]))
    [held] = copies.find(["a"])
    assert held.request.delivered == [5, 6, 7] and copies.num_dropped == 1
    receiver.apply(peer_wire.JournalChanges(opened=[], numbers=[1], counts=[1], tokens=[11], closed=[JournalEnd(1, "stop")]))
    [kept] = copies.find(["a"])
    assert (kept.request.delivered, kept.finish) == ([5, 6, 7], None), "what misses tokens has not ended"


def test_a_number_that_is_used_twice_leaves_nothing_behind() -> None:
    copies = PeerCopies(JournalStore(Clock()), max_bytes=4000)
    receiver = copies.receiver()
    for round in range(20):
        receiver.apply(
            peer_wire.JournalChanges(
                opened=[(1, JournalCopy(make_request(id=f"r{round}")))], numbers=[], counts=[], tokens=[], closed=[]
            )
        )
    assert len(copies) == 1 and copies.num_dropped == 0


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
    return Starlette(routes=[PeerEndpoint(ServiceToken([TOKEN]), PeerCopies(JournalStore(Clock()))).route()])
