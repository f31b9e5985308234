"""The router's side of the link: one `LeaderLink` per leader, which connects, connects again, and gives frames to streams.

A link is lost when the connection ends, when nothing came for `heartbeat_timeout_s` (a leader speaks at least once a
second), or when the leader sends what it must not. Losing it, and a group that stops serving or changes its incarnation,
is told to every stream that ran there; a group that drains gets no more requests and keeps its streams. The router
speaks that often too, if only to abort nothing, so that the leader sees a lost router.
The choice of groups is in `fleet`; what a stream makes of it is in `stream`.
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
from phalanx_router.links.connection import Connection, Dial, Greeter, LinkBroken, Sink, dial, explain, is_proper_end
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.routing.ledger import sent_of
from phalanx_router.routing.look import Told
from phalanx_router.routing.prefixes import PageFeed
from phalanx_router.streams.stream import Adopting

log = logging.getLogger(__name__)

NOT_CONNECTED = wire.State(serving=False, incarnation=0, reason="not connected")
LOOKS = 4
"""Looks per heartbeat timeout, at least one each second. All must see silence: a router that slept itself blames nobody."""


MoveFrame = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed | moves.AskRescue


class Listener(Protocol):
    """Hears of a link's changes. Called on the event loop; never blocks."""

    def link_changed(self, link: "LeaderLink") -> None:
        """The link opened, was lost, or its group's state changed."""
        ...

    def assets_came(self, link: "LeaderLink", assets: wire.Assets) -> None:
        """The leader sent its assets."""
        ...

    def load_came(self, link: "LeaderLink") -> None:
        """The group reported what it has in hand."""
        ...

    def pages_came(self, link: "LeaderLink", changes: wire.PageChanges) -> None:
        """What the group's prefix cache finds: all of it (a snapshot), or what follows the changes told before."""
        ...

    def move_told(self, link: "LeaderLink", frame: MoveFrame) -> None:
        """What the leader says of a move, or that it asks for one."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds of links. `router` names this router to leaders, `instance` its life.

    `assets_timeout_s` is the longest silence while assets come. `disowned_s`: how long somebody may come for a disowned request.
    `dial` opens a connection.
    """

    token: str
    router: str
    heartbeat_timeout_s: float = 3.0
    open_timeout_s: float = 5.0
    assets_timeout_s: float = 30.0
    first_retry_s: float = 0.1
    last_retry_s: float = 1.0
    disowned_s: float = 30.0
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    dial: Dial = dial


