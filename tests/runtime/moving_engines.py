"""Real engines over tiny models in this process, and a router that moves requests between them by hand."""

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
from phalanx_runtime.rank.memory.page_memory import open_pages
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.transfer.carrier import PageCarrier, TransferReports
from phalanx_runtime.rank.transfer.server import KvTransferServer, Secret
from tests.runtime.ranks import JOIN_S, Build, make_model_runner, make_places

SECRET = Secret(b"token", 1)
LIMITS = Limits(max_model_len=256, max_num_seqs=6, max_num_batched_tokens=64)
RULES = SchedulerConfig(model="tiny")
WAIT_S = 30.0


class QueueChannel:
    """A Channel between threads, and the End of a mover."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._hear: Callable[[wire.FromEngine], None] = lambda frame: None
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_closed = False

    def listen(self, hear: Callable[[wire.FromEngine], None]) -> None:
        self._hear = hear

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
        self._hear(wire.decode_from_engine(message))

    def wake(self) -> None:
        self._inbox.put(b"")


@dataclass
class Group:
    """One group: its channel, and the runners and doors of its ranks."""

    channel: QueueChannel = field(default_factory=QueueChannel)
    runners: dict[int, ModelRunner] = field(default_factory=dict)
    doors: dict[int, KvTransferServer] = field(default_factory=dict)
    loop: EngineLoop | None = None


@contextmanager
def running_group(
    folder: Path,
    pods: Sequence[int],
    build: Build,
    limits: Limits = LIMITS,
    rules: SchedulerConfig = RULES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Group]:
    """A group whose engine serves on a thread of its own, as long as the block runs."""
    group, met = Group(), threading.Barrier(sum(pods))

    def serve(place: RankPlace, listener: socket.socket) -> None:
        collective = connect(place, JOIN_S, listener)
        listener.close()
        try:
            runner = group.runners[place.rank] = make_model_runner(folder, collective, build)
            reports = TransferReports()
            tell = None if place.rank else partial(reports.add, 0)
            size, pages = runner.pool.page_size, partial(open_pages, runner.caches)
            door = KvTransferServer(place.rank, SECRET, size, pages, runner.wait_for, tell, draft=runner.draft_pages)
            group.doors[place.rank] = door
            met.wait(WAIT_S)
            if place.rank:
                runner.follow()
                return
            ports = [group.doors[rank].port for rank in range(place.world_size)]
            carrier = PageCarrier(door, reports, [""] * len(ports), ports, range(len(ports)), SECRET)
            group.loop = EngineLoop(
                runner,
                limits,
                group.channel,
                clock,
                rules=rules,
                grammars=runner.grammars(),
                carrier=carrier,
                fitting=runner.fitting,
            )
            group.loop.run()
            if len(ports) > 1:
                runner.dismiss()
            carrier.close()
        except BaseException as error:
            group.channel.errors.append(error)
        finally:
            if place.rank in group.doors:
                group.doors[place.rank].close()
            collective.close()

    threads = [threading.Thread(target=serve, args=one, daemon=True) for one in make_places(pods)]
    for thread in threads:
        thread.start()
    try:
        yield group
    finally:
        group.channel.close()
        for thread in threads:
            thread.join(WAIT_S)
        assert not group.channel.errors, group.channel.errors


@dataclass
class Field:
    """Groups, and who moves streams between them."""

    groups: list[Group]
    mover: Mover


@contextmanager
def running_field(
    folder: Path,
    groups: Sequence[Sequence[int]],
    build: Build,
    limits: Limits = LIMITS,
    rules: SchedulerConfig = RULES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Field]:
    """So many groups, each with pods of so many ranks."""
    with ExitStack() as stack:
        running = [stack.enter_context(running_group(folder, pods, build, limits, rules, clock)) for pods in groups]
        yield Field(running, Mover([group.channel for group in running]))
