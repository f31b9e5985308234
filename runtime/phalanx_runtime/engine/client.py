"""The HTTP process's face of the engine: requests go in, and the tokens of a step come out in one call per sink.

A sink is whoever submits: the local door, or the link of one router. The socket belongs to one incarnation of the group; when
that ends every open request is forgotten and `state` changes, which those who subscribed are told.
Everything here runs on one asyncio loop and nothing waits: the socket's descriptor wakes `_drain`.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from phalanx_api import moves, wire
from phalanx_frontend.backend import BackendError
from phalanx_runtime.engine.meter import Ended, Meter
from phalanx_runtime.engine.move_relay import MoveRelay
from phalanx_runtime.engine.page_keys import PageKeys

log = logging.getLogger(__name__)

RESTART_RETRY_S = 2.0
"""Retry-After while the group restarts: a rank needs a few seconds to load its weights."""
NO_LOAD = wire.Load(0, 0, 0, 0, 0)


class Sink(Protocol):
    """Takes what the engine says of requests that were submitted with it. Called on the event loop; never blocks."""

    def tokens(self, frame: wire.Tokens) -> None:
        """All tokens of one step that belong to this sink's requests, and those of its requests that ended."""
        ...

    def refused(self, frame: wire.Refused) -> None:
        """A request does not run."""
        ...


class Follower(Protocol):
    """Hears what the engine says of itself. Called on the event loop; never blocks."""

    def load_changed(self) -> None:
        """There is another load report."""
        ...

    def pages_changed(self, changes: wire.PageChanges) -> None:
        """The prefix cache finds other pages than before."""
        ...


@dataclass(slots=True)
class _Open:
    """One request in the engine, as the client sees it."""

    sink: Sink
    prompt_tokens: int
    max_tokens: int
    submitted: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    is_alone: bool = False

    def end(self, reason: str, now: float) -> Ended:
        """What is told of it."""
        decode_s = self.last - self.first if self.first is not None else 0.0
        return Ended(reason, self.prompt_tokens, self.cached_tokens, self.tokens, self.max_tokens, now - self.submitted, decode_s)