class LeaderLink:
    """The link to one leader. `run` keeps it up until it is cancelled; all other calls return at once."""

    def __init__(self, endpoint: Endpoint, settings: LinkSettings, listener: Listener, draw: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self.state = NOT_CONNECTED
        self.assets_hash = ""
        self.revision = ""
        self.told = Told("")
        """What this incarnation told on this connection, on the event loop's clock, and what was sent there."""
        self._feed = PageFeed()
        self._greeter = Greeter(settings.router, settings.instance)
        self._version = 0
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
        """Names leader, connection and incarnation: what failed under one key may work under the next."""
        return f"{self.endpoint.key}/{self._connections}/{self.state.incarnation}"

    @property
    def is_serving(self) -> bool:
        """Whether the group takes requests now."""
        return self.state.serving

    @property
    def unknown_version(self) -> str:
        """Why the leader and this router share no version of the link; empty while they do, or nobody knows yet."""
        return self._greeter.unknown

    @property
    def running(self) -> int:
        """How many requests of this router the group has."""
        return len(self._sinks)

    def submit(self, request: wire.Request, sink: Sink, move: str = "", hit_tokens: int = 0) -> int:
        """The handle of a request that goes to the group; `sink` hears of it until it ends, is refused, lost or aborted.

        hit_tokens: of its prompt and output so far, what the group's pages are thought to hold.
        """
        self._next_handle += 1
        handle = self._next_handle
        self._send(wire.Submit(handle, request, move))  # first: what cannot be encoded must leave nothing behind
        self._sinks[handle] = (sink, request.epoch)
        if request.alone:
            self._alone.add(handle)
        sent = sent_of(request, self.told.page_size, hit_tokens)
        self.told.ledger.dispatch(handle, sent, asyncio.get_running_loop().time())
        return handle

    def adopt(self, request_id: str, tenant: str, adopting: Adopting) -> int:
        """The handle under which a stream is to come that lost its router; `adopting` hears whether it does."""
        self._next_handle += 1
        self._sinks[self._next_handle] = (adopting, 0)
        self._send(wire.Adopt(self._next_handle, request_id, tenant))
        return self._next_handle

    def abort(self, handle: int) -> None:
        """Forgets a request. One that has ended or was lost is no error."""
        if self._sinks.pop(handle, None) is not None:
            self.told.ledger.ended(handle)
            self._send(wire.Abort([handle]))

    def disown(self, handle: int) -> None:
        """Forgets a request that is to go on there: it may be adopted again. One that has ended or was lost is no error.

        Where the version spoken has no Disown it would go on for nobody: it is aborted when nobody came for it.
        """
        if self._sinks.pop(handle, None) is None:
            return
        self.told.ledger.ended(handle)
        if wire.SINCE[wire.Disown] <= self._version:
            self._send(wire.Disown([handle]))
        else:
            asyncio.get_running_loop().call_later(self._settings.disowned_s, self._send, wire.Abort([handle]))

    def hear(self, handle: int, sink: Sink) -> None:
        """From now on this sink hears of the request. One that has ended is no error."""
        if handle in self._sinks:
            self._sinks[handle] = (sink, self._sinks[handle][1])

    def tell(self, frame: moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel | wire.Prepare) -> None:
        """Sends a frame of a move."""
        self._send(frame)

    def fetch(self, assets_hash: str) -> None:
        """Asks for assets; they come to the listener."""
        self.is_fetching = True
        self._send(wire.Fetch(assets_hash))

    def _send(self, frame: wire.ToLeader) -> None:
        """Queues a frame; one that the version spoken here does not know is not sent."""
        if self.is_open and wire.SINCE.get(type(frame), 1) <= self._version:
            self._outbox.append(wire.encode(frame))
            self._wake.set()

    async def run(self) -> None:
        """Connects and connects again, with a jittered wait between, until cancelled."""
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
        """Why the link ended, or why there was none."""
        settings = self._settings
        try:
            async with settings.dial(self.endpoint.address, settings.token, settings.open_timeout_s) as connection:
                why, is_leave, is_outside = "this router closes the link", False, True
                try:
                    why = await self._converse(connection)
                except (LinkBroken, msgspec.DecodeError, ConnectionClosed, TimeoutError) as error:
                    why = explain(error)
                    is_leave, is_outside = self.state.draining and is_proper_end(error), self.endpoint.leaving
                finally:
                    self._lose(why, is_leave, is_outside)
                return why
        except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:  # OSError includes TimeoutError
            return explain(error)

    async def _converse(self, connection: Connection) -> str:
        """Why the conversation ended. Opens the link when the leader has said who it is."""
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
        self._version = welcome.protocol_version
        self.assets_hash = welcome.assets_hash
        self.revision = welcome.revision
        self.told = Told(self.key, self.endpoint.group, welcome.revision, page_size=welcome.page_size)
        self._feed = PageFeed()
        self._send(wire.SendPages())
        self.is_fetching = False
        log.info("link open", extra={"leader": self.endpoint.address, "group": welcome.group, "version": self._version})

    def _lose(self, why: str, is_leave: bool, is_outside: bool) -> None:
        """Tells every stream, once, before the connection is closed: closing may take a second."""
        if not self.is_open:
            return
        self.is_open = False
        self.state = wire.State(False, self.state.incarnation, why, deaths=self.state.deaths, death=self.state.death)
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
            self.told.ledger.ended(handle)
            sink.lost(epoch, why, is_leave, cause)

    async def _read(self, connection: Connection) -> str:
        while True:
            frame = wire.decode_from_leader(await connection.recv(decode=False))
            self._frames_seen += 1
            match frame:
                case wire.Tokens():
                    self._give_tokens(frame)
                case wire.Load():
                    self.told.report(frame, asyncio.get_running_loop().time())
                    self._listener.load_came(self)
                case wire.PageChanges():
                    self._take_pages(frame)
                case wire.Refused():
                    sink, _ = self._sinks.pop(frame.handle, (None, 0))
                    if sink is not None:
                        self.told.ledger.ended(frame.handle)
                        sink.refused(frame)
                case wire.Adopted():
                    self._adopted(frame)
                case wire.State():
                    self._take_state(frame)
                case moves.Prepared() | moves.Frozen() | moves.Arrived() | moves.MoveFailed() | moves.AskRescue():
                    self._listener.move_told(self, frame)
                case wire.Assets():
                    self.is_fetching = False
                    self.assets_hash = frame.content_hash
                    self._listener.assets_came(self, frame)
                case wire.Welcome():
                    raise LinkBroken("the leader said Welcome twice")

    def _adopted(self, frame: wire.Adopted) -> None:
        """Lets the stream hear that asked for this. What nobody waits for any more was disowned before it came."""
        adopting, _ = self._sinks.pop(frame.handle, (None, 0))
        stream = adopting.adopted(frame) if isinstance(adopting, Adopting) else None
        if stream is not None:
            self._sinks[frame.handle] = (stream, frame.request.epoch)
            if frame.request.alone:
                self._alone.add(frame.handle)
            context = len(frame.request.prompt) + len(frame.request.delivered)
            self.told.ledger.found(frame.handle, sent_of(frame.request, self.told.page_size, context))

    def _give_tokens(self, frame: wire.Tokens) -> None:
        """The hot loop of a router: once per token of all its streams."""
        sinks = self._sinks
        for told in frame.prompt_details:
            entry = sinks.get(told.handle)
            if entry is not None:
                entry[0].prompt_told(told)
        for cached in frame.cached:
            entry = sinks.get(cached.handle)
            if entry is not None:
                entry[0].cached(cached)
        details = frame.details or [None] * len(frame.tokens)
        try:
            told_of = zip(frame.handles, frame.epochs, frame.indices, frame.tokens, details, strict=True)
            for handle, epoch, index, token, detail in told_of:
                entry = sinks.get(handle)
                if entry is not None:
                    entry[0].token(epoch, index, token, detail)
        except ValueError as error:
            raise LinkBroken("the lists of a Tokens frame differ in length") from error
        for end in frame.finished:
            sink, _ = sinks.pop(end.handle, (None, 0))
            if sink is not None:
                self.told.ledger.ended(end.handle)
                sink.finished(end)

    def _take_pages(self, changes: wire.PageChanges) -> None:
        match self._feed.take(changes):
            case "use":
                self._listener.pages_came(self, changes)
            case "ask":
                self._send(wire.SendPages())
            case "drop":
                pass

    def _take_state(self, state: wire.State) -> None:
        before, self.state = self.state, state
        is_new = state.incarnation != before.incarnation
        if is_new:
            self.told = Told(self.key, self.endpoint.group, self.revision, page_size=self.told.page_size)
            self._feed.restart()
            self._listener.pages_came(self, wire.PageChanges(0, [], is_snapshot=True))
        self.told.served = state.served or self.told.served
        if is_new or not (state.serving or state.draining):
            why = f"group {self.endpoint.group}: {state.reason or 'it started anew'}"
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
        """Ends when the leader was silent, or took nothing that waits for it, in each of the last looks."""
        settings = self._settings
        look_s = min(1.0, settings.heartbeat_timeout_s / LOOKS)
        silent = stuck = 0
        while True:
            seen, sent, waits = self._frames_seen, self._frames_sent, bool(self._outbox)
            await asyncio.sleep(look_s)
            if self._frames_sent == sent and not self._outbox:
                self._send(wire.Abort([]))  # a leader that hears nothing takes the router for lost
            silent = silent + 1 if self._frames_seen == seen else 0
            stuck = stuck + 1 if waits and self._frames_sent == sent else 0
            timeout_s = settings.assets_timeout_s if self.is_fetching else settings.heartbeat_timeout_s
            if silent * look_s >= timeout_s:
                return f"nothing came for {timeout_s:g} s"
            if stuck * look_s >= settings.heartbeat_timeout_s:
                return f"the leader took nothing for {settings.heartbeat_timeout_s:g} s"
