"""Rendezvous between a leader and worker pods over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from phalanx_api.wire import PROTOCOL_VERSION, DeclaredAdapter
from phalanx_runtime.server.supervision import incarnation as inc
from phalanx_runtime.server.supervision import rendezvous_wire as frames
from phalanx_runtime.server.supervision.rendezvous import LeaderRendezvous, WorkerRendezvous
from phalanx_runtime.server.supervision.rendezvous_wire import Connection, Timing, prove, rank_key
from tests.polling import until

QUICK = Timing(ping_s=0.01, silence_s=5.0, first_retry_s=0.001, max_retry_s=0.01)


async def settle() -> None:
    """Lets transports complete their opening or closing."""
    for _ in range(10):
        await asyncio.sleep(0)


@dataclass
class Leader:
    """The leader's side and its events."""

    rendezvous: LeaderRendezvous
    events: list[inc.Event]
    port: int = 0


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    events: list[inc.Event] = []
    rendezvous = LeaderRendezvous(lambda: ["token"], 3, events.append, QUICK)
    yield Leader(rendezvous, events, await rendezvous.listen("127.0.0.1", 0))
    await rendezvous.close()


@dataclass
class Worker:
    """A worker's side and the commands it received."""

    rendezvous: WorkerRendezvous
    commands: list[frames.Command] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    @staticmethod
    def make(pod: int = 1, token: str = "token", num_pods: int = 3, timing: Timing = QUICK) -> "Worker":
        commands: list[frames.Command] = []
        return Worker(WorkerRendezvous(lambda: [token], pod, num_pods, commands.append, timing=timing), commands)

    @asynccontextmanager
    async def joins(self, port: int) -> AsyncIterator[None]:
        """The pod connects to this port during the block."""
        task = asyncio.create_task(self.rendezvous.run("127.0.0.1", port, self.losses.append))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            await settle()


@asynccontextmanager
async def fake_leader(*script: frames.Frame, after: int = 0) -> AsyncIterator[int]:
    """Port of a leader that sends these frames; those from `after` on once it has received a frame."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connection = Connection(reader, writer, QUICK)
        for position, frame in enumerate(script):
            if after and position == after:
                await connection.receive()
            connection.send(frame)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await settle()
    for writer in writers:
        writer.close()
    await settle()


async def shake_hands(
    port: int, pod: int, version: int = PROTOCOL_VERSION
) -> tuple[Connection, asyncio.StreamReader, frames.Frame]:
    """A pod's authenticated connection, and the leader's answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = Connection(reader, writer, QUICK)
    challenge = await connection.receive()
    assert isinstance(challenge, frames.Challenge)
    connection.send(
        frames.Join(version=version, pod=pod, num_pods=3, nonce=b"n", proof=prove("token", f"pod {pod}", challenge.nonce, b"n"))
    )
    return connection, reader, await connection.receive()


async def test_pod_with_the_token_joins_and_gets_commands(leader: Leader) -> None:
    worker = Worker.make()
    async with worker.joins(leader.port):
        await until(lambda: len(leader.events) == 1)
        assert leader.events == [inc.Joined(1, "127.0.0.1")]
        assert leader.rendezvous.own_host == "127.0.0.1"
        commands: list[frames.Command] = [
            frames.Start(1, ["a", "b", "c"], b"nonce", "no memory"),
            frames.Serve(1),
            frames.Stop(1, "why"),
        ]
        for command in commands:
            leader.rendezvous.send(command)
        await until(lambda: worker.commands == commands)
        worker.rendezvous.send(frames.Ready(1))
        worker.rendezvous.send(frames.Failed(1, "oom", True))
        worker.rendezvous.send(frames.Failed(1, "no memory", False, is_draft=True))
        await until(lambda: len(leader.events) == 4)
        failed = [
            inc.RanksFailed(pod=1, incarnation=1, why="oom", is_echo=True),
            inc.RanksFailed(pod=1, incarnation=1, why="no memory", is_draft=True),
        ]
        assert leader.events[1:] == [inc.RanksReady(1, 1), *failed]
    await until(lambda: len(leader.events) == 5)
    assert leader.events[4] == inc.Left(1, "the connection was closed")


