"""One open link of the leader with a router: what it obeys, and what it tells.

    Welcome, State, Load -> Submit, Abort, Fetch, SendPages, Adopt, Disown one way
                         -> Tokens, Refused, Load, State, Assets, PageChanges, Adopted the other

A load report goes on as soon as the engine made it; while one waits to be sent, the next takes its place.
Tokens that wait together leave in one frame, so a slow router costs fewer frames, not more memory; one that lets
`max_waiting_tokens` wait or takes nothing for `stall_s` is closed. When a connection ends, its requests are aborted, but for
those that their clients may resume: they are orphans (`server.orphans`), which another link may adopt.
Handles on the link are the router's; the engine has its own, because several routers share it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx_api import moves, wire
from phalanx_frontend.backend import BackendError
from phalanx_frontend.websocket import receive_binary
from phalanx_runtime.server.link.gateway import EngineGateway
from phalanx_runtime.server.link.handles import LinkMoves, SeenHandles
from phalanx_runtime.server.link.orphans import Kept, KeptRequests, Orphans

CLOSE_BAD_FRAME = 4400
"""Close code: a frame that no router may send here."""
CLOSE_TOO_SLOW = 4408
"""Close code: the router did not read."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Who this leader is, and the bounds of its links.

    tick_s: how often these bounds are looked at. heartbeat_s: after so long without a load report the last one is sent again.
    stall_s, max_waiting_tokens: a router that reads nothing for so long, or leaves so many tokens, is closed.
    hello_s: how long a router may take to say Hello. silence_s: a router says something every second, if only an Abort of
    nothing; one that is silent for so long is lost. orphan_s: how long requests of a lost router go on.
    max_kept_bytes: bound of what is kept of them and of those that ended.
    """

    token: str
    group: str
    revision: str
    page_size: int
    tick_s: float = 0.05
    heartbeat_s: float = 1.0
    stall_s: float = 10.0
    max_waiting_tokens: int = 1_000_000
    hello_s: float = 5.0
    silence_s: float = 10.0
    orphan_s: float = 30.0
    max_kept_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """The router at the other end: its name, the name of its life, and the version of the link that both speak."""

    router: str
    instance: str
    version: int


class OpenLink:
    """One open link. Its sink side is called by the gateway; `run` owns its tasks and ends them."""

    def __init__(
        self,
        websocket: WebSocket,
        gateway: EngineGateway,
        settings: LinkSettings,
        peer: Peer,
        orphans: Orphans,
        find: Callable[[str, str], Kept | None],
    ) -> None:
        self.router = (peer.router, peer.instance)
        self._version = peer.version
        self._find = find
        self._kept = KeptRequests(orphans, self.router)
        self._websocket = websocket
        self._gateway = gateway
        self._settings = settings
        self._clock = asyncio.get_running_loop().time
        self._handles: dict[int, int] = {}  # engine's -> router's
        self._engines: dict[int, int] = {}  # router's -> engine's
        self._waiting: list[wire.FromLeader] = []
        self._waiting_tokens = 0
        self._wake = asyncio.Event()
        host = (websocket.scope.get("server") or ("",))[0]
        self._moves = LinkMoves(gateway.moves, gateway.state, self._send, self._engines, self._handles, host)
        self._sent_state = gateway.state()
        self._told_assets = ""
        self._sending_since: float | None = None
        self._load_at = 0.0
        self._is_load_due = False
        self._tells_pages = False
        self._seen = SeenHandles()
        self._heard_at = self._clock()

    async def run(self) -> str:
        """Why the link ended. By then its requests are aborted, and those that may be resumed are orphans."""
        unsubscribe, unfollow = self._gateway.subscribe(self._state_changed), self._gateway.follow(self)
        close_moves = self._moves.open()
        tasks = [asyncio.create_task(part()) for part in (self._read, self._write, self._tick)]
        try:
            self._greet()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            code, why = next(iter(done)).result()
        finally:
            unsubscribe()
            unfollow()
            close_moves()
            self._gateway.abort(self._kept.leave(self._handles))
            self._handles.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if code == CLOSE_BAD_FRAME:  # any other peer is gone or does not read: a close frame would wait for it
            await self._websocket.close(code, why)
        return why

    def _greet(self) -> None:
        settings = self._settings
        assets = self._assets()
        self._told_assets = "" if assets is None else assets.content_hash
        self._send(wire.Welcome(self._version, settings.group, settings.revision, settings.page_size, self._told_assets))
        self._sent_state = self._gateway.state()
        self._send(self._sent_state)
        self.load_changed()

    # Sink

    def tokens(self, frame: wire.Tokens) -> None:
        """Tokens of one step, with the engine's handles."""
        names = self._handles
        handles = [names[handle] for handle in frame.handles]
        told = [msgspec.structs.replace(prompt, handle=names[prompt.handle]) for prompt in frame.prompt_details]
        cached = [msgspec.structs.replace(found, handle=names[found.handle]) for found in frame.cached]
        self._kept.tokens(frame)
        finished = [msgspec.structs.replace(end, handle=self._forget(end.handle)) for end in frame.finished]
        self._add_tokens(
            wire.Tokens(handles, frame.epochs, frame.indices, frame.tokens, finished, frame.details, told, cached=cached)
        )

    def refused(self, frame: wire.Refused) -> None:
        """A request that does not run, with the engine's handle."""
        self._send(msgspec.structs.replace(frame, handle=self._forget(frame.handle)))

    def _forget(self, engine_handle: int) -> int:
        """The router's handle of a request that ended."""
        handle = self._handles.pop(engine_handle)
        del self._engines[handle]
        self._kept.forget(engine_handle)
        return handle

    def give_up(self, id: str, tenant: str) -> Kept | None:
        """The running request of this id and tenant, which another link takes over; this router is told that it has it no more.
        Nor may it move it any more. One that it has moved already is not here."""
        kept = self._kept.find(id, tenant)
        if kept is not None and kept.handle is not None:
            if not self._gateway.has(kept.handle):
                return None
            self._gateway.moves.stay(kept.handle)
            handle = self._forget(kept.handle)
            self._send(wire.Refused(handle, kept.request().epoch, 409, "adopted", "another router has taken this stream over"))
        return kept

    def _adopt(self, frame: wire.Adopt) -> str | None:
        if frame.handle in self._engines:
            return f"handle {frame.handle} is in use"
        kept = self._find(frame.request_id, frame.tenant)
        if kept is None:
            self._send(wire.Refused(frame.handle, 0, 404, "unknown_stream", "there is no stream of this id here"))
            return None
        self._send(wire.Adopted(frame.handle, kept.request(), kept.finish, kept.handle is not None))
        if kept.handle is not None:
            self._gateway.hand_over([kept.handle], self)
            self._handles[kept.handle] = frame.handle
            self._engines[frame.handle] = kept.handle
            self._kept.adopted(kept)
        return None

    def _add_tokens(self, frame: wire.Tokens) -> None:
        """Queues a frame; one that directly follows another that still waits is joined to it."""
        self._waiting_tokens += len(frame.handles) + sum(len(told.details) for told in frame.prompt_details)
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, wire.Tokens):
            if last.details or frame.details:
                last.details.extend([None] * (len(last.handles) - len(last.details)))
                last.details.extend(frame.details or [None] * len(frame.handles))
            last.prompt_details.extend(frame.prompt_details)
            last.cached.extend(frame.cached)
            last.handles.extend(frame.handles)
            last.epochs.extend(frame.epochs)
            last.indices.extend(frame.indices)
            last.tokens.extend(frame.tokens)
            last.finished.extend(frame.finished)
        else:
            self._send(frame)

    def _state_changed(self) -> None:
        state = self._gateway.state()
        if state == self._sent_state:
            return
        if state.incarnation != self._sent_state.incarnation:
            self._handles.clear()
            self._engines.clear()
            self._kept.clear()
            self._seen.lost()
        self._sent_state = state
        assets = self._assets()
        if assets is not None and assets.content_hash != self._told_assets:  # the first, or less memory for pages now
            self._send_assets(assets)
        self._send(state)

    def _assets(self) -> wire.Assets | None:
        try:
            return self._gateway.assets()
        except BackendError:
            return None

    def _send_assets(self, assets: wire.Assets) -> None:
        self._told_assets = assets.content_hash
        self._send(assets)

    def load_changed(self) -> None:
        """Sends the latest load report after what waits now."""
        self._is_load_due = True
        self._wake.set()

    def pages_changed(self, changes: wire.PageChanges) -> None:
        """Tells page changes to a router that asked for them."""
        if self._tells_pages:
            self._waiting_tokens += len(changes.changes)
            self._send(changes)

    def _load(self) -> wire.Load:
        """The latest report, in the router's handles."""
        self._is_load_due = False
        self._load_at = self._clock()
        load = self._gateway.load()
        return msgspec.structs.replace(load, last_handle=self._seen.highest(load.last_handle))

    def _send(self, frame: wire.FromLeader) -> None:
        """Queues a frame, unless the version spoken here does not know it."""
        if wire.SINCE.get(type(frame), 1) > self._version:
            return
        self._waiting.append(frame)
        self._wake.set()

    # Tasks. Each returns the close code and why the link ends.

    async def _read(self) -> tuple[int, str]:
        try:
            while True:
                message = await receive_binary(self._websocket)
                frame = wire.decode_to_leader(message)
                self._heard_at = self._clock()
                problem = self._obey(frame, message)
                if problem is not None:
                    return CLOSE_BAD_FRAME, problem
        except WebSocketDisconnect as end:
            return end.code, "the router left"
        except msgspec.DecodeError:
            return CLOSE_BAD_FRAME, "a message that is no frame of the link"

    def _obey(self, frame: wire.ToLeader, message: bytes) -> str | None:
        """Does what a frame asks; what is wrong with the frame, if anything."""
        match frame:
            case wire.Submit():
                return self._submit(frame, message)
            case wire.Adopt():
                return self._adopt(frame)
            case wire.Abort():
                engine_handles = [self._engines.pop(h) for h in frame.handles if h in self._engines]
                for handle in engine_handles:
                    del self._handles[handle]
                    self._kept.forget(handle)
                self._gateway.abort(engine_handles)
                return None
            case wire.Disown():
                engine_handles = [self._engines.pop(h) for h in frame.handles if h in self._engines]
                for handle in engine_handles:
                    del self._handles[handle]
                self._gateway.abort(self._kept.disown(engine_handles))
                return None
            case wire.Fetch():
                assets = self._assets()
                if assets is not None:  # the present ones, whatever was asked for: their hash says what they are
                    self._send_assets(assets)
                return None
            case wire.SendPages():
                self._tells_pages = True
                self._send(self._gateway.pages())
                return None
            case wire.Prepare() | moves.MoveOut() | moves.Thaw() | moves.Release() | moves.Cancel():
                self._moves.obey(frame)
                return None
            case wire.Hello():
                return "Hello comes once"
            case _:
                return f"{type(frame).__name__} is not understood here"

    def _submit(self, frame: wire.Submit, message: bytes) -> str | None:
        if frame.handle in self._engines:
            return f"handle {frame.handle} is in use"
        state = self._gateway.state()
        if not state.serving:
            why = state.reason or "the group does not serve"
            self._seen.submitted(frame.handle, None)
            self._send(wire.Refused(frame.handle, frame.request.epoch, 503, "not_ready", why))
            return None
        handle = self._gateway.submit(frame.request, self, frame.move)
        self._handles[handle] = frame.handle
        self._engines[frame.handle] = handle
        self._kept.submitted(handle, frame.request, message)
        self._seen.submitted(frame.handle, handle)
        return None

    async def _write(self) -> tuple[int, str]:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting or self._is_load_due:
                    batch, self._waiting = self._waiting, []
                    self._waiting_tokens = 0
                    if self._is_load_due:
                        batch.append(self._load())
                    for frame in batch:
                        self._sending_since = self._clock()
                        await self._websocket.send_bytes(wire.encode(frame))
                    self._sending_since = None
        except WebSocketDisconnect as end:
            return end.code, "the router left"

    async def _tick(self) -> tuple[int, str]:
        settings = self._settings
        while True:
            await asyncio.sleep(settings.tick_s)
            now = self._clock()
            since = self._sending_since
            if self._waiting_tokens > settings.max_waiting_tokens or (since is not None and now - since > settings.stall_s):
                return CLOSE_TOO_SLOW, "the router does not read"
            if now - self._heard_at > settings.silence_s:
                return CLOSE_TOO_SLOW, f"the router said nothing for {settings.silence_s:g} s"
            if since is None and now - self._load_at >= settings.heartbeat_s:
                self.load_changed()
