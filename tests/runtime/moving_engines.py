"""Real engines over tiny models in this process, and a mover that moves requests between them."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.moves.mover import Mover
from phalanx_api import wire
from phalanx_runtime.collective.connect import RankPlace, connect
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.transfer.server import KvTransferServer, LocalReports, RemoteReports, Secret
from phalanx_runtime.rank.transfer.transport import GroupPageTransport, TransferReports
from tests.runtime.lag import PendingCounter, lagged
from tests.runtime.ranks import JOIN_S, Build, make_model_runner, make_places

SECRET = Secret(b"token", 1)
LIMITS = Limits(max_model_len=256, max_num_seqs=6, max_num_batched_tokens=64)
RULES = SchedulerConfig(model="tiny")
TIMEOUT_S = 30.0


def slow_clock() -> float:
    """Seconds of engines whose leases do not expire, however busy the machine is."""
    return time.monotonic() / 30


class QueueChannel:
    """An EngineChannel between threads, and the GroupConnection of a mover."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._receive: Callable[[wire.FromEngine], None] = lambda frame: None
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_closed = False

    def listen(self, receive: Callable[[wire.FromEngine], None]) -> None:
        self._receive = receive

    def check(self) -> None:
        assert not self.errors, self.errors

    def put(self, frame: wire.ToEngine) -> None:
        self._inbox.put(wire.encode(frame))

    def close(self) -> None:
        self._is_closed = True
        self._inbox.put(b"")

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        messages = []
        try:
            if block:
                messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return None if self._is_closed else [message for message in messages if message]

    def send(self, message: bytes) -> None:
        self._receive(wire.decode_from_engine(message))

    def wake(self) -> None:
        self._inbox.put(b"")


@dataclass
class Group:
    """One group: its channel, and the runners and transfer servers of its ranks."""

    channel: QueueChannel = field(default_factory=QueueChannel)
    runners: dict[int, ModelRunner] = field(default_factory=dict)
    servers: dict[int, KvTransferServer] = field(default_factory=dict)
    loop: EngineLoop | None = None
    num_pending: int = 0
    """Tokens that were planned before they were known, once the group has ended."""


@contextmanager
def running_group(
    folder: Path,
    pods: Sequence[int],
    build: Build,
    limits: Limits = LIMITS,
    rules: SchedulerConfig = RULES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Group]:
    """Runs a group, each rank in a thread, until the block ends."""
    group, barrier = Group(), threading.Barrier(sum(pods))

    def serve(place: RankPlace, listener: socket.socket) -> None:
        collective = connect(place, JOIN_S, listener)
        listener.close()
        try:
            runner = group.runners[place.rank] = make_model_runner(folder, collective, build)
            reports = TransferReports()
            sink = RemoteReports() if place.rank else LocalReports(partial(reports.add, 0))
            server = KvTransferServer(place.rank, SECRET, runner.page_access(), sink)
            group.servers[place.rank] = server
            barrier.wait(TIMEOUT_S)
            if place.rank:
                runner.follow()
                return
            ports = [group.servers[rank].port for rank in range(place.world_size)]
            local_ranks = range(len(ports))
            transport = GroupPageTransport(server, reports, [""] * len(ports), ports, local_ranks, SECRET)
            counter = PendingCounter(runner)
            group.loop = EngineLoop(
                counter,
                lagged(limits),
                group.channel,
                clock,
                config=rules,
                grammars=runner.grammars(),
                transport=transport,
                adapters=runner.adapters,
                fitting=runner.fitting,
            )
            group.loop.run()
            group.num_pending += counter.num_pending
            if len(ports) > 1:
                runner.dismiss()
            transport.close()
        except BaseException as error:
            group.channel.errors.append(error)
        finally:
            if place.rank in group.servers:
                group.servers[place.rank].close()
            collective.close()

    threads = [threading.Thread(target=serve, args=one, daemon=True) for one in make_places(pods)]
    for thread in threads:
        thread.start()
    try:
        yield group
    finally:
        group.channel.close()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not group.channel.errors, group.channel.errors


@dataclass
class MovingGroups:
    """Running groups and the mover of their streams."""

    groups: list[Group]
    mover: Mover


@contextmanager
def running_groups(
    folder: Path,
    groups: Sequence[Sequence[int]],
    build: Build,
    limits: Limits = LIMITS,
    rules: SchedulerConfig = RULES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[MovingGroups]:
    """Runs groups until the block ends. groups: ranks of each pod of each group."""
    with ExitStack() as stack:
        running = [stack.enter_context(running_group(folder, pods, build, limits, rules, clock)) for pods in groups]
        yield MovingGroups(running, Mover([group.channel for group in running]))
    runs_ahead = build.stages == 1 and rules.speculation.method == "none" and lagged(limits).async_scheduling
    assert any(group.num_pending for group in running) or not runs_ahead