@pytest.mark.parametrize(
    ("token", "pod", "num_pods", "why"),
    [
        ("wrong", 1, 3, "the service token is wrong"),
        (frames.group_token("token", "of another group"), 1, 3, "the service token is wrong"),
        ("token", 1, 2, "the leader has 3 pods, pod 1 expects 2"),
        ("token", 0, 3, "the leader has 3 pods, pod 0 expects 3"),
        ("token", 3, 3, "the leader has 3 pods, pod 3 expects 3"),
    ],
    ids=["wrong token", "another StatefulSet's key", "another size", "a second leader", "an index too high"],
)
async def test_foreign_pod_is_refused_with_a_reason(leader: Leader, token: str, pod: int, num_pods: int, why: str) -> None:
    worker = Worker.make(pod, token, num_pods)
    async with worker.joins(leader.port):
        await until(lambda: len(worker.losses) >= 2)
    assert why in worker.losses[0]
    assert leader.events == []


async def test_commands_of_a_leader_without_the_token_are_ignored() -> None:
    worker = Worker.make()
    challenge, welcome, order = (
        frames.Challenge(PROTOCOL_VERSION, b"nonce"),
        frames.Welcome(b"no proof"),
        frames.Start(1, ["evil"], b""),
    )
    async with fake_leader(challenge, welcome, order, after=1) as port, worker.joins(port):
        await until(lambda: bool(worker.losses))
    assert "the leader does not prove the service token" in worker.losses[0]
    assert worker.commands == []


@pytest.mark.parametrize(
    ("script", "after", "why"),
    [
        ((frames.Ready(1),), 0, "expected Challenge"),
        ((frames.Challenge(PROTOCOL_VERSION, b"n"), frames.Serve(1)), 1, "expected Welcome"),
    ],
    ids=["no challenge", "no welcome"],
)
async def test_leader_with_an_invalid_message_is_disconnected(script: tuple[frames.Frame, ...], after: int, why: str) -> None:
    worker = Worker.make()
    async with fake_leader(*script, after=after) as port, worker.joins(port):
        await until(lambda: bool(worker.losses))
    assert why in worker.losses[0]


async def test_leader_with_a_pods_message_is_disconnected(leader: Leader) -> None:
    worker = Worker.make()
    async with worker.joins(leader.port):
        await until(lambda: len(leader.events) == 1)
        leader.rendezvous.pods[1].send(frames.Ready(1))
        await until(lambda: bool(worker.losses))
    assert "unexpected Ready" in worker.losses[0]


async def test_pod_reconnects_until_the_leader_listens() -> None:
    async with fake_leader() as port:
        pass
    worker = Worker.make()
    events: list[inc.Event] = []
    rendezvous = LeaderRendezvous(lambda: ["token"], 3, events.append, QUICK)
    async with worker.joins(port):
        await until(lambda: len(worker.losses) >= 3)
        await rendezvous.listen("127.0.0.1", port)
        await until(lambda: bool(events))
    await rendezvous.close()


async def test_returning_pod_replaces_its_connection(leader: Leader) -> None:
    first, second = Worker.make(), Worker.make()
    async with first.joins(leader.port):
        await until(lambda: len(leader.events) == 1)
        async with second.joins(leader.port):
            await until(lambda: len(leader.events) == 2)
            assert leader.events == [inc.Joined(1, "127.0.0.1")] * 2
            leader.rendezvous.send(frames.Serve(4))
            await until(lambda: second.commands == [frames.Serve(4)])
            assert first.commands == []


async def test_a_silent_peer_is_lost() -> None:
    events: list[inc.Event] = []
    rendezvous = LeaderRendezvous(lambda: ["token"], 3, events.append, Timing(ping_s=100, silence_s=0.05))
    port = await rendezvous.listen("127.0.0.1", 0)
    async with Worker.make(timing=Timing(ping_s=100, silence_s=100)).joins(port):
        await until(lambda: len(events) == 2)
        assert events == [inc.Joined(1, "127.0.0.1"), inc.Left(1, "silent for 0.05 s")]
    await rendezvous.close()


