"""One open link between the leader and a router.

    router -> leader   Submit, Abort, Fetch, SendPages, Adopt, Share, Disown, move orders, declared adapters
    leader -> router   Welcome, State, Load, Tokens, Refused, Assets, PageChanges, Adopted, move reports

At the end of a link its requests are aborted, or become orphans if resumable.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx_api import moves, wire
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.backend import BackendError
from phalanx_frontend.connections import receive_binary
from phalanx_runtime.server.link.gateway import DeclaredAdapters, EngineGateway
from phalanx_runtime.server.link.handles import AcknowledgedHandles, HandleMap, LinkMoves
from phalanx_runtime.server.link.orphans import LinkRecords, RequestRecord, TakenOver
from phalanx_runtime.server.link.send_queue import LoadEncoder, SendQueue

log = logging.getLogger(__name__)

CLOSE_BAD_FRAME = 4400
CLOSE_TOO_SLOW = 4408
"""Close codes: an invalid frame, or a router that does not read."""
ROUNDING_S = 0.001
"""After the time at which something is due, so that it is due for sure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Identity of the leader; bounds of links."""

    token: ServiceToken
    group: str
    revision: str
    page_size: int
    tick_s: float = 0.05
    """Interval of the checks while frames wait; otherwise the next one is when something may be due."""
    heartbeat_s: float = 1.0
    """Repetition of the last load report."""
    stall_s: float = 10.0
    """Bound of one send."""
    max_waiting_tokens: int = 1_000_000
    """Bound of queued tokens."""
    hello_s: float = 5.0
    """Time to send Hello."""
    silence_s: float = 10.0
    """Longest silence; routers send at least an empty Abort every 3 s."""
    orphan_s: float = 30.0
    """Time that requests continue without a router."""
    max_kept_bytes: int = 64 << 20
    """Bound of all records."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Name of the router, and random id of its start."""

    router: str
    instance: str
    for_pages: bool = False
    """A router of another service, which may only request cached pages."""
    reads_adapter_changes: bool = False
    """Otherwise it gets all assets after each change of an adapter."""


