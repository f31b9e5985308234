"""Link to one leader: connects, reconnects, passes frames to streams.

A link is lost when the connection ends, no frame arrives within `heartbeat_timeout_s`, or the leader violates the protocol.
Streams are notified of a lost link, a group that stops serving and a new incarnation. A draining group keeps its streams.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from phalanx_api import moves, wire
from phalanx_router.links.connection import (
    Connection,
    FrameDecoder,
    Handshake,
    LinkBroken,
    LinkSettings,
    Sink,
    certificate_for,
    explain_close,
    is_normal_close,
)
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.routing.prefixes import PageFeed
from phalanx_router.routing.view_builder import GroupReport
from phalanx_router.streams.stream import AdoptedStream

log = logging.getLogger(__name__)

NOT_CONNECTED = wire.State(serving=False, incarnation=0, reason="not connected")
CHECKS_PER_TIMEOUT, IDLE_CHECKS = 4, 2
"""Silent ones until a leader is lost, as this router's loop may have been blocked; idle ones until an empty frame is sent."""
PING_INTERVAL_S = 5.0
"""Between measurements of a link's delay."""


MoveFrame = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed | moves.RescueRequest


class LinkListener(Protocol):
    """Receives changes of a link. Must not block."""

    def link_changed(self, link: "LeaderLink") -> None:
        """The link opened or was lost, or the group's state changed."""
        ...

    def assets_received(self, link: "LeaderLink", assets: wire.Assets | wire.AdaptersChanged) -> None:
        """The leader sent its assets, or what has changed in them."""
        ...

    def load_received(self, link: "LeaderLink") -> None:
        """The group sent a load report."""
        ...

    def pages_received(self, link: "LeaderLink", changes: wire.PageChanges) -> None:
        """The group's prefix cache changed."""
        ...

    def move_frame_received(self, link: "LeaderLink", frame: MoveFrame) -> None:
        """The leader sent a frame of a move or a rescue request."""
        ...


class _Recipient(NamedTuple):
    """Of the frames about one request."""

    sink: Sink
    epoch: int = 0
    is_alone: bool = False  # no other request is computed with it