async def test_both_sides_answer_pings(leader: Leader) -> None:
    connection, reader, welcome = await shake_hands(leader.port, 2)
    assert isinstance(welcome, frames.Welcome)
    ping = frame_bytes(frames.Ping())
    async with asyncio.timeout(10):
        assert await reader.readexactly(3 * len(ping)) == 3 * ping
    connection.send(frames.Ping())
    connection.send(frames.Ready(1))
    await until(lambda: len(leader.events) == 2)
    assert leader.events == [inc.Joined(2, "127.0.0.1"), inc.RanksReady(2, 1)]
    connection.close()
    await settle()


def frame_bytes(frame: frames.Frame) -> bytes:
    body = frames.encode_frame(frame)
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", (3).to_bytes(4, "big") + b"\xc1\xc1\xc1", frame_bytes(frames.Serve(1)), b""],
    ids=["too long", "no frame", "unexpected frame", "closed"],
)
async def test_malformed_data_closes_one_connection(leader: Leader, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", leader.port)
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(10):
        await asyncio.gather(reader.read(), return_exceptions=True)  # the end or a reset
    writer.close()
    assert leader.events == []


async def test_pod_with_a_leaders_message_is_lost(leader: Leader) -> None:
    connection, _, _ = await shake_hands(leader.port, 2)
    connection.send(frames.Serve(1))
    await until(lambda: len(leader.events) == 2)
    assert leader.events[1] == inc.Left(2, "unexpected Serve")
    connection.close()
    await settle()


async def test_pod_of_another_version_is_reported(leader: Leader) -> None:
    connection, _, welcome = await shake_hands(leader.port, 2, version=99)
    assert isinstance(welcome, frames.Welcome)
    assert "version 1, pod 2 version 99" in welcome.refused
    connection.close()
    await settle()


def test_each_incarnation_has_its_own_key() -> None:
    keys = {rank_key("t", 1, b"a"), rank_key("t", 2, b"a"), rank_key("t", 1, b"b"), rank_key("u", 1, b"a")}
    assert len(keys) == 4


ADAPTER = DeclaredAdapter("legal", "hf://org/legal")


async def answer_fetch(worker: Worker, why: str = "") -> None:
    """Waits for the order to download the adapter, and answers it."""
    await until(lambda: any(isinstance(command, frames.FetchAdapter) for command in worker.commands))
    (order,) = [command for command in worker.commands if isinstance(command, frames.FetchAdapter)]
    assert order.adapter == ADAPTER
    worker.rendezvous.send(frames.AdapterFetched(order.number, why))


@pytest.mark.parametrize(("why", "expected"), [("", ""), ("no answer of the hub", "pod 2: no answer of the hub")])
async def test_adapter_is_usable_once_all_pods_have_it(leader: Leader, why: str, expected: str) -> None:
    first, second = Worker.make(1), Worker.make(2)
    async with first.joins(leader.port), second.joins(leader.port):
        await until(lambda: len(leader.rendezvous.pods) == 2)
        fetch = asyncio.create_task(leader.rendezvous.fetch_adapter(ADAPTER))
        await answer_fetch(first)
        await settle()
        assert not fetch.done()
        await answer_fetch(second, why)
        assert await fetch == expected


async def test_a_lost_pod_ends_the_fetch_of_an_adapter(leader: Leader) -> None:
    first = Worker.make(1)
    async with first.joins(leader.port):
        await until(lambda: leader.rendezvous.pods)
        fetch = asyncio.create_task(leader.rendezvous.fetch_adapter(ADAPTER))
        await until(lambda: first.commands)
    assert (await fetch).startswith("pod 1: ")


async def test_groups_of_one_pod_fetch_nothing_elsewhere(leader: Leader) -> None:
    assert await leader.rendezvous.fetch_adapter(ADAPTER) == ""
