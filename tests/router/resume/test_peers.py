"""Copies of journals at a peer: equal to the journals, handed on when their router is lost, and bounded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

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
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import Endpoint, StaticLeaders
from phalanx_router.metrics import RouterMetrics
from phalanx_router.resume import peer_wire
from phalanx_router.resume.journal_store import LIVE_BYTES, TOKEN_BYTES, JournalStore, PeerCopies
from phalanx_router.resume.peer_endpoint import PeerEndpoint
from phalanx_router.resume.peer_wire import JournalCopy, JournalEnd
from phalanx_router.resume.peers import PeerBacklog, Peers, peer_order
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import StreamSession
from phalanx_router.streams.stream import Stream
from tests.router.api_servers import http_server
from tests.router.clients import Told, chars, read
from tests.router.fakes import TOKEN, Leaders, make_request, make_settings
from tests.router.resume.test_resuming import BODY, KEYS, Engine, Router, running_engines, undisturbed


def make_run(id: str = "a") -> StreamSession:
    request = msgspec.structs.replace(make_request(id=id, max_tokens=10**6), can_resume=True)
    return StreamSession(stream=Stream(request), tokenizer=None, keys=PromptKeys(request.prompt, "", ""))


def say(run: StreamSession, count: int) -> None:
    journal = run.stream.journal
    for _ in range(count):
        journal.accept(journal.epoch, len(journal.delivered), 7 * len(journal.delivered) + 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from("open grow close forget send".split()), st.integers(0, 4)), max_size=60))
def test_peer_copy_equals_the_journals_at_each_frame(steps: list[tuple[str, int]]) -> None:
    shelf = JournalStore(Clock())
    copies, outgoing = PeerCopies(shelf), PeerBacklog([])
    sender = copies.sender()
    runs: dict[int, StreamSession] = {}
    for step, which in [*steps, ("send", 0)]:
        run = runs.get(which)
        if step == "open" and run is None:
            runs[which] = make_run(str(which))
            outgoing.opened(runs[which])
        elif step == "grow" and run is not None:
            say(run, which + 1)
            outgoing.grown(run)
        elif step in ("close", "forget") and run is not None:
            outgoing.closed(runs.pop(which), "stop", step == "forget")
        elif step == "send" and (changes := outgoing.take()) is not None:
            decoded = peer_wire.decode(peer_wire.encode(changes))
            assert isinstance(decoded, peer_wire.JournalChanges)
            sender.take(decoded)
    assert len(copies) == len(runs)
    for which, run in runs.items():
        [copy] = copies.find([str(which)])
        assert copy.request == run.stream.journal.replay()
    sender.lost()
    assert len(copies) == 0 and all(copies.find([str(which)]) for which in runs), "a lost router's streams are kept"


def test_ended_streams_are_kept_and_forgotten_ones_dropped() -> None:
    clock = Clock()
    copies, outgoing = PeerCopies(JournalStore(clock)), PeerBacklog([])
    sender, kept, forgotten = copies.sender(), make_run("kept"), make_run("forgotten")
    for run in (kept, forgotten):
        outgoing.opened(run)
    first = outgoing.take()
    assert first is not None
    sender.take(first)
    say(kept, 3)
    outgoing.closed(kept, "length", False)
    outgoing.closed(forgotten, None, True)
    second = outgoing.take()
    assert second is not None
    sender.take(second)
    [copy] = copies.find(["kept", "forgotten"])
    assert (copy.request.delivered, copy.finish) == ([1, 8, 15], "length")
    clock.now = 61
    assert copies.find(["kept"]) == []


def test_copies_are_bounded() -> None:
    copies = PeerCopies(JournalStore(Clock(), max_bytes=400), max_bytes=2000)
    sender = copies.sender()
    for number in range(9):
        sender.take(
            peer_wire.JournalChanges(
                begun=[(number, JournalCopy(make_request(id=f"r{number}")))], numbers=[number], counts=[1], tokens=[5], ended=[]
            )
        )
    assert 0 < len(copies) < 9 and copies.num_dropped == 9 - len(copies)
    held = len(copies)
    sender.take(
        peer_wire.JournalChanges(begun=[], numbers=[], counts=[], tokens=[], ended=[JournalEnd(number) for number in range(9)])
    )
    assert len(copies) == 0 and 0 < sum(bool(copies.find([f"r{number}"])) for number in range(9)) < max(held, 2)


def test_bounded_copy_is_shorter() -> None:
    copy = JournalCopy(make_request(id="a"))
    copies = PeerCopies(JournalStore(Clock()), max_bytes=LIVE_BYTES + len(peer_wire.encode(copy)) + 4 * TOKEN_BYTES)
    sender = copies.sender()
    sender.take(peer_wire.JournalChanges(begun=[(1, copy)], numbers=[1], counts=[3], tokens=[5, 6, 7], ended=[]))
    for token in (8, 9, 10):
        sender.take(peer_wire.JournalChanges(begun=[], numbers=[1], counts=[2], tokens=[token, token], ended=[]))
    [held] = copies.find(["a"])
    assert held.request.delivered == [5, 6, 7] and copies.num_dropped == 1
    sender.take(peer_wire.JournalChanges(begun=[], numbers=[1], counts=[1], tokens=[11], ended=[JournalEnd(1, "stop")]))
    [kept] = copies.find(["a"])
    assert (kept.request.delivered, kept.finish) == ([5, 6, 7], None), "what misses tokens has not ended"


def test_a_number_that_is_used_twice_leaves_nothing_behind() -> None:
    copies = PeerCopies(JournalStore(Clock()), max_bytes=4000)
    sender = copies.sender()
    for round in range(20):
        sender.take(
            peer_wire.JournalChanges(
                begun=[(1, JournalCopy(make_request(id=f"r{round}")))], numbers=[], counts=[], tokens=[], ended=[]
            )
        )
    assert len(copies) == 1 and copies.num_dropped == 0


def peer(name: str, leaving: bool = False) -> Endpoint:
    return Endpoint(key=name, address=f"{name}:1", group=name, leaving=leaving)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ("b", "abc", "ca"), ("c", "abc", "ab"), ("a", "abc", "bc"), ("x", "ab", "ab"), ("a", "a", ""),
    ],
)  # fmt: skip
def test_each_router_is_the_peer_of_another(own: str, others: str, expected: str) -> None:
    assert [found.group for found in peer_order(own, map(peer, others))] == list(expected)
    assert [found.group for found in peer_order("a", [peer("b", leaving=True), peer("c")])] == ["c", "b"]


@asynccontextmanager
async def running_router(name: str, leaders: list[str], peers: Leaders) -> AsyncIterator[tuple[Router, Peers, str]]:
    """A router with peers, as `make_router` puts it together; its links and its peers end when it is killed."""
    base = make_settings(patience_s=10)
    settings = replace(base, link=replace(base.link, router=name))
    registry = CollectorRegistry()
    fleet = RouterBackend(settings, RouterMetrics(registry), draw=lambda: 0.0)
    journals = fleet.stream_registry.journals = Peers(settings.link, fleet.stream_registry.open_runs)
    app = create_app(fleet, registry=registry, keys=ApiKeys(KEYS), metrics_prefix="phalanx_router")
    app.router.routes.append(PeerEndpoint(TOKEN, fleet.stream_registry.copies).route())

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.run(StaticLeaders(leaders)))
            tasks.create_task(journals.run(peers))

    task = asyncio.create_task(both())
    try:
        async with http_server(app) as address:
            router = Router(f"http://{address}", fleet, task, registry)
            await router.until_linked(1)
            yield router, journals, address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_stream_survives_its_router_and_its_group_together() -> None:
    """The orphan is gone with its group; a third router asks the others and finds the copy."""
    body = {**BODY, "seed": 77, "n": 2}
    whole = await undisturbed(body)
    dying, other = Engine(), Engine()
    dying.hold = 20
    async with running_engines(dying, other) as leaders, AsyncExitStack() as stack:
        lists = [Leaders(), Leaders(), Leaders()]
        first, journals, _ = await stack.enter_async_context(running_router("a", leaders[:1], lists[0]))
        second, _, address = await stack.enter_async_context(running_router("b", leaders[1:], lists[1]))
        third, _, _ = await stack.enter_async_context(running_router("c", leaders[1:], lists[2]))
        for found in lists:
            found.change(Endpoint(key="b", address=address, group="b"))
        await until(lambda: journals.peer is not None)
        told = await read(first.url, body, stop=chars(20))
        await until(lambda: len(second.fleet.stream_registry.copies) == 2)
        for run in first.fleet.stream_registry.open_runs():
            await until(lambda run=run: copy_at(second, run.stream.journal.id) == run.stream.journal.delivered)
        dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        await first.kill()
        told = await read(third.url, body, told)
        assert (told.texts, told.ends, told.is_done) == (whole.texts, whole.ends, True)
        assert other.num_submitted == 2


async def test_late_peer_receives_the_original_requests() -> None:
    """Its router asks no more for the details of the prompt, for it has them all."""
    body = {**BODY, "seed": 77, "echo": True, "logprobs": 1}
    whole, dying, other = await undisturbed(body), Engine(), Engine()
    dying.hold = 20
    async with running_engines(dying, other) as leaders, AsyncExitStack() as stack:
        peers, told = Leaders(), Told({}, {})
        first, _, _ = await stack.enter_async_context(running_router("a", leaders[:1], peers))
        second, _, address = await stack.enter_async_context(running_router("b", leaders[1:], Leaders()))
        reading = asyncio.create_task(read(first.url, body, told))
        await until(lambda: told.last.endswith(":19"))
        peers.change(Endpoint(key="b", address=address, group="b"))
        await until(lambda: len(second.fleet.stream_registry.copies) == 1)
        dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        await first.kill()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await read(second.url, body, told)
    assert told == replace(whole, last=told.last) and len(told.tokens[0]) > 40
    assert other.num_submitted == 1


def copy_at(router: Router, id: str) -> list[int]:
    found = router.fleet.stream_registry.copies.find([id])
    return found[0].request.delivered if found else []


async def test_lost_peer_is_replaced() -> None:
    engine = Engine()
    engine.hold = 20
    async with running_engines(engine) as leaders, AsyncExitStack() as stack:
        peers = Leaders()
        first, journals, _ = await stack.enter_async_context(running_router("a", leaders, peers))
        others = [await stack.enter_async_context(running_router(name, leaders, Leaders())) for name in "bc"]
        reading = asyncio.create_task(read(first.url, BODY))
        ends = [Endpoint(key=name, address=address, group=name) for name, (_, _, address) in zip("bc", others, strict=True)]
        peers.change(*ends)
        for place in range(2):
            await until(lambda place=place: len(others[place][0].fleet.stream_registry.copies) == 1)
            assert journals.peer == ends[place]
            peers.change(*ends[place + 1 :])
        await until(lambda: journals.peer is None)
        engine.hold = 10**9
        assert (await reading).is_done


async def test_peer_without_token_may_neither_send_nor_ask() -> None:
    async with http_server(create_app_with_door()) as address:
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


def create_app_with_door() -> Any:
    return Starlette(routes=[PeerEndpoint(TOKEN, PeerCopies(JournalStore(Clock()))).route()])
