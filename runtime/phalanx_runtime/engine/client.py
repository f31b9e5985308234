"""Client of the engine in the HTTP process: submits requests and routes the tokens of each step, one call per sink.

A sink is the local API server or the link of one router. The socket belongs to one incarnation of the group; when the incarnation
ends, every open request is dropped and `state` changes. All code runs on one asyncio loop and no call blocks: the socket's
descriptor triggers `_drain`.
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
from phalanx_runtime.engine.meter import EndedRequest, EngineMeter
from phalanx_runtime.engine.move_relay import MoveRelay
from phalanx_runtime.engine.page_keys import PageKeys

log = logging.getLogger(__name__)

RESTART_RETRY_S = 2.0
"""Retry-After while the group restarts: a rank needs a few seconds to load its weights."""
NO_LOAD = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=0, total_pages=0)


class RequestSink(Protocol):
    """Receives the engine's frames about its requests. Called on the event loop; never blocks."""

    def tokens(self, frame: wire.Tokens) -> None:
        """Tokens of one step that belong to this sink's requests, and those of its requests that ended."""
        ...

    def refused(self, frame: wire.Refused) -> None:
        """A request was refused or ended without finishing."""
        ...


class EngineObserver(Protocol):
    """Receives load reports and page changes. Called on the event loop; never blocks."""

    def load_changed(self) -> None:
        """A new load report is available."""
        ...

    def pages_changed(self, changes: wire.PageChanges) -> None:
        """The pages in the prefix cache changed."""
        ...


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    """One open request."""

    sink: RequestSink
    prompt_tokens: int
    max_tokens: int
    submitted: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    is_alone: bool = False

    def end(self, reason: str, now: float) -> EndedRequest:
        """Summary for the meter."""
        decode_s = self.last - self.first if self.first is not None else 0.0
        return EndedRequest(
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.tokens,
            max_tokens=self.max_tokens,
            latency_s=now - self.submitted,
            decode_s=decode_s,
        )


