"""Router side of the link: a `LeaderLink` per leader, which connects, reconnects and passes frames to streams.

A link is lost when the connection ends, when no frame arrives within `heartbeat_timeout_s` (a leader sends one at least every
second), or when the leader violates the protocol. Each stream of the group is notified of a lost link, a group that stops serving
and a new incarnation. A draining group keeps its streams and gets no more requests. The router sends at least an empty Abort as a
heartbeat, so that the leader detects a lost router.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from phalanx_api import moves, wire
from phalanx_router.links.connection import Connection, Dial, Handshake, LinkBroken, Sink, dial, explain_end, is_proper_end
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.routing.ledger import make_sent_request
from phalanx_router.routing.look import GroupReport
from phalanx_router.routing.prefixes import PageFeed
from phalanx_router.streams.stream import AdoptedStream

log = logging.getLogger(__name__)

NOT_CONNECTED = wire.State(serving=False, incarnation=0, reason="not connected")
CHECKS_PER_TIMEOUT = 4
"""Checks per heartbeat timeout, at least one per second. All must find silence, in case this router's own event loop was
blocked."""


MoveFrame = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed | moves.AskRescue


class LinkListener(Protocol):
    """Receives changes of a link. Called on the event loop; must not block."""

    def link_changed(self, link: "LeaderLink") -> None:
        """The link opened or was lost, or the group's state changed."""
        ...

    def assets_received(self, link: "LeaderLink", assets: wire.Assets) -> None:
        """The leader sent its assets."""
        ...

    def load_received(self, link: "LeaderLink") -> None:
        """The group sent a load report."""
        ...

    def pages_received(self, link: "LeaderLink", changes: wire.PageChanges) -> None:
        """The group's prefix cache changed: `changes` is a snapshot or follows the previous changes."""
        ...

    def move_frame_received(self, link: "LeaderLink", frame: MoveFrame) -> None:
        """The leader sent a frame of a move, or requests a rescue."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Settings of links."""

    token: str
    # Name of this router in the handshake.
    router: str
    heartbeat_timeout_s: float = 3.0
    open_timeout_s: float = 5.0
    # Replaces the heartbeat timeout while assets are transferred.
    assets_timeout_s: float = 30.0
    first_retry_s: float = 0.1
    last_retry_s: float = 1.0
    # Time to adopt a disowned request before it is aborted.
    # Differs with each start of the router.
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    dial: Dial = dial


