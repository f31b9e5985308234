"""Streams over groups and their moves, step by step, for tests and benchmarks: a router without policy."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from phalanx_api import moves, wire
from phalanx_api.wire import PROTOCOL_VERSION

TIMEOUT_S = 60.0
FrameT = TypeVar("FrameT", bound=msgspec.Struct)
Frame = wire.FromLeader | wire.FromEngine
PullEnd = moves.Arrived | moves.MoveFailed


class GroupConnection(Protocol):
    def listen(self, receive: Callable[[Frame], None]) -> None:
        """Calls `receive` with each frame, from any thread."""
        ...

    def put(self, frame: wire.ToEngine) -> None: ...

    def check(self) -> None: ...


@contextmanager
def linked(base_url: str, token: str) -> Iterator["LinkConnection"]:
    """Connects a link to the group at this URL until the block ends."""
    url = base_url.replace("http", "ws", 1) + wire.LINK_PATH
    headers = {"Authorization": f"Bearer {token}"}
    with connect(url, additional_headers=headers, max_size=None, compression=None) as link:
        link.send(wire.encode(wire.Hello(PROTOCOL_VERSION, "mover")))
        yield LinkConnection(link)


class LinkConnection:
    """The connection to a group over its link."""

    def __init__(self, link: ClientConnection) -> None:
        self._link = link
        self._closed = threading.Event()

    def listen(self, receive: Callable[[Frame], None]) -> None:
        threading.Thread(target=self._read, args=(receive,), daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def put(self, frame: wire.ToEngine) -> None:
        """Sends a frame. Raises if the link is closed."""
        self._link.send(wire.encode(frame))

    def check(self) -> None:
        if self._closed.is_set():
            raise ConnectionError("the link was closed")

    def _read(self, receive: Callable[[Frame], None]) -> None:
        try:
            for message in self._link:
                if isinstance(message, bytes):
                    receive(wire.decode_from_leader(message))
        except ConnectionClosed:
            pass
        self._closed.set()

    def _send_heartbeats(self) -> None:
        """Sends a heartbeat every second."""
        while not self._closed.wait(1.0):
            try:
                self.put(wire.Abort([]))
            except ConnectionClosed:
                return


@dataclass
class Stream:
    request: wire.Request
    group: int
    handle: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # arrival of each token
    epoch: int = 0
    finish: str | None = None
    refused: wire.Refused | None = None


class Mover:
    """Delivers streams of several groups like a router: only the current epoch, only the next index."""

    def __init__(self, groups: Sequence[GroupConnection]) -> None:
        self.groups = groups
        self.move_frames: list[tuple[int, Frame]] = []
        self.loads: dict[int, wire.Load] = {}
        self.served: dict[int, wire.Served] = {}
        self._frames_by_move: dict[str, list[Frame]] = {}
        self._streams: dict[int, Stream] = {}
        self._frames: queue.SimpleQueue[tuple[int, float, Frame]] = queue.SimpleQueue()
        self._handles = 0
        self._moves = 0
        for number, group in enumerate(groups):
            group.listen(lambda frame, number=number: self._frames.put((number, time.perf_counter(), frame)))  # type: ignore[misc]

    def submit(self, request: wire.Request, group: int = 0) -> Stream:
        self._handles += 1
        stream = self._streams[self._handles] = Stream(request, group, self._handles)
        self.groups[group].put(wire.Submit(stream.handle, request))
        return stream

    def abort(self, stream: Stream) -> None:
        self.groups[stream.group].put(wire.Abort([stream.handle]))

    def until(self, is_done: Callable[[], bool]) -> None:
        """Processes frames until the condition holds. Raises TimeoutError after 60 s."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out; last frames of moves: {[frame for _, frame in self.move_frames[-8:]]}")
            for group in self.groups:
                group.check()
            try:
                self._read(*self._frames.get(timeout=0.5))
            except queue.Empty:
                continue

    def frames_of(self, kind: type[FrameT], move: str) -> list[FrameT]:
        return [frame for frame in self._frames_by_move.get(move, ()) if isinstance(frame, kind)]

    def current(self, stream: Stream) -> wire.Request:
        """Returns the request that a journal would replay now."""
        return msgspec.structs.replace(stream.request, epoch=stream.epoch, delivered=list(stream.tokens))

    def prepare(self, stream: Stream, target: int, num_computed: int = 0) -> str:
        self._moves += 1
        move = f"mover:{id(self)}:{self._moves}"
        self.groups[target].put(wire.Prepare(move, self.current(stream), num_computed=num_computed))
        self.until(lambda: bool(self.frames_of(moves.Prepared, move)) or bool(self.frames_of(moves.MoveFailed, move)))
        return move

    def move_out(
        self, stream: Stream, move: str, mode: moves.MoveMode, bytes_per_s: float | None = None, **changes: object
    ) -> None:
        """Orders the source to send; `changes` override fields of the target's `Prepared`."""
        prepared = self._prepared(move, changes)
        self.groups[stream.group].put(
            moves.MoveOut(
                move=move, handle=stream.handle, epoch=stream.epoch, prepared=prepared, mode=mode, bytes_per_s=bytes_per_s
            )
        )

    def _prepared(self, move: str, changes: Mapping[str, object]) -> moves.Prepared:
        prepared = self.frames_of(moves.Prepared, move)[0]
        addresses = [address if address.host else moves.PageAddress("localhost", address.port) for address in prepared.addresses]
        return msgspec.structs.replace(prepared, **{"addresses": addresses, **changes})

    def wait_for_pages(self, move: str) -> None:
        """Waits until the move may be committed or has failed."""

        def is_done() -> bool:
            is_ready = bool(self.frames_of(moves.Frozen, move)) and bool(self.frames_of(moves.Arrived, move))
            return is_ready or bool(self.frames_of(moves.MoveFailed, move))

        self.until(is_done)

    def commit(self, stream: Stream, move: str, target: int) -> None:
        """Makes the target the owner of the stream."""
        self._handles += 1
        source, old_handle = stream.group, stream.handle
        stream.group, stream.handle, stream.epoch = target, self._handles, stream.epoch + 1
        self._streams[stream.handle] = stream
        self.groups[target].put(wire.Submit(stream.handle, self.current(stream), move))
        self.groups[source].put(moves.Release(move))
        self.groups[source].put(wire.Abort([old_handle]))

    def move(
        self, stream: Stream, target: int, mode: moves.MoveMode = "precopy", bytes_per_s: float | None = None
    ) -> moves.Arrived | moves.MoveFailed:
        """Moves a stream; returns its arrival, or the failure that leaves it in its group."""
        move = self.prepare(stream, target)
        if not self.frames_of(moves.MoveFailed, move):
            self.move_out(stream, move, mode, bytes_per_s)
            self.wait_for_pages(move)
        if failed := self.frames_of(moves.MoveFailed, move):
            self.groups[target].put(moves.Cancel(move))
            return failed[0]
        self.commit(stream, move, target)
        return self.frames_of(moves.Arrived, move)[0]

    def prepare_pull(self, request: wire.Request, target: int, num_tokens: int = 0) -> str:
        """Reserves pages at the target for a request that has not started; `num_tokens`: that the holder has, if known."""
        return self.prepare(Stream(request, target, 0), target, num_tokens)

    def send_prefix(self, move: str, keys: list[bytes], holder: int, bytes_per_s: float | None = None, **changes: object) -> None:
        """Orders the holder to send cached pages; `changes` override fields of the target's `Prepared`."""
        prepared = self._prepared(move, changes)
        self.groups[holder].put(moves.SendPrefix(move=move, prepared=prepared, keys=keys, bytes_per_s=bytes_per_s))

    def pull(
        self, request: wire.Request, keys: list[bytes], holder: int, target: int, num_tokens: int = 0
    ) -> tuple[Stream, PullEnd]:
        """Starts a request at the target on cached pages of the holder, or without them; returns their arrival or the failure."""
        move = self.prepare_pull(request, target, num_tokens)
        if not self.frames_of(moves.MoveFailed, move):
            self.send_prefix(move, keys, holder)
            self.until(lambda: bool(self.frames_of(moves.Arrived, move) or self.frames_of(moves.MoveFailed, move)))
        return self.start_pulled(request, move, holder, target)

    def start_pulled(self, request: wire.Request, move: str, holder: int, target: int) -> tuple[Stream, PullEnd]:
        """Starts a request on the pages of a pull if they have arrived, or cancels the pull and starts it without."""
        if failed := self.frames_of(moves.MoveFailed, move):
            self.groups[target].put(moves.Cancel(move))
            self.groups[holder].put(moves.Thaw(move))
            return self.submit(request, target), failed[0]
        self._handles += 1
        stream = self._streams[self._handles] = Stream(request, target, self._handles)
        self.groups[target].put(wire.Submit(stream.handle, request, move))
        self.groups[holder].put(moves.Release(move))
        return stream, self.frames_of(moves.Arrived, move)[0]

    def settle(self) -> None:
        """Waits until all groups are idle with all pages free. Raises RuntimeError if a page leaked."""

        def is_settled(load: wire.Load) -> bool:
            if load.leaks:
                raise RuntimeError(f"pages leaked: {load}")
            is_free = load.free_pages == load.total_pages and load.free_parts == load.total_parts
            return not (load.running or load.waiting or load.reserved_pages) and is_free

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
            case wire.State():
                if frame.served is not None:
                    self.served[number] = frame.served
            case moves.Prepared() | moves.Frozen() | moves.Arrived() | moves.MoveFailed() | moves.RescueRequest():
                self.move_frames.append((number, frame))
                if not isinstance(frame, moves.RescueRequest):
                    self._frames_by_move.setdefault(frame.move, []).append(frame)
            case _:
                return