class EngineClient:
    """Requests of all sinks, over the socket of the current incarnation. Belongs to one running event loop."""

    def __init__(self, meter: Meter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        self._open: dict[int, _Open] = {}
        self._unsent: deque[bytes] = deque()
        self._handles = itertools.count(1)
        self._state = wire.State(False, 0, "starting")
        self._load = NO_LOAD
        self._assets: wire.Assets | None = None
        self._is_leaving = False
        self._stops: str | None = None
        self._deaths, self._death = 0, ""
        self._subscribers: list[Callable[[], None]] = []
        self._followers: list[Follower] = []
        self._pages = PageKeys()
        self.moves = MoveRelay(self._send_order, lambda handle: self._drop([handle], "moved"))

    def state(self) -> wire.State:
        """Whether the group serves, and its incarnation."""
        return self._state

    def has(self, handle: int) -> bool:
        """Whether a request is still in the engine, as far as is known."""
        return handle in self._open

    @property
    def is_busy(self) -> bool:
        """Whether any request is."""
        return bool(self._open)

    @property
    def stops(self) -> str | None:
        """Why there will be no other incarnation, or None when there will be."""
        return self._stops

    def load(self) -> wire.Load:
        """What the engine last said it has in hand."""
        return self._load

    def pages(self) -> wire.PageChanges:
        """A snapshot of what the prefix cache finds."""
        return self._pages.snapshot()

    def assets(self) -> wire.Assets:
        """What a door needs of the model. Raises BackendError 503 until an incarnation has served once."""
        if self._assets is None:
            raise BackendError(503, "model_loading", f"the model is not loaded yet: {self._state.reason}", RESTART_RETRY_S)
        return self._assets

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change of `state`, until the function that this returns is called."""
        self._subscribers.append(changed)
        return lambda: self._subscribers.remove(changed)

    def follow(self, follower: Follower) -> Callable[[], None]:
        """Tells of load reports and pages, until the function that this returns is called."""
        self._followers.append(follower)
        return lambda: self._followers.remove(follower)

    def bind(self, endpoint: str) -> None:
        """Opens the socket of a new incarnation, before its rank 0 starts. Requests are taken from `serve` on."""
        self._close_socket()
        if self._is_leaving or self._stops is not None:
            return
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        self._socket = socket
        asyncio.get_running_loop().add_reader(socket.fileno(), self._drain)

    def serve(self, assets: wire.Assets, served: wire.Served | None = None) -> None:
        """Takes requests from now on: every rank of the incarnation is ready, and this is what doors and routers need to know."""
        if self._is_leaving or self._stops is not None:
            return
        self._assets = assets
        self._change(wire.State(True, self._state.incarnation, served=served))
        self._drain()

    @property
    def has_alone(self) -> bool:
        """Whether a request is here that is computed alone, because groups died under it."""
        return any(request.is_alone for request in self._open.values())

    def lose(self, next_incarnation: int, reason: str, is_outside: bool = False) -> None:
        """Ends the incarnation: its requests are forgotten, and none are taken until the next one serves."""
        cause: wire.Cause = "outside" if is_outside else "alone" if self.has_alone else ""
        self._close_socket()
        self._forget(list(self._open), "error")
        self._load, self._pages = NO_LOAD, PageKeys()
        self.moves.clear()
        self._meter.load(NO_LOAD)
        self._change(wire.State(False, next_incarnation, reason, cause=cause))

    def died(self, deaths: int, death: str) -> None:
        """Tells with the next state how many incarnations ended for no cause outside, and why the last did."""
        self._deaths, self._death = deaths, death

    def tell(self, next_incarnation: int, reason: str) -> None:
        """Says anew why the group does not serve."""
        self._change(wire.State(False, next_incarnation, reason))

    def pause(self, reason: str) -> None:
        """Takes no more requests in this incarnation; those that run go on."""
        if self._stops is None:
            self._change(wire.State(False, self._state.incarnation, reason, draining=True, served=self._state.served))

    def drain(self, reason: str) -> None:
        """Takes no more requests; those that run go on, unless their incarnation ends: there will be no other."""
        self._stops = reason
        self._change(wire.State(False, self._state.incarnation, reason, draining=True, served=self._state.served))

    def refuse(self, reason: str) -> None:
        """Ends all requests and takes no more, whatever becomes of the incarnation: the process is stopping."""
        self._stops = reason
        self.lose(self._state.incarnation, reason, is_outside=True)
        self._is_leaving = True

    def close(self) -> None:
        """Ends everything for good."""
        self._is_leaving = True
        self._open.clear()
        self._close_socket()
        self._context.term()

    def submit(self, request: wire.Request, sink: Sink, move: str = "") -> int:
        """The engine's handle of a request that was started; `sink` hears of it later, never within this call.

        With `move` it starts on the pages that came with that move. Raises BackendError 503 while the group does not serve.
        """
        if self._stops is not None:
            raise BackendError(503, "draining", f"the group takes no more requests: {self._state.reason}", RESTART_RETRY_S)
        if not self._state.serving:
            raise BackendError(503, "group_restarting", f"the group does not serve: {self._state.reason}", RESTART_RETRY_S)
        handle = next(self._handles)
        self._send(wire.Submit(handle, request, move))  # first: what cannot be encoded must leave nothing behind
        if move:
            self.moves.over(move)
        self._open[handle] = _Open(sink, len(request.prompt), request.sampling.max_tokens, self._clock(), is_alone=request.alone)
        return handle

    def hand_over(self, handles: Iterable[int], sink: Sink) -> None:
        """Lets another sink hear of these requests from now on; unknown handles are no error."""
        for handle in handles:
            if (request := self._open.get(handle)) is not None:
                request.sink = sink

    def abort(self, handles: list[int]) -> None:
        """Forgets requests; unknown handles are no error. Tokens that are on their way are dropped."""
        self._drop(handles, "abort")

    def _drop(self, handles: list[int], reason: str) -> None:
        known = self._forget(handles, reason)
        if known:
            self._send(wire.Abort(known))

    def _forget(self, handles: list[int], reason: str) -> list[int]:
        """Those of the handles that were known."""
        known = []
        for handle in handles:
            request = self._open.pop(handle, None)
            if request is not None:
                known.append(handle)
                self._meter.ended(request.end(reason, self._clock()))
        return known

    def _change(self, state: wire.State) -> None:
        state = msgspec.structs.replace(state, deaths=self._deaths, death=self._death)
        if state == self._state or (self._is_leaving and not self._state.serving):
            return
        self._state = state
        for changed in list(self._subscribers):
            changed()

    def _close_socket(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._unsent.clear()

    def _send_order(self, frame: wire.ToEngine) -> None:
        """Gives the engine a frame of a move; without an engine there are none."""
        if self._socket is not None:
            self._send(frame)

    def _send(self, frame: wire.ToEngine) -> None:
        assert self._socket is not None, "requests are open only between bind and lose"
        self._unsent.append(wire.encode(frame))
        self._flush(self._socket)
        # A zmq descriptor signals edges only, and sending may have consumed one: look whether something came in meanwhile.
        asyncio.get_running_loop().call_soon(self._drain)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Sends what waits, and whether there was any; without a peer yet it goes on waiting, and the descriptor tells of one."""
        has_sent = False
        try:
            while self._unsent:
                socket.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
                has_sent = True
        except zmq.Again:
            pass
        return has_sent

    def _drain(self) -> None:
        """Handles every message that is there, and sends what waits."""
        while self._socket is not None:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                # recv has seen a peer that came, which send looks for only now and then; each may consume the other's edge.
                if self._flush(self._socket):
                    continue
                return
            self.hear(message)

    def hear(self, message: bytes) -> None:
        """Takes one message of the engine."""
        try:
            frame = wire.decode_from_engine(message)
        except msgspec.DecodeError as error:
            log.error("frame of the engine cannot be read: %s", error)
            return
        match frame:
            case wire.Tokens():
                self._route(frame)
            case wire.Refused():
                request = self._open.pop(frame.handle, None)
                if request is not None:
                    self._meter.ended(request.end("error", self._clock()))
                    request.sink.refused(frame)
            case moves.Prepared() | moves.Frozen() | moves.Arrived() | moves.MoveFailed():
                self.moves.tell(frame)
            case moves.AskRescue():
                self.moves.ask(frame)
            case wire.Load():
                self._load = frame
                self._meter.load(frame)
                for follower in self._followers:
                    follower.load_changed()
            case wire.PageChanges():
                self._pages.apply(frame)
                for follower in self._followers:
                    follower.pages_changed(frame)

    def _route(self, frame: wire.Tokens) -> None:
        """Splits the tokens of one step by sink; those of aborted requests go nowhere."""
        now = self._clock()
        parts: dict[int, tuple[Sink, wire.Tokens]] = {}
        runs, gaps_s = Counter(frame.handles), dict[int, float]()  # tokens that came together share the time since those before
        for handle, epoch, index, token in zip(frame.handles, frame.epochs, frame.indices, frame.tokens, strict=True):
            request = self._open.get(handle)
            if request is None:
                continue
            part = _part(parts, request.sink)
            part.handles.append(handle)
            part.epochs.append(epoch)
            part.indices.append(index)
            part.tokens.append(token)
            if request.first is None:
                request.first = now
                self._meter.first_token(request.prompt_tokens, now - request.submitted)
            else:
                self._meter.next_token(gaps_s.setdefault(handle, (now - request.last) / runs[handle]))
            request.last = now
            request.tokens += 1
        self._route_details(frame, parts)
        for end in frame.finished:
            request = self._open.pop(end.handle, None)
            if request is None:
                continue
            _part(parts, request.sink).finished.append(end)
            request.cached_tokens = end.cached_tokens
            self._meter.ended(request.end(end.reason, now))
        for wait_s in frame.queue_times_s:
            self._meter.queued(wait_s)
        self._meter.step(len(frame.handles))
        for sink, part in parts.values():
            sink.tokens(part)

    def _route_details(self, frame: wire.Tokens, parts: dict[int, tuple[Sink, wire.Tokens]]) -> None:
        """What was told of tokens, parallel to each part's tokens, and of prompts."""
        for cached in frame.cached:
            request = self._open.get(cached.handle)
            if request is not None:
                request.cached_tokens = cached.cached_tokens
                _part(parts, request.sink).cached.append(cached)
        if frame.details:
            for handle, detail in zip(frame.handles, frame.details, strict=True):
                request = self._open.get(handle)
                if request is not None:
                    _part(parts, request.sink).details.append(detail)
        for told in frame.prompt_details:
            request = self._open.get(told.handle)
            if request is not None:
                _part(parts, request.sink).prompt_details.append(told)


def _part(parts: dict[int, tuple[Sink, wire.Tokens]], sink: Sink) -> wire.Tokens:
    """The frame that this sink gets of the step."""
    entry = parts.get(id(sink))
    if entry is None:
        entry = parts[id(sink)] = (sink, wire.Tokens([], [], [], [], []))
    return entry[1]