class LeaderLink:
    """Link to one leader. `run` connects and reconnects until cancelled; the other methods do not wait."""

    def __init__(self, endpoint: Endpoint, settings: LinkSettings, listener: LinkListener, draw: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self.state = NOT_CONNECTED
        self.assets_hash = ""
        self.revision = ""
        self.group_report = GroupReport(key="")
        """Reports and dispatch ledger of this incarnation on this connection, in event loop time."""
        self._feed = PageFeed()
        self._greeter = Handshake(settings.router, settings.instance)
        self._settings = settings
        self._listener = listener
        self._draw = draw
        self.is_open = False
        self._connections = 0
        self._next_handle = 0
        self._sinks: dict[int, tuple[Sink, int]] = {}
        self._alone: set[int] = set()
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._frames_seen = 0
        self._frames_sent = 0
        self.is_fetching = False

    @property
    def key(self) -> str:
        """Leader, connection and incarnation; a failure under one key says nothing about the next."""
        return f"{self.endpoint.key}/{self._connections}/{self.state.incarnation}"

    @property
    def is_serving(self) -> bool:
        """Whether the group accepts requests."""
        return self.state.serving

    @property
    def unknown_version(self) -> str:
        """Why the leader and this router have different link versions; empty if they agree or before the first handshake."""
        return self._greeter.unknown

    @property
    def running(self) -> int:
        """Number of requests of this router in the group."""
        return len(self._sinks)

    def submit(self, request: wire.Request, sink: Sink, move: str = "", hit_tokens: int = 0) -> int:
        """Sends a request to the group and returns its handle. `sink` gets its frames until it ends or is aborted.

        `hit_tokens`: prompt and delivered tokens that the group's pages are expected to hold.
        """
        self._next_handle += 1
        handle = self._next_handle
        self._send(wire.Submit(handle, request, move))  # first: an encoding error must leave no entry
        self._sinks[handle] = (sink, request.epoch)
        if request.alone:
            self._alone.add(handle)
        sent = make_sent_request(request, self.group_report.page_size, hit_tokens)
        self.group_report.ledger.dispatch(handle, sent, asyncio.get_running_loop().time())
        return handle

    def adopt(self, request_id: str, tenant: str, adopting: AdoptedStream) -> int:
        """Requests adoption of an orphan and returns its handle; `adopting` receives the answer."""
        self._next_handle += 1
        self._sinks[self._next_handle] = (adopting, 0)
        self._send(wire.Adopt(self._next_handle, request_id, tenant))
        return self._next_handle

    def abort(self, handle: int) -> None:
        """Aborts a request. One that has ended or was lost is ignored."""
        if self._sinks.pop(handle, None) is not None:
            self.group_report.ledger.ended(handle)
            self._send(wire.Abort([handle]))

    def disown(self, handle: int) -> None:
        """Releases a request that continues at the leader and may be adopted again. One that has ended or was lost is ignored."""
        if self._sinks.pop(handle, None) is None:
            return
        self.group_report.ledger.ended(handle)
        self._send(wire.Disown([handle]))

    def set_sink(self, handle: int, sink: Sink) -> None:
        """Replaces the sink of a request. One that has ended is ignored."""
        if handle in self._sinks:
            self._sinks[handle] = (sink, self._sinks[handle][1])

    def send_move_frame(self, frame: moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel | wire.Prepare) -> None:
        """Sends a frame of a move."""
        self._send(frame)

    def fetch(self, assets_hash: str) -> None:
        """Requests assets from the leader, which the listener receives."""
        self.is_fetching = True
        self._send(wire.Fetch(assets_hash))

    def _send(self, frame: wire.ToLeader) -> None:
        """Queues a frame if the link is open."""
        if self.is_open:
            self._outbox.append(wire.encode(frame))
            self._wake.set()

    async def run(self) -> None:
        """Connects and reconnects with jittered exponential backoff, until cancelled."""
        failures = 0
        said = ""
        while True:
            connections = self._connections
            why = await self._connect_once()
            failures = 0 if self._connections > connections else failures + 1
            if why != said or not failures:
                log.warning("no link", extra={"leader": self.endpoint.address, "group": self.endpoint.group, "why": why})
                said = why
            settings = self._settings
            wait_s = min(settings.last_retry_s, settings.first_retry_s * 2.0 ** min(failures, 16))
            await asyncio.sleep(wait_s * (0.5 + self._draw() / 2))

    async def _connect_once(self) -> str:
        """Runs one connection; returns why it ended or could not be opened."""
        settings = self._settings
        try:
            async with settings.dial(self.endpoint.address, settings.token, settings.open_timeout_s) as connection:
                why, is_leave, is_outside = "this router closes the link", False, True
                try:
                    why = await self._converse(connection)
                except (LinkBroken, msgspec.DecodeError, ConnectionClosed, TimeoutError) as error:
                    why = explain_end(error)
                    is_leave, is_outside = self.state.draining and is_proper_end(error), self.endpoint.leaving
                finally:
                    self._lose(why, is_leave, is_outside)
                return why
        except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:  # OSError includes TimeoutError
            return explain_end(error)

    async def _converse(self, connection: Connection) -> str:
        """Opens the link after the handshake and runs it; returns why it ended."""
        async with asyncio.timeout(self._settings.open_timeout_s):
            welcome = await self._greeter.greet(connection)
        self._open(welcome)
        tasks = [asyncio.create_task(part) for part in (self._read(connection), self._write(connection), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, welcome: wire.Welcome) -> None:
        self._connections += 1
        self.is_open = True
        self.assets_hash = welcome.assets_hash
        self.revision = welcome.revision
        self.group_report = GroupReport(
            key=self.key, group=self.endpoint.group, revision=welcome.revision, page_size=welcome.page_size
        )
        self._feed = PageFeed()
        self._send(wire.SendPages())
        self.is_fetching = False
        log.info("link open", extra={"leader": self.endpoint.address, "group": welcome.group})

    def _lose(self, why: str, is_leave: bool, is_outside: bool) -> None:
        """Notifies each stream once, before the connection is closed, which may take a second."""
        if not self.is_open:
            return
        self.is_open = False
        self.state = wire.State(
            serving=False, incarnation=self.state.incarnation, reason=why, deaths=self.state.deaths, death=self.state.death
        )
        self._outbox.clear()
        self._drop_streams(f"group {self.endpoint.group}: {why}", is_leave, "outside" if is_outside else "")
        self._listener.link_changed(self)

    def _drop_streams(self, why: str, is_leave: bool, cause: wire.Cause) -> None:
        lost, self._sinks = self._sinks, {}
        if not cause and self._alone & lost.keys():
            cause = "alone"
        self._alone.clear()
        if lost:
            self._send(wire.Abort(list(lost)))
        for handle, (sink, epoch) in lost.items():
            self.group_report.ledger.ended(handle)
            sink.lost(epoch, why, is_leave, cause)

    async def _read(self, connection: Connection) -> str:
        while True:
            frame = wire.decode_from_leader(await connection.recv(decode=False))
            self._frames_seen += 1
            match frame:
                case wire.Tokens():
                    self._give_tokens(frame)
                case wire.Load():
                    self.group_report.report(frame, asyncio.get_running_loop().time())
                    self._listener.load_received(self)
                case wire.PageChanges():
                    self._take_pages(frame)
                case wire.Refused():
                    sink, _ = self._sinks.pop(frame.handle, (None, 0))
                    if sink is not None:
                        self.group_report.ledger.ended(frame.handle)
                        sink.refused(frame)
                case wire.Adopted():
                    self._adopted(frame)
                case wire.State():
                    self._take_state(frame)
                case moves.Prepared() | moves.Frozen() | moves.Arrived() | moves.MoveFailed() | moves.AskRescue():
                    self._listener.move_frame_received(self, frame)
                case wire.Assets():
                    self.is_fetching = False
                    self.assets_hash = frame.content_hash
                    self._listener.assets_received(self, frame)
                case wire.Welcome():
                    raise LinkBroken("the leader sent Welcome twice")

    def _adopted(self, frame: wire.Adopted) -> None:
        """Connects an adopted stream to its handle. A stream that no longer waits was disowned before."""
        adopting, _ = self._sinks.pop(frame.handle, (None, 0))
        stream = adopting.adopted(frame) if isinstance(adopting, AdoptedStream) else None
        if stream is not None:
            self._sinks[frame.handle] = (stream, frame.request.epoch)
            if frame.request.alone:
                self._alone.add(frame.handle)
            context = len(frame.request.prompt) + len(frame.request.delivered)
            self.group_report.ledger.found(frame.handle, make_sent_request(frame.request, self.group_report.page_size, context))

    def _give_tokens(self, frame: wire.Tokens) -> None:
        """Passes tokens to their sinks. The hot loop of the router: it runs per token of all streams."""
        sinks = self._sinks
        for prompt in frame.prompt_details:
            entry = sinks.get(prompt.handle)
            if entry is not None:
                entry[0].prompt_details_received(prompt)
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
            sink, _ = sinks.pop(end.handle, (None, 0))
            if sink is not None:
                self.group_report.ledger.ended(end.handle)
                sink.finished(end)

    def _take_pages(self, changes: wire.PageChanges) -> None:
        match self._feed.take(changes):
            case "use":
                self._listener.pages_received(self, changes)
            case "ask":
                self._send(wire.SendPages())
            case "drop":
                pass

    def _take_state(self, state: wire.State) -> None:
        before, self.state = self.state, state
        is_new = state.incarnation != before.incarnation
        if is_new:
            self.group_report = GroupReport(
                key=self.key, group=self.endpoint.group, revision=self.revision, page_size=self.group_report.page_size
            )
            self._feed.restart()
            self._listener.pages_received(self, wire.PageChanges(0, [], is_snapshot=True))
        self.group_report.served = state.served or self.group_report.served
        if is_new or not (state.serving or state.draining):
            why = f"group {self.endpoint.group}: {state.reason or 'it restarted'}"
            self._drop_streams(why, before.draining and not is_new, state.cause)
        self._listener.link_changed(self)

    async def _write(self, connection: Connection) -> str:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await connection.send(self._outbox[0])
                self._outbox.popleft()
                self._frames_sent += 1

    async def _watch(self) -> str:
        """Returns when the leader sent no frame, or accepted no queued frame, in all of the last checks."""
        settings = self._settings
        look_s = min(1.0, settings.heartbeat_timeout_s / CHECKS_PER_TIMEOUT)
        silent = stuck = 0
        while True:
            seen, sent, waits = self._frames_seen, self._frames_sent, bool(self._outbox)
            await asyncio.sleep(look_s)
            if self._frames_sent == sent and not self._outbox:
                self._send(wire.Abort([]))  # heartbeat: a silent router counts as lost
            silent = silent + 1 if self._frames_seen == seen else 0
            stuck = stuck + 1 if waits and self._frames_sent == sent else 0
            timeout_s = settings.assets_timeout_s if self.is_fetching else settings.heartbeat_timeout_s
            if silent * look_s >= timeout_s:
                return f"no frame arrived for {timeout_s:g} s"
            if stuck * look_s >= settings.heartbeat_timeout_s:
                return f"the leader accepted no frame for {settings.heartbeat_timeout_s:g} s"
