"""One open link between the leader and a router.

    Welcome, State, Load -> Submit, Abort, Fetch, SendPages, Adopt, Disown one way
                         -> Tokens, Refused, Load, State, Assets, PageChanges, Adopted the other

A load report is sent as soon as the engine produces it; a newer one replaces one that is queued. Queued tokens are sent in one
frame, so a slow router costs fewer frames, not more memory. A router is disconnected when more than `max_waiting_tokens` are
queued or a send takes longer than `stall_s`. When a connection ends, its requests are aborted, except those that a client may
resume: they become orphans (`server.link.orphans`). Handles on the link are the router's; the engine has its own, because several
routers share it.
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
from phalanx_runtime.server.link.handles import AcknowledgedHandles, LinkMoves
from phalanx_runtime.server.link.orphans import KeptRequests, Orphan, Orphans

CLOSE_BAD_FRAME = 4400
"""Close code: the router sent an invalid frame."""
CLOSE_TOO_SLOW = 4408
"""Close code: the router does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Identity of this leader and bounds of its links."""

    token: str
    group: str
    revision: str
    page_size: int
    # Interval of the checks below.
    tick_s: float = 0.05
    # Interval after which the last load report is repeated.
    heartbeat_s: float = 1.0
    # Longest duration of one send.
    stall_s: float = 10.0
    max_waiting_tokens: int = 1_000_000
    # Time a router has to send Hello.
    hello_s: float = 5.0
    # Silence after which a router counts as lost; routers send at least an empty Abort every second.
    silence_s: float = 10.0
    # How long requests of a lost router continue.
    orphan_s: float = 30.0
    # Bound of the stored orphans and ended requests.
    max_kept_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """The router at the other end: its name, and the random id of its start."""

    router: str
    instance: str


class LinkConnection:
    """One open link. The engine client calls its sink methods; `run` owns its tasks."""

    def __init__(
        self,
        websocket: WebSocket,
        gateway: EngineGateway,
        settings: LinkSettings,
        peer: Peer,
        orphans: Orphans,
        find: Callable[[str, str], Orphan | None],
    ) -> None:
        self.router = (peer.router, peer.instance)
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
        self._moves = LinkMoves(
            relay=gateway.moves, state=gateway.state, send=self._send, handles=self._engines, names=self._handles, host=host
        )
        self._sent_state = gateway.state()
        self._sent_assets = ""
        self._sending_since: float | None = None
        self._load_at = 0.0
        self._is_load_due = False
        self._sends_pages = False
        self._seen = AcknowledgedHandles()
        self._received_at = self._clock()

    async def run(self) -> str:
        """Runs the link and returns the reason it ended. Aborts its requests or makes them orphans."""
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
        if code == CLOSE_BAD_FRAME:  # any other peer has closed or does not read: a close frame would block
            await self._websocket.close(code, why)
        return why

    def _greet(self) -> None:
        settings = self._settings
        assets = self._assets()
        self._sent_assets = "" if assets is None else assets.content_hash
        self._send(
            wire.Welcome(
                protocol_version=wire.PROTOCOL_VERSION,
                group=settings.group,
                revision=settings.revision,
                page_size=settings.page_size,
                assets_hash=self._sent_assets,
            )
        )
        self._sent_state = self._gateway.state()
        self._send(self._sent_state)
        self.load_changed()

    # Sink

    def tokens(self, frame: wire.Tokens) -> None:
        """Sends tokens of one step, with handles translated from the engine's to the router's."""
        names = self._handles
        handles = [names[handle] for handle in frame.handles]
        prompt_details = [msgspec.structs.replace(prompt, handle=names[prompt.handle]) for prompt in frame.prompt_details]
        cached = [msgspec.structs.replace(found, handle=names[found.handle]) for found in frame.cached]
        self._kept.tokens(frame)
        finished = [msgspec.structs.replace(end, handle=self._forget(end.handle)) for end in frame.finished]
        self._add_tokens(
            wire.Tokens(
                handles=handles,
                epochs=frame.epochs,
                indices=frame.indices,
                tokens=frame.tokens,
                finished=finished,
                details=frame.details,
                prompt_details=prompt_details,
                cached=cached,
            )
        )

    def refused(self, frame: wire.Refused) -> None:
        """Sends the refusal of a request, with its handle translated."""
        self._send(msgspec.structs.replace(frame, handle=self._forget(frame.handle)))

    def _forget(self, engine_handle: int) -> int:
        """Removes an ended request and returns the router's handle."""
        handle = self._handles.pop(engine_handle)
        del self._engines[handle]
        self._kept.forget(engine_handle)
        return handle

    def release_request(self, id: str, tenant: str) -> Orphan | None:
        """Releases the running request of this id and tenant to another link, and sends Refused to this router.

        The router can no longer move it. Returns None for a request that it has moved away already."""
        kept = self._kept.find(id, tenant)
        if kept is not None and kept.handle is not None:
            if not self._gateway.has(kept.handle):
                return None
            self._gateway.moves.stay(kept.handle)
            handle = self._forget(kept.handle)
            self._send(
                wire.Refused(
                    handle=handle,
                    epoch=kept.request().epoch,
                    status=409,
                    code="adopted",
                    message="another router has taken this stream over",
                )
            )
        return kept

    def _adopt(self, frame: wire.Adopt) -> str | None:
        if frame.handle in self._engines:
            return f"handle {frame.handle} is in use"
        kept = self._find(frame.request_id, frame.tenant)
        if kept is None:
            self._send(
                wire.Refused(
                    handle=frame.handle, epoch=0, status=404, code="unknown_stream", message="there is no stream of this id here"
                )
            )
            return None
        self._send(wire.Adopted(frame.handle, kept.request(), kept.finish, kept.handle is not None))
        if kept.handle is not None:
            self._gateway.reassign([kept.handle], self)
            self._handles[kept.handle] = frame.handle
            self._engines[frame.handle] = kept.handle
            self._kept.adopted(kept)
        return None

    def _add_tokens(self, frame: wire.Tokens) -> None:
        """Queues a frame; merges it into a queued Tokens frame directly before it."""
        self._waiting_tokens += len(frame.handles) + sum(len(prompt.details) for prompt in frame.prompt_details)
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
        if assets is not None and assets.content_hash != self._sent_assets:  # first assets, or a smaller max length
            self._send_assets(assets)
        self._send(state)

    def _assets(self) -> wire.Assets | None:
        try:
            return self._gateway.assets()
        except BackendError:
            return None

    def _send_assets(self, assets: wire.Assets) -> None:
        self._sent_assets = assets.content_hash
        self._send(assets)

    def load_changed(self) -> None:
        """Schedules the latest load report after the queued frames."""
        self._is_load_due = True
        self._wake.set()

    def pages_changed(self, changes: wire.PageChanges) -> None:
        """Sends page changes if the router has requested them."""
        if self._sends_pages:
            self._waiting_tokens += len(changes.changes)
            self._send(changes)

    def _load(self) -> wire.Load:
        """The latest load report, with the router's handles."""
        self._is_load_due = False
        self._load_at = self._clock()
        load = self._gateway.load()
        return msgspec.structs.replace(load, last_handle=self._seen.highest(load.last_handle))

    def _send(self, frame: wire.FromLeader) -> None:
        self._waiting.append(frame)
        self._wake.set()

    # Tasks. Each returns the close code and the reason the link ends.

    async def _read(self) -> tuple[int, str]:
        try:
            while True:
                message = await receive_binary(self._websocket)
                frame = wire.decode_to_leader(message)
                self._received_at = self._clock()
                problem = self._obey(frame, message)
                if problem is not None:
                    return CLOSE_BAD_FRAME, problem
        except WebSocketDisconnect as end:
            return end.code, "the router left"
        except msgspec.DecodeError:
            return CLOSE_BAD_FRAME, "a message that is no frame of the link"

    def _obey(self, frame: wire.ToLeader, message: bytes) -> str | None:
        """Executes a frame. Returns a description of a protocol violation, else None."""
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
                self._gateway.abort(self._kept.release(engine_handles))
                return None
            case wire.Fetch():
                assets = self._assets()
                if assets is not None:  # the current ones: their hash identifies them
                    self._send_assets(assets)
                return None
            case wire.SendPages():
                self._sends_pages = True
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
            self._send(wire.Refused(handle=frame.handle, epoch=frame.request.epoch, status=503, code="not_ready", message=why))
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
            if now - self._received_at > settings.silence_s:
                return CLOSE_TOO_SLOW, f"the router said nothing for {settings.silence_s:g} s"
            if since is None and now - self._load_at >= settings.heartbeat_s:
                self.load_changed()