class LeaderLink:
    """Link to one leader. Only `run` waits."""

    def __init__(self, endpoint: Endpoint, settings: LinkSettings, listener: LinkListener, draw: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self.state = NOT_CONNECTED
        self.assets_hash = ""
        self.revision = ""
        self.can_send_prefixes = self.can_share = False
        self._model_hash = ""  # last one received
        self.group_report = GroupReport(key="")  # of this incarnation and connection
        self.is_open = False
        self.is_fetching = False  # assets
        self._settings = settings
        self._listener = listener
        self._draw = draw
        self._handshake = Handshake(settings.router, settings.instance)
        self._page_feed = PageFeed()
        self._num_connections = 0
        self._next_handle = 0
        self._sinks: dict[int, _Recipient] = {}  # by handle
        self._outbox: deque[bytes] = deque()
        self._has_output = asyncio.Event()
        self._frames_received = self._frames_sent = 0

    @property
    def key(self) -> str:
        """Identity of leader, connection and incarnation."""
        return f"{self.endpoint.key}/{self._num_connections}/{self.state.incarnation}"

    @property
    def is_serving(self) -> bool:
        """Whether the group accepts requests."""
        return self.state.serving

    @property
    def revision_identity(self) -> str:
        """Last known revision and weights of the group, also while the link is lost; empty before the first connection."""
        return f"{self.revision} {self._model_hash}" if self.revision else ""

    @property
    def version_error(self) -> str:
        """Why both ends have different link versions, if so."""
        return self._handshake.version_error

    @property
    def num_requests(self) -> int:
        """Number of this router's requests in the group."""
        return len(self._sinks)

    def submit(self, request: wire.Request, sink: Sink, move: str = "", hit_tokens: int = 0) -> int:
        """Sends a request and returns its handle. `sink` gets its frames until it ends or is aborted."""
        self._next_handle += 1
        handle = self._next_handle
        self._send(wire.Submit(handle, request, move))  # first: an encoding error must leave no entry
        self._sinks[handle] = _Recipient(sink, request.epoch, request.alone)
        sent = self.group_report.sent(request, hit_tokens)
        self.group_report.ledger.dispatch(handle, sent, asyncio.get_running_loop().time())
        return handle

    def adopt(self, request_id: str, tenant: str, adopted: AdoptedStream) -> int:
        """Requests adoption of an orphan and returns its handle."""
        self._next_handle += 1
        self._sinks[self._next_handle] = _Recipient(adopted)
        self._send(wire.Adopt(self._next_handle, request_id, tenant))
        return self._next_handle

    def share(self, handle: int, stream: wire.Request) -> None:
        """Lets any router continue a stream that gets the tokens of the request too, if the leader can."""
        if self.can_share and handle in self._sinks:
            self._send(wire.Share(handle, stream))

    def abort(self, handle: int) -> None:
        """Aborts a request, unless it has ended."""
        if self._sinks.pop(handle, None) is not None:
            self.group_report.ledger.end(handle)
            self._send(wire.Abort([handle]))

    def disown(self, handle: int) -> None:
        """Releases a request for another adoption."""
        if self._sinks.pop(handle, None) is None:
            return
        self.group_report.ledger.end(handle)
        self._send(wire.Disown([handle]))

    def set_sink(self, handle: int, sink: Sink) -> None:
        """Replaces the sink of a request."""
        if handle in self._sinks:
            self._sinks[handle] = self._sinks[handle]._replace(sink=sink)

    def send_move_frame(
        self, frame: moves.MoveOut | moves.SendPrefix | moves.Thaw | moves.Release | moves.Cancel | wire.Prepare
    ) -> None:
        """Sends a frame of a move."""
        self._send(frame)

    def send_adapters(self, frame: wire.DeclareAdapters | wire.RequireAdapter) -> None:
        """Sends an order about declared adapters, to a group that reports `State.adapters`."""
        self._send(frame)

    def fetch(self, assets_hash: str) -> None:
        """Requests assets, which the listener receives."""
        self.is_fetching = True
        self._send(wire.Fetch(assets_hash))

    def _send(self, frame: wire.ToLeader) -> None:
        if self.is_open:
            self._outbox.append(wire.encode(frame))
            self._has_output.set()

    async def run(self) -> None:
        """Connects and reconnects with jittered exponential backoff, until cancelled."""
        num_failures, logged_why = 0, ""
        while True:
            num_connections = self._num_connections
            why = await self._connect()
            num_failures = 0 if self._num_connections > num_connections else num_failures + 1
            if why != logged_why or not num_failures:
                log.warning("no link", extra={"leader": self.endpoint.address, "group": self.endpoint.group, "why": why})
                logged_why = why
            settings = self._settings
            wait_s = min(settings.last_retry_s, settings.first_retry_s * 2.0 ** min(num_failures, 16))
            await asyncio.sleep(wait_s * (0.5 + self._draw() / 2))

    async def _connect(self) -> str:
        settings = self._settings
        try:
            certificate, token = certificate_for(self.endpoint, settings.certificate), settings.token.current
            async with settings.dial(self.endpoint.address, token, settings.open_timeout_s, certificate) as connection:
                why, is_drain, is_outside = "this router closes the link", False, True
                try:
                    why = await self._run_connection(connection)
                except (LinkBroken, msgspec.DecodeError, ConnectionClosed, TimeoutError) as error:
                    why = explain_close(error)
                    is_drain, is_outside = self.state.draining and is_normal_close(error), self.endpoint.is_leaving
                finally:
                    self._mark_lost(why, is_drain, is_outside)
                return why
        except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:  # OSError includes TimeoutError
            return explain_close(error)

    async def _run_connection(self, connection: Connection) -> str:
        async with asyncio.timeout(self._settings.open_timeout_s):
            welcome = await self._handshake.run(connection)
        self._open(welcome)
        parts = (self._read(connection), self._write(connection), self._watch(), self._measure(connection))
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, welcome: wire.Welcome) -> None:
        self._num_connections += 1
        self.is_open = True
        self.assets_hash = welcome.assets_hash
        self.revision = welcome.revision
        self.can_send_prefixes, self.can_share = welcome.can_send_prefixes, welcome.can_share
        self.group_report = GroupReport(
            key=self.key, group=self.endpoint.group, revision=welcome.revision, page_size=welcome.page_size
        )
        self._page_feed = PageFeed()
        self._send(wire.SendPages())
        self.is_fetching = False
        log.info("link open", extra={"leader": self.endpoint.address, "group": welcome.group})

    def _mark_lost(self, why: str, is_drain: bool, is_outside: bool) -> None:
        """Notifies each stream before the connection is closed, which may take a second."""
        if not self.is_open:
            return
        self.is_open, last = False, self.state
        self.state = wire.State(
            serving=False, incarnation=last.incarnation, reason=why, deaths=last.deaths, death=last.death, devices=last.devices
        )
        self._outbox.clear()
        self._drop_streams(f"group {self.endpoint.group}: {why}", is_drain, "outside" if is_outside else "")
        self._listener.link_changed(self)

    def _drop_streams(self, why: str, is_drain: bool, cause: wire.EndCause) -> None:
        dropped, self._sinks = self._sinks, {}
        if not cause and any(recipient.is_alone for recipient in dropped.values()):
            cause = "alone"
        if dropped:
            self._send(wire.Abort(list(dropped)))
        for handle, recipient in dropped.items():
            self.group_report.ledger.end(handle)
            recipient.sink.lost(recipient.epoch, why, is_drain, cause)

    async def _read(self, connection: Connection) -> str:
        decode = FrameDecoder().decode
        while True:
            frame = decode(await connection.recv(decode=False))
            self._frames_received += 1
            match frame:
                case wire.Tokens():
                    self._deliver_tokens(frame)
                case wire.Load():
                    if self.group_report.record(frame, asyncio.get_running_loop().time(), time.time()):
                        self._listener.load_received(self)
                case wire.PageChanges():
                    self._receive_pages(frame)
                case wire.Refused():
                    if (recipient := self._sinks.pop(frame.handle, None)) is not None:
                        self.group_report.ledger.end(frame.handle)
                        recipient.sink.refused(frame)
                case wire.Adopted():
                    self._receive_adopted(frame)
                case wire.State():
                    self._receive_state(frame)
                case moves.Prepared() | moves.Frozen() | moves.Arrived() | moves.MoveFailed() | moves.RescueRequest():
                    self._listener.move_frame_received(self, frame)
                case wire.Assets() | wire.AdaptersChanged():
                    self.is_fetching = self.is_fetching and not isinstance(frame, wire.Assets)
                    self.assets_hash = frame.content_hash
                    self._listener.assets_received(self, frame)
                case wire.Welcome():
                    raise LinkBroken("the leader sent Welcome twice")

    def _receive_adopted(self, frame: wire.Adopted) -> None:
        """Connects an adopted stream to its handle, unless it was disowned."""
        recipient = self._sinks.pop(frame.handle, None)
        adopted = None if recipient is None else recipient.sink
        stream = adopted.adopted(frame) if isinstance(adopted, AdoptedStream) else None
        if stream is not None:
            self._sinks[frame.handle] = _Recipient(stream, frame.request.epoch, frame.request.alone)
            context = len(frame.request.prompt) + len(frame.request.delivered)
            self.group_report.ledger.adopt(frame.handle, self.group_report.sent(frame.request, context))

    def _deliver_tokens(self, frame: wire.Tokens) -> None:
        """The hot loop of the router."""
        sinks = self._sinks
        for prompt in frame.prompt_details:
            entry = sinks.get(prompt.handle)
            if entry is not None:
                entry[0].prompt_details(prompt)
        for cached in frame.cached:
            entry = sinks.get(cached.handle)
            if entry is not None:
                entry[0].cached(cached)
        details = frame.details or [None] * len(frame.tokens)
        try:
            tokens = zip(frame.handles, frame.epochs, frame.indices, frame.tokens, details, strict=True)
            for handle, epoch, index, token, detail in tokens:
                entry = sinks.get(handle)
                if entry is not None:
                    entry[0].token(epoch, index, token, detail)
        except ValueError as error:
            raise LinkBroken("the lists of a Tokens frame differ in length") from error
        for end in frame.finished:
            if (recipient := sinks.pop(end.handle, None)) is not None:
                self.group_report.ledger.end(end.handle)
                recipient.sink.finished(end)

    def _receive_pages(self, changes: wire.PageChanges) -> None:
        match self._page_feed.check(changes):
            case "apply":
                self._listener.pages_received(self, changes)
            case "resync":
                self._send(wire.SendPages())
            case "drop":
                pass

    def _receive_state(self, state: wire.State) -> None:
        before, self.state = self.state, state
        is_new = state.incarnation != before.incarnation
        if is_new:
            self.group_report = GroupReport(
                key=self.key, group=self.endpoint.group, revision=self.revision, page_size=self.group_report.page_size
            )
            self._page_feed.restart()
            self._listener.pages_received(self, wire.PageChanges(0, [], is_snapshot=True))
        self.group_report.served = state.served or self.group_report.served
        self._model_hash = self.group_report.served.model_hash or self._model_hash
        if is_new or not (state.serving or state.draining):
            why = f"group {self.endpoint.group}: {state.reason or 'it restarted'}"
            self._drop_streams(why, before.draining and not is_new, state.cause)
        self._listener.link_changed(self)

    async def _write(self, connection: Connection) -> str:
        while True:
            await self._has_output.wait()
            self._has_output.clear()
            while self._outbox:
                await connection.send(self._outbox[0])
                self._outbox.popleft()
                self._frames_sent += 1

    async def _measure(self, connection: Connection) -> str:
        """Measures the delay of the link. Never returns: `_read` reports the end, after the last frames."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                delay_s = await (await connection.ping())
            except ConnectionClosed:
                await loop.create_future()
                raise
            self.group_report.delay.add(delay_s, loop.time())
            await asyncio.sleep(PING_INTERVAL_S)

    async def _watch(self) -> str:
        """Returns when all of the last checks found no frame, or an unsent one."""
        settings = self._settings
        interval_s = min(1.0, settings.heartbeat_timeout_s / CHECKS_PER_TIMEOUT)
        num_silent = num_stuck = num_idle = 0
        while True:
            received, sent, has_output = self._frames_received, self._frames_sent, bool(self._outbox)
            await asyncio.sleep(interval_s)
            num_idle = num_idle + 1 if self._frames_sent == sent and not self._outbox else 0
            if num_idle == IDLE_CHECKS:
                self._send(wire.Abort([]))  # a silent router counts as lost after 10 s
            num_silent = num_silent + 1 if self._frames_received == received else 0
            num_stuck = num_stuck + 1 if has_output and self._frames_sent == sent else 0
            timeout_s = settings.assets_timeout_s if self.is_fetching else settings.heartbeat_timeout_s
            if num_silent * interval_s >= timeout_s:
                return f"no frame arrived for {timeout_s:g} s"
            if num_stuck * interval_s >= settings.heartbeat_timeout_s:
                return f"the leader accepted no frame for {settings.heartbeat_timeout_s:g} s"
