"""Streams over groups, and their moves, by hand: what a router does, each step in the caller's hand. For tests and benchmarks."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from phalanx_api import moves, wire
from phalanx_api.wire import PROTOCOL_VERSION

WAIT_S = 60.0
Said = TypeVar("Said", bound=msgspec.Struct)
Frame = wire.FromLeader | wire.FromEngine


class End(Protocol):
    """One group, as its router reaches it."""

    def listen(self, hear: Callable[[Frame], None]) -> None:
        """Calls `hear` with every frame from now on, from any thread."""
        ...

    def put(self, frame: wire.ToEngine) -> None:
        """Sends a frame."""
        ...

    def check(self) -> None:
        """Raises when the group is gone."""
        ...


@contextmanager
def linked(base_url: str, token: str) -> Iterator["LinkEnd"]:
    """A link to the group that serves there, as long as the block runs."""
    url = base_url.replace("http", "ws", 1) + wire.LINK_PATH
    headers = {"Authorization": f"Bearer {token}"}
    with connect(url, additional_headers=headers, max_size=None, compression=None) as link:
        link.send(wire.encode(wire.Hello(PROTOCOL_VERSION, "mover")))
        yield LinkEnd(link)


class LinkEnd:
    """A group over its link."""

    def __init__(self, link: ClientConnection) -> None:
        self._link = link
        self._closed = threading.Event()

    def listen(self, hear: Callable[[Frame], None]) -> None:
        """Calls `hear` with every frame from now on, from a thread."""
        threading.Thread(target=self._read, args=(hear,), daemon=True).start()
        threading.Thread(target=self._live, daemon=True).start()

    def put(self, frame: wire.ToEngine) -> None:
        """Sends a frame. Raises when the link is closed."""
        self._link.send(wire.encode(frame))

    def check(self) -> None:
        """Raises when the link is closed."""
        if self._closed.is_set():
            raise ConnectionError("the link was closed")

    def _read(self, hear: Callable[[Frame], None]) -> None:
        try:
            for message in self._link:
                if isinstance(message, bytes):
                    hear(wire.decode_from_leader(message))
        except ConnectionClosed:
            pass
        self._closed.set()

    def _live(self) -> None:
        """Says every second that the router lives."""
        while not self._closed.wait(1.0):
            try:
                self.put(wire.Abort([]))
            except ConnectionClosed:
                return


@dataclass
class Stream:
    """One request as its router sees it. `times`: when each token came."""

    request: wire.Request
    at: int
    handle: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    epoch: int = 0
    finish: str | None = None
    refused: wire.Refused | None = None


class Mover:
    """Streams over groups, delivered as a router does: the current epoch, the next index."""

    def __init__(self, ends: Sequence[End]) -> None:
        self.ends = ends
        self.said: list[tuple[int, Frame]] = []
        self.loads: dict[int, wire.Load] = {}
        self._of: dict[str, list[Frame]] = {}
        self._streams: dict[int, Stream] = {}
        self._frames: queue.SimpleQueue[tuple[int, float, Frame]] = queue.SimpleQueue()
        self._handles = 0
        self._moves = 0
        for number, end in enumerate(ends):
            end.listen(lambda frame, number=number: self._frames.put((number, time.perf_counter(), frame)))  # type: ignore[misc]

    def submit(self, request: wire.Request, at: int = 0) -> Stream:
        """A stream of this request that starts in that group."""
        self._handles += 1
        stream = self._streams[self._handles] = Stream(request, at, self._handles)
        self.ends[at].put(wire.Submit(stream.handle, request))
        return stream

    def abort(self, stream: Stream) -> None:
        """Ends a stream."""
        self.ends[stream.at].put(wire.Abort([stream.handle]))

    def until(self, is_done: Callable[[], bool]) -> None:
        """Reads what groups say until this holds. Raises when nothing more happens."""
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happens after {[frame for _, frame in self.said[-8:]]}")
            for end in self.ends:
                end.check()
            try:
                self._read(*self._frames.get(timeout=0.5))
            except queue.Empty:
                continue

    def heard(self, kind: type[Said], move: str) -> list[Said]:
        """Frames of this kind about a move."""
        return [frame for frame in self._of.get(move, ()) if isinstance(frame, kind)]

    def current(self, stream: Stream) -> wire.Request:
        """What a journal would replay now."""
        return msgspec.structs.replace(stream.request, epoch=stream.epoch, delivered=list(stream.tokens))

    def prepare(self, stream: Stream, target: int) -> str:
        """Asks the target for room; the name of the move."""
        self._moves += 1
        move = f"mover:{id(self)}:{self._moves}"
        self.ends[target].put(wire.Prepare(move, self.current(stream)))
        self.until(lambda: bool(self.heard(moves.Prepared, move)) or bool(self.heard(moves.MoveFailed, move)))
        return move

    def move_out(
        self, stream: Stream, move: str, mode: moves.MoveMode, bytes_per_s: float | None = None, **changes: object
    ) -> None:
        """Asks the source to send; `changes` are made to what the target told."""
        prepared = self.heard(moves.Prepared, move)[0]
        here = [one if one.host else moves.PageAddress("localhost", one.port) for one in prepared.addresses]
        told = msgspec.structs.replace(prepared, **{"addresses": here, **changes})
        self.ends[stream.at].put(
            moves.MoveOut(move=move, handle=stream.handle, epoch=stream.epoch, prepared=told, mode=mode, bytes_per_s=bytes_per_s)
        )

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
        self._streams[stream.handle] = stream
        self.ends[target].put(wire.Submit(stream.handle, self.current(stream), move))
        self.ends[source].put(moves.Release(move))
        self.ends[source].put(wire.Abort([old]))

    def move(
        self, stream: Stream, target: int, mode: moves.MoveMode = "precopy", bytes_per_s: float | None = None
    ) -> moves.Arrived | moves.MoveFailed:
        """Moves a stream: what arrived, or why it stays where it is."""
        move = self.prepare(stream, target)
        if not self.heard(moves.MoveFailed, move):
            self.move_out(stream, move, mode, bytes_per_s)
            self.wait_for_pages(move)
        if failed := self.heard(moves.MoveFailed, move):
            self.ends[target].put(moves.Cancel(move))
            return failed[0]
        self.commit(stream, move, target)
        return self.heard(moves.Arrived, move)[0]

    def settle(self) -> None:
        """Returns when no group has anything in hand, and no page is missing anywhere. Raises when one is."""

        def is_settled(load: wire.Load) -> bool:
            if load.leaks:
                raise RuntimeError(f"pages are missing: {load}")
            return not (load.running or load.waiting or load.reserved_pages) and load.free_pages == load.total_pages

        self.until(lambda: all(is_settled(load) for load in self.loads.values()))

    def _read(self, number: int, now: float, frame: Frame) -> None:
        match frame:
            case wire.Tokens():
                for handle, epoch, index, token in zip(frame.handles, frame.epochs, frame.indices, frame.tokens, strict=True):
                    stream = self._streams[handle]
                    if epoch == stream.epoch and index == len(stream.tokens):
                        stream.tokens.append(token)
                        stream.times.append(now)
                for end in frame.finished:
                    if end.epoch == self._streams[end.handle].epoch:
                        self._streams[end.handle].finish = end.reason
            case wire.Refused():
                self._streams[frame.handle].refused = frame
            case wire.Load():
                self.loads[number] = frame
            case moves.Prepared() | moves.Frozen() | moves.Arrived() | moves.MoveFailed() | moves.AskRescue():
                self.said.append((number, frame))
                if not isinstance(frame, moves.AskRescue):
                    self._of.setdefault(frame.move, []).append(frame)
            case _:
                return
