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
from typing import TypeVar

import msgspec

from phalanx_api import moves, wire
from phalanx_runtime.collective.connect import Place, connect
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.rules import Rules
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.rank.carrier import PageCarrier, Reports
from phalanx_runtime.rank.page_door import PageDoor, Secret
from phalanx_runtime.rank.page_memory import open_pages
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.ranks import JOIN_S, Build, make_model_runner, make_places

SECRET = Secret(b"token", 1)
LIMITS = Limits(max_model_len=256, max_num_seqs=6, max_num_batched_tokens=64)
WAIT_S = 30.0


Said = TypeVar("Said", bound=msgspec.Struct)


class QueueChannel:
    """A Channel between threads. `frames` are those that the engine sent."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[wire.FromEngine] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_closed = False

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
        self.frames.put(wire.decode_from_engine(message))

    def wake(self) -> None:
        self._inbox.put(b"")


@dataclass
class Group:
    """One group: its channel, and the runners and doors of its ranks."""

    channel: QueueChannel = field(default_factory=QueueChannel)
    runners: dict[int, ModelRunner] = field(default_factory=dict)
    doors: dict[int, PageDoor] = field(default_factory=dict)
    loop: EngineLoop | None = None
    errors: list[BaseException] = field(default_factory=list)


@contextmanager
def running_group(folder: Path, pods: Sequence[int], build: Build, limits: Limits = LIMITS) -> Iterator[Group]:
    """A group whose engine serves on a thread of its own, as long as the block runs."""
    group, met = Group(), threading.Barrier(sum(pods))

    def serve(place: Place, listener: socket.socket) -> None:
        collective = connect(place, JOIN_S, listener)
        listener.close()
        try:
            runner = group.runners[place.rank] = make_model_runner(folder, collective, build)
            reports = Reports()
            tell = None if place.rank else partial(reports.add, 0)
            size = runner.pool.page_size
            door = PageDoor(place.rank, SECRET, size, partial(open_pages, runner.caches), runner.wait_for, tell)
            group.doors[place.rank] = door
            met.wait(WAIT_S)
            if place.rank:
                runner.follow()
                return
            ports = [group.doors[rank].port for rank in range(place.world_size)]
            carrier = PageCarrier(door, reports, [""] * len(ports), ports, range(len(ports)), SECRET)
            group.loop = EngineLoop(
                runner, limits, group.channel, rules=Rules(model="tiny"), grammars=runner.grammars, carrier=carrier
            )
            group.loop.run()
            if len(ports) > 1:
                runner.dismiss()
            carrier.close()
        except BaseException as error:
            group.errors.append(error)
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
        assert not group.errors, group.errors


@dataclass
class Stream:
    """One request as its router sees it."""

    request: wire.Request
    at: int
    handle: int
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    finish: str | None = None
    refused: wire.Refused | None = None


class Router:
    """Streams over groups, delivered as a router does: the current epoch, the next index."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.streams: dict[int, Stream] = {}
        self.said: list[tuple[int, wire.FromEngine]] = []
        self.loads: dict[int, wire.Load] = {}
        self._handles = 0
        self._moves = 0

    def submit(self, request: wire.Request, at: int = 0) -> Stream:
        self._handles += 1
        stream = self.streams[self._handles] = Stream(request, at, self._handles)
        self.groups[at].channel.put(wire.Submit(stream.handle, request))
        return stream

    def until(self, is_done: Callable[[], bool]) -> None:
        """Reads what engines say until this holds."""
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < deadline, f"nothing happens after {[frame for _, frame in self.said[-8:]]}"
            for number, group in enumerate(self.groups):
                assert not group.errors, group.errors
                try:
                    self._read(number, group.channel.frames.get(timeout=0.005))
                    while True:
                        self._read(number, group.channel.frames.get_nowait())
                except queue.Empty:
                    continue

    def _read(self, number: int, frame: wire.FromEngine) -> None:
        match frame:
            case wire.Tokens():
                for handle, epoch, index, token in zip(frame.handles, frame.epochs, frame.indices, frame.tokens, strict=True):
                    stream = self.streams[handle]
                    if epoch == stream.epoch and index == len(stream.tokens):
                        stream.tokens.append(token)
                for end in frame.finished:
                    if end.epoch == self.streams[end.handle].epoch:
                        self.streams[end.handle].finish = end.reason
            case wire.Refused():
                self.streams[frame.handle].refused = frame
            case wire.Load():
                self.loads[number] = frame
            case wire.PageChanges():
                pass
            case _:
                self.said.append((number, frame))

    def heard(self, kind: type[Said], move: str) -> list[Said]:
        return [frame for _, frame in self.said if isinstance(frame, kind) and getattr(frame, "move", None) == move]

    def current(self, stream: Stream) -> wire.Request:
        return msgspec.structs.replace(stream.request, epoch=stream.epoch, delivered=list(stream.tokens))

    def prepare(self, stream: Stream, target: int) -> str:
        """Asks the target for room; the name of the move."""
        self._moves += 1
        move = f"test:{self._moves}"
        self.groups[target].channel.put(wire.Prepare(move, self.current(stream)))
        self.until(lambda: bool(self.heard(moves.Prepared, move) + self.heard(moves.MoveFailed, move)))
        return move

    def move_out(
        self, stream: Stream, move: str, mode: moves.MoveMode, bytes_per_s: float | None = None, **changes: object
    ) -> None:
        """Asks the source to send; `changes` are made to what the target told."""
        prepared = self.heard(moves.Prepared, move)[0]
        here = [moves.PageAddress("localhost", one.port) for one in prepared.addresses]
        told = msgspec.structs.replace(prepared, **{"addresses": here, **changes})
        self.groups[stream.at].channel.put(moves.MoveOut(move, stream.handle, stream.epoch, told, mode, bytes_per_s))

    def wait_for_pages(self, move: str) -> None:
        """Returns when a move may be committed, or has failed."""

        def is_over() -> bool:
            is_ready = bool(self.heard(moves.Frozen, move)) and bool(self.heard(moves.Arrived, move))
            return is_ready or bool(self.heard(moves.MoveFailed, move))

        self.until(is_over)

    def commit(self, stream: Stream, move: str, target: int) -> None:
        """The stream is the target's from now on."""
        self._handles += 1
        source, old = stream.at, stream.handle
        stream.at, stream.handle, stream.epoch = target, self._handles, stream.epoch + 1
        self.streams[stream.handle] = stream
        self.groups[target].channel.put(wire.Submit(stream.handle, self.current(stream), move))
        self.groups[source].channel.put(moves.Release(move))
        self.groups[source].channel.put(wire.Abort([old]))

    def move(self, stream: Stream, target: int, mode: moves.MoveMode = "precopy") -> moves.Arrived:
        """Moves a stream, and what arrived."""
        move = self.prepare(stream, target)
        assert self.heard(moves.Prepared, move), self.said[-3:]
        self.move_out(stream, move, mode)
        self.until(
            lambda: (
                bool(self.heard(moves.Frozen, move) and self.heard(moves.Arrived, move))
                or bool(self.heard(moves.MoveFailed, move))
            )
        )
        assert not self.heard(moves.MoveFailed, move), self.heard(moves.MoveFailed, move)
        self.commit(stream, move, target)
        return self.heard(moves.Arrived, move)[0]

    def settle(self) -> None:
        """Waits until no engine has anything in hand, and no page is missing anywhere."""

        def is_settled(load: wire.Load) -> bool:
            assert not load.leaks
            return not (load.running or load.waiting or load.reserved_pages) and load.free_pages == load.total_pages

        self.until(lambda: all(is_settled(load) for load in self.loads.values()))


@contextmanager
def running_router(folder: Path, groups: Sequence[Sequence[int]], build: Build, limits: Limits = LIMITS) -> Iterator[Router]:
    """A router over so many groups, each with pods of so many ranks."""
    with ExitStack() as stack:
        yield Router([stack.enter_context(running_group(folder, pods, build, limits)) for pods in groups])