class LinkConnection:
    """One open link; sink and observer of the engine client."""

    def __init__(
        self,
        websocket: WebSocket,
        gateway: EngineGateway,
        settings: LinkSettings,
        peer: Peer,
        records: LinkRecords,
        take_over: Callable[[str, str], TakenOver | None],
        adapters: DeclaredAdapters | None = None,
    ) -> None:
        """`take_over` takes a request (id, tenant) from another link or the orphans. `adapters`: null if none can be loaded."""
        self._adapters = adapters
        self.router = (peer.router, peer.instance)
        self._for_pages, self._reads_adapter_changes = peer.for_pages, peer.reads_adapter_changes
        self._sent_prefixes: set[str] = set()
        """Moves of a link for pages."""
        self._take_over = take_over
        self._records = records
        self._websocket = websocket
        self._gateway = gateway
        self._settings = settings
        self._clock = asyncio.get_running_loop().time
        self._handles = HandleMap()
        self._queue = SendQueue()
        host = (websocket.scope.get("server") or ("",))[0]
        self._moves = LinkMoves(relay=gateway.moves, state=gateway.state, send=self._queue.add, handles=self._handles, host=host)
        self._sent_state = gateway.state()
        self._sent_assets: wire.Assets | None = None
        self._sending_since: float | None = None
        self._load_sent_at = 0.0
        self._encode_load = LoadEncoder().encode
        self._sends_pages = False
        self._acknowledged = AcknowledgedHandles()
        self._received_at = self._clock()

    async def run(self) -> str:
        """Runs the link; returns the reason it ended."""
        unsubscribe, end_observation = self._gateway.subscribe(self._state_changed), self._gateway.observe(self)
        close_moves = self._moves.open()
        tasks = {asyncio.create_task(part()) for part in (self._read, self._write, self._tick)}
        try:
            self._greet()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done))
            tasks.discard(first)
            code, why = first.result()
        finally:
            unsubscribe()
            end_observation()
            close_moves()
            self._gateway.abort(self._records.orphan(self._handles.to_router))
            self._records.clear()
            self._handles.clear()
            await self._cancel(tasks)
        if code == CLOSE_BAD_FRAME:  # other peers have closed or would block
            await self._websocket.close(code, why)
        return why

    async def _cancel(self, tasks: Iterable[asyncio.Task[tuple[int, str]]]) -> None:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("a task of the link failed", exc_info=result, extra={"router": self.router[0]})

    def _greet(self) -> None:
        settings = self._settings
        assets = self._sent_assets = self._assets()
        self._queue.add(
            wire.Welcome(
                protocol_version=wire.PROTOCOL_VERSION,
                group=settings.group,
                revision=settings.revision,
                page_size=settings.page_size,
                assets_hash="" if assets is None else assets.content_hash,
                can_send_prefixes=True,
                can_share=True,
            )
        )
        self._sent_state = self._gateway.state()
        self._queue.add(self._sent_state)
        self.load_changed()

    # Sink and observer

    def tokens(self, frame: wire.Tokens) -> None:
        """Sends tokens."""
        to_router = self._handles.to_router
        handles = [to_router[handle] for handle in frame.handles]
        prompt_details = [msgspec.structs.replace(prompt, handle=to_router[prompt.handle]) for prompt in frame.prompt_details]
        cached = [msgspec.structs.replace(cached, handle=to_router[cached.handle]) for cached in frame.cached]
        self._records.tokens(frame)
        finished = [msgspec.structs.replace(end, handle=self._remove(end.handle)) for end in frame.finished]
        self._queue.add_tokens(
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
        """Sends a refusal."""
        self._queue.add(msgspec.structs.replace(frame, handle=self._remove(frame.handle)))

    def load_changed(self) -> None:
        """Schedules the load report."""
        self._queue.add_load()

    def pages_changed(self, changes: wire.PageChanges) -> None:
        """Sends page changes, if requested."""
        if self._sends_pages:
            self._queue.add(changes, len(changes.changes))

    def _remove(self, engine_handle: int) -> int:
        """Removes an ended request; returns its router handle."""
        self._records.remove(engine_handle)
        return self._handles.remove(engine_handle)

    def _state_changed(self) -> None:
        state = self._gateway.state()
        if state.incarnation != self._sent_state.incarnation:
            self._handles.clear()
            self._records.clear()
            self._acknowledged.acknowledge_all()
        assets = self._assets()
        if assets is not None:  # first ones, another max length, other adapters
            self._assets_changed(assets)
        if state != self._sent_state:
            self._sent_state = state
            self._queue.add(state)

    def _assets(self) -> wire.Assets | None:
        try:
            return self._gateway.assets()
        except BackendError:
            return None  # no incarnation has served yet

    def _assets_changed(self, assets: wire.Assets) -> None:
        former = self._sent_assets
        if former is not None and former.content_hash == assets.content_hash:
            return
        if former is None or not self._reads_adapter_changes or not _differ_in_adapters(former, assets):
            self._send_assets(assets)
            return
        self._sent_assets = assets
        self._queue.add(wire.AdaptersChanged(assets.content_hash, former.content_hash, assets.adapters))

    def _send_assets(self, assets: wire.Assets) -> None:
        self._sent_assets = assets
        self._queue.add(assets)

    def _take_load(self) -> bytes:
        self._queue.is_load_due = False
        self._load_sent_at = self._clock()
        load = self._gateway.load()
        return self._encode_load(load, self._acknowledged.highest(load.last_handle))

    # Tasks: return the close code and the reason for the end.

    async def _read(self) -> tuple[int, str]:
        try:
            while True:
                message = await receive_binary(self._websocket)
                frame = wire.decode_to_leader(message)
                self._received_at = self._clock()
                violation = self._handle(frame, message)
                if violation is not None:
                    return CLOSE_BAD_FRAME, violation
        except WebSocketDisconnect as end:
            return end.code, "the router disconnected"
        except msgspec.DecodeError:
            return CLOSE_BAD_FRAME, "a message that is no frame of the link"

    async def _write(self) -> tuple[int, str]:
        try:
            while True:
                await self._queue.wait()
                while not self._queue.is_empty:
                    messages = [wire.encode(frame) for frame in self._queue.take()]
                    if self._queue.is_load_due:
                        messages.append(self._take_load())
                    for message in messages:
                        self._sending_since = self._clock()
                        await self._websocket.send_bytes(message)
                    self._sending_since = None
        except WebSocketDisconnect as end:
            return end.code, "the router disconnected"

    async def _tick(self) -> tuple[int, str]:
        settings = self._settings
        while True:
            await asyncio.sleep(self._next_check_s())
            now, since = self._clock(), self._sending_since
            if self._queue.num_tokens > settings.max_waiting_tokens or (since is not None and now - since > settings.stall_s):
                return CLOSE_TOO_SLOW, "the router does not read"
            if now - self._received_at > settings.silence_s:
                return CLOSE_TOO_SLOW, f"no frame of the router for {settings.silence_s:g} s"
            if since is None and now - self._load_sent_at >= settings.heartbeat_s:
                self.load_changed()

    def _next_check_s(self) -> float:
        """Returns the seconds until the next check. Each open link of an idle group costs as many wake-ups as checks."""
        settings, now = self._settings, self._clock()
        if self._sending_since is not None or self._queue.num_tokens:
            return settings.tick_s
        load_at = now if self._queue.is_load_due else self._load_sent_at  # it is sent at once
        due_at = min(load_at + settings.heartbeat_s, self._received_at + settings.silence_s)
        return max(settings.tick_s, min(due_at + ROUNDING_S - now, settings.stall_s))

    # Frames of the router: handlers return a protocol violation, if any.

    def _handle(self, frame: wire.ToLeader, message: bytes) -> str | None:
        if self._for_pages and (violation := self._forbidden(frame)) is not None:
            return violation
        match frame:
            case wire.Submit():
                return self._submit(frame, message)
            case wire.Adopt():
                return self._adopt(frame)
            case wire.Abort():
                engine_handles = self._handles.remove_from_router(frame.handles)
                for handle in engine_handles:
                    self._records.abort(handle)
                self._gateway.abort(engine_handles)
            case wire.Share():
                self._records.share(self._handles.to_engine.get(frame.handle), frame.stream)
            case wire.Disown():
                self._gateway.abort(self._records.orphan(self._handles.remove_from_router(frame.handles)))
            case wire.Fetch():
                assets = self._assets()
                if assets is not None:  # identified by their hash
                    self._send_assets(assets)
            case wire.SendPages():
                self._sends_pages = True
                self._queue.add(self._gateway.pages())
            case wire.Prepare() | moves.MoveOut() | moves.SendPrefix() | moves.Thaw() | moves.Release() | moves.Cancel():
                self._moves.handle(frame)
            case wire.DeclareAdapters() if self._adapters is not None:
                self._adapters.declare(frame)
            case wire.RequireAdapter() if self._adapters is not None:
                self._adapters.require(frame.name, frame.content_hash)
            case wire.Hello():
                return "Hello is sent once"
            case _:
                return f"unexpected {type(frame).__name__}"
        return None

    def _forbidden(self, frame: wire.ToLeader) -> str | None:
        """Returns why a router of another service may not send a frame. It ends only the sending of its own prefixes."""
        match frame:
            case moves.SendPrefix(move=move):
                self._sent_prefixes.add(move)
            case moves.Thaw(move) | moves.Release(move) if move in self._sent_prefixes:
                self._sent_prefixes.discard(move)
            case wire.SendPages() | wire.Hello() | wire.Abort(handles=[]):
                pass
            case _:
                return f"{type(frame).__name__} needs the service's token; this link is for cached pages"
        return None

    def _submit(self, frame: wire.Submit, message: bytes) -> str | None:
        if frame.handle in self._handles.to_engine:
            return f"handle {frame.handle} is in use"
        state = self._gateway.state()
        if not state.serving:
            why = state.reason or "the group does not serve"
            self._acknowledged.submitted(frame.handle, None)
            self._refuse(frame.handle, frame.request.epoch, 503, "not_ready", why)
            return None
        try:
            handle = self._gateway.submit(frame.request, self, frame.move)
        except BackendError as error:
            self._acknowledged.submitted(frame.handle, None)
            self._refuse(frame.handle, frame.request.epoch, error.status, error.code, error.message)
            return None
        self._handles.add(frame.handle, handle)
        self._records.add(handle, frame.request, message)
        self._acknowledged.submitted(frame.handle, handle)
        return None

    def _adopt(self, frame: wire.Adopt) -> str | None:
        if frame.handle in self._handles.to_engine:
            return f"handle {frame.handle} is in use"
        taken = self._take_over(frame.request_id, frame.tenant)
        if taken is None:
            self._refuse(frame.handle, 0, 404, "unknown_stream", "there is no stream of this id here")
            return None
        self._queue.add(wire.Adopted(frame.handle, taken.request, taken.finish, taken.running is not None))
        if (record := taken.running) is not None and record.handle is not None:
            self._gateway.reassign([record.handle], self)
            self._handles.add(frame.handle, record.handle)
            self._records.adopt(record)
        return None

    def hand_over(self, id: str, tenant: str) -> RequestRecord | None:
        """Hands a request over to another link; this router gets Refused."""
        record = self._records.find(id, tenant)
        if record is not None and record.handle is not None:
            if not self._gateway.has(record.handle):
                return None  # moved away
            self._gateway.moves.cancel_outgoing(record.handle)
            handle, epoch = self._remove(record.handle), record.request().epoch
            self._refuse(handle, epoch, 409, "adopted", "another router has adopted this stream")
        return record

    def _refuse(self, handle: int, epoch: int, status: int, code: str, message: str) -> None:
        self._queue.add(wire.Refused(handle=handle, epoch=epoch, status=status, code=code, message=message))


def _differ_in_adapters(former: wire.Assets, assets: wire.Assets) -> bool:
    """Whether assets of the same files differ in adapters alone."""
    same = msgspec.structs.replace(former, content_hash=assets.content_hash, adapters=assets.adapters, files=assets.files)
    return former.files is assets.files and same == assets