class EngineClient:
    """Requests of all sinks over the socket of the current incarnation. Bound to one running event loop."""

    def __init__(self, meter: EngineMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        self._open: dict[int, _OpenRequest] = {}
        self._unsent: deque[bytes] = deque()
        self._handles = itertools.count(1)
        self._state = wire.State(serving=False, incarnation=0, reason="starting")
        self._load = NO_LOAD
        self._assets: wire.Assets | None = None
        self._is_leaving = False
        self._stops: str | None = None
        self._deaths, self._death = 0, ""
        self._subscribers: list[Callable[[], None]] = []
        self._followers: list[EngineObserver] = []
        self._pages = PageKeys()
        self.moves = MoveRelay(self._send_order, lambda handle: self._drop([handle], "moved"))

    def state(self) -> wire.State:
        """Whether the group serves, and its incarnation."""
        return self._state

    def has(self, handle: int) -> bool:
        """Whether a request is open."""
        return handle in self._open

    @property
    def is_busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._open)

    @property
    def stops(self) -> str | None:
        """Reason no further incarnation will follow, or None."""
        return self._stops

    def load(self) -> wire.Load:
        """The last load report of the engine."""
        return self._load

    def pages(self) -> wire.PageChanges:
        """Snapshot of the page keys in the prefix cache."""
        return self._pages.snapshot()

    def assets(self) -> wire.Assets:
        """Model assets for the API server. Raises BackendError 503 until an incarnation has served."""
        if self._assets is None:
            raise BackendError(503, "model_loading", f"the model is not loaded yet: {self._state.reason}", RESTART_RETRY_S)
        return self._assets

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change of `state`. Returns a function that ends the subscription."""
        self._subscribers.append(changed)
        return lambda: self._subscribers.remove(changed)

    def follow(self, follower: EngineObserver) -> Callable[[], None]:
        """Passes load reports and page changes to `follower`. Returns a function that ends the subscription."""
        self._followers.append(follower)
        return lambda: self._followers.remove(follower)

    def bind(self, endpoint: str) -> None:
        """Opens the socket of a new incarnation, before its rank 0 starts. Requests are accepted after `serve`."""
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
        """Starts to accept requests: every rank of the incarnation is ready."""
        if self._is_leaving or self._stops is not None:
            return
        self._assets = assets
        self._change(wire.State(serving=True, incarnation=self._state.incarnation, served=served))
        self._drain()

    @property
    def has_lone_request(self) -> bool:
        """Whether an open request is computed alone, because groups died under it."""
        return any(request.is_alone for request in self._open.values())

    def end_incarnation(self, next_incarnation: int, reason: str, is_outside: bool = False) -> None:
        """Ends the incarnation: drops its requests and refuses new ones until the next one serves."""
        cause: wire.Cause = "outside" if is_outside else "alone" if self.has_lone_request else ""
        self._close_socket()
        self._forget(list(self._open), "error")
        self._load, self._pages = NO_LOAD, PageKeys()
        self.moves.clear()
        self._meter.load(NO_LOAD)
        self._change(wire.State(serving=False, incarnation=next_incarnation, reason=reason, cause=cause))

    def set_deaths(self, deaths: int, death: str) -> None:
        """Sets the number of deaths and the last reason, which the next state contains."""
        self._deaths, self._death = deaths, death

    def set_reason(self, next_incarnation: int, reason: str) -> None:
        """Updates the reason why the group does not serve."""
        self._change(wire.State(serving=False, incarnation=next_incarnation, reason=reason))

    def pause(self, reason: str) -> None:
        """Accepts no more requests in this incarnation; running ones continue."""
        if self._stops is None:
            self._change(
                wire.State(
                    serving=False, incarnation=self._state.incarnation, reason=reason, draining=True, served=self._state.served
                )
            )

    def drain(self, reason: str) -> None:
        """Accepts no more requests; running ones continue while their incarnation lasts. No other incarnation follows."""
        self._stops = reason
        self._change(
            wire.State(
                serving=False, incarnation=self._state.incarnation, reason=reason, draining=True, served=self._state.served
            )
        )

    def refuse(self, reason: str) -> None:
        """Ends all requests and accepts no more: the process is stopping."""
        self._stops = reason
        self.end_incarnation(self._state.incarnation, reason, is_outside=True)
        self._is_leaving = True

    def close(self) -> None:
        """Closes the client permanently."""
        self._is_leaving = True
        self._open.clear()
        self._close_socket()
        self._context.term()

    def submit(self, request: wire.Request, sink: RequestSink, move: str = "") -> int:
        """Submits a request and returns its engine handle. `sink` is called later, never within this call.

        move: id of the move whose transferred pages the request starts on. Raises BackendError 503 while the group does not
        serve.
        """
        if self._stops is not None:
            raise BackendError(503, "draining", f"the group takes no more requests: {self._state.reason}", RESTART_RETRY_S)
        if not self._state.serving:
            raise BackendError(503, "group_restarting", f"the group does not serve: {self._state.reason}", RESTART_RETRY_S)
        handle = next(self._handles)
        self._send(wire.Submit(handle, request, move))  # first, so that an encoding error leaves no state
        if move:
            self.moves.over(move)
        self._open[handle] = _OpenRequest(
            sink=sink,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            submitted=self._clock(),
            is_alone=request.alone,
        )
        return handle

    def reassign(self, handles: Iterable[int], sink: RequestSink) -> None:
        """Assigns requests to another sink; unknown handles are ignored."""
        for handle in handles:
            if (request := self._open.get(handle)) is not None:
                request.sink = sink

    def abort(self, handles: list[int]) -> None:
        """Aborts requests; unknown handles are ignored. Tokens in flight are dropped."""
        self._drop(handles, "abort")

    def _drop(self, handles: list[int], reason: str) -> None:
        known = self._forget(handles, reason)
        if known:
            self._send(wire.Abort(known))

    def _forget(self, handles: list[int], reason: str) -> list[int]:
        """Drops requests; returns the handles that were open."""
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
        """Sends a move frame if there is a socket."""
        if self._socket is not None:
            self._send(frame)

    def _send(self, frame: wire.ToEngine) -> None:
        assert self._socket is not None, "requests are open only between `bind` and `end_incarnation`"
        self._unsent.append(wire.encode(frame))
        self._flush(self._socket)
        # A zmq descriptor is edge-triggered, and sending may have consumed an edge: check for messages.
        asyncio.get_running_loop().call_soon(self._drain)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Sends queued frames; returns whether any was sent. Without a peer they stay queued; the descriptor signals its
        arrival."""
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
        """Handles all pending messages and sends queued frames."""
        while self._socket is not None:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                # recv detects a new peer at once, send only occasionally; each may consume the other's edge.
                if self._flush(self._socket):
                    continue
                return
            self.handle_message(message)

    def handle_message(self, message: bytes) -> None:
        """Handles one message of the engine."""
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
        """Splits the tokens of one step by sink; drops those of aborted requests."""
        now = self._clock()
        parts: dict[int, tuple[RequestSink, wire.Tokens]] = {}
        runs, gaps_s = Counter(frame.handles), dict[int, float]()  # tokens of one step share the time since the previous ones
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

    def _route_details(self, frame: wire.Tokens, parts: dict[int, tuple[RequestSink, wire.Tokens]]) -> None:
        """Routes cached token counts, and the details of output and prompt tokens."""
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


def _part(parts: dict[int, tuple[RequestSink, wire.Tokens]], sink: RequestSink) -> wire.Tokens:
    """The frame for this sink in this step."""
    entry = parts.get(id(sink))
    if entry is None:
        entry = parts[id(sink)] = (sink, wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[]))
    return entry[1]
