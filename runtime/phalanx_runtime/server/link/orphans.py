"""Orphans: requests whose router is lost continue for `orphan_s`, so that another router can adopt them.

    kept        by a link, for each resumable request: its Submit message and its tokens
    orphan      the link ended without an Abort, or the router disowned the request; it continues, and its tokens are stored here
    adopted     another link owns it; without an adoption within `orphan_s` it is aborted
    ended       stored for `orphan_s`, because its router may be lost before the client has received the last token

The stored data is limited to `max_kept_bytes`; beyond that the oldest is dropped first. A router whose link broke while it was
running has replayed its streams on other groups: when it reconnects, its orphans are aborted.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from phalanx_api import wire

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
KEPT_BYTES = 512
"""Approximate memory of a request without its Submit and its tokens."""


class OrphanEngine(Protocol):
    """Part of the engine client that orphans need."""

    def abort(self, handles: list[int]) -> None:
        """Aborts requests; unknown handles are ignored."""
        ...

    def has(self, handle: int) -> bool:
        """Whether a request is still in the engine. A moved request leaves it without a frame."""
        ...

    def reassign(self, handles: Iterable[int], sink: "Orphans") -> None:
        """Assigns these requests to `sink`."""
        ...

    def state(self) -> wire.State:
        """Whether the group serves, and its incarnation."""
        ...

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change of `state`."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Orphan:
    """State that another router needs to continue one request."""

    id: str
    submit: bytes
    """The encoded Submit."""
    router: tuple[str, str] | None
    """Name and instance of the router that submitted it; None after an adoption, because the Adopted frame may have been lost."""
    handle: int | None
    """The engine's; None once the request no longer runs here."""
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    """Generated here after `submit`."""
    finish: wire.FinishReason | None = None
    tenant: str = ""
    until: float = 0.0
    """Expiry on the event loop's clock; set only in `Orphans`."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""
        return KEPT_BYTES + len(self.submit) + TOKEN_BYTES * len(self.tokens)

    def request(self) -> wire.Request:
        """The request, with all its tokens so far as delivered."""
        frame = wire.decode_to_leader(self.submit)
        assert isinstance(frame, wire.Submit), "only Submits are kept"
        request = frame.request
        return msgspec.structs.replace(request, delivered=[*request.delivered, *self.tokens])


class KeptRequests:
    """Resumable requests of one link, by engine handle."""

    def __init__(self, orphans: "Orphans", router: tuple[str, str]) -> None:
        self._orphans = orphans
        self._router = router
        self._kept: dict[int, Orphan] = {}

    def submitted(self, handle: int, request: wire.Request, message: bytes) -> None:
        """Stores a request if it is resumable."""
        if request.can_resume:
            self._kept[handle] = Orphan(id=request.id, submit=message, router=self._router, handle=handle, tenant=request.tenant)

    def adopted(self, kept: Orphan) -> None:
        """Stores a running request that this link has adopted."""
        if kept.handle is not None:
            kept.router = None
            self._kept[kept.handle] = kept

    def tokens(self, frame: wire.Tokens) -> None:
        """Records the tokens of a step; passes ended requests to `Orphans`."""
        if not self._kept:
            return
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            if (kept := self._kept.get(handle)) is not None:
                kept.tokens.append(token)
        ended = []
        for end in frame.finished:
            if (kept := self._kept.get(end.handle)) is not None:
                kept.handle, kept.finish = None, end.reason
                ended.append(kept)
        self._orphans.store_ended(ended)

    def forget(self, handle: int) -> None:
        """Removes one request."""
        self._kept.pop(handle, None)

    def clear(self) -> None:
        """Removes all requests."""
        self._kept.clear()

    def find(self, id: str, tenant: str) -> Orphan | None:
        """The stored request of this id and tenant."""
        return next((kept for kept in self._kept.values() if (kept.id, kept.tenant) == (id, tenant)), None)

    def leave(self, open_handles: Iterable[int]) -> list[int]:
        """Makes orphans of the resumable ones among the open requests; returns the handles of the others."""
        others = self.release(open_handles)
        self._kept.clear()
        return others

    def release(self, handles: Iterable[int]) -> list[int]:
        """Makes orphans of the resumable ones among these requests; returns the handles of the others."""
        known = {handle: self._kept.pop(handle, None) for handle in handles}
        self._orphans.take([kept for kept in known.values() if kept is not None])
        return [handle for handle, kept in known.items() if kept is None]


class Orphans:
    """Requests without a router, by id. Engine sink of those that run."""

    def __init__(self, engine: OrphanEngine, orphan_s: float, max_kept_bytes: int) -> None:
        self._engine = engine
        self._orphan_s = orphan_s
        self._max_bytes = max_kept_bytes
        self._kept: dict[str, Orphan] = {}
        """Ordered by `until`."""
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[int, Orphan] = {}
        self._incarnation = engine.state().incarnation
        engine.subscribe(self._state_changed)

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, orphans: Iterable[Orphan]) -> None:
        """Stores running requests whose link has ended."""
        taken = [kept for kept in orphans if kept.handle is not None and self._engine.has(kept.handle)]
        running = {kept.handle: kept for kept in taken if kept.handle is not None}
        self._engine.reassign(running, self)
        self._running |= running
        self._keep(taken)
        if taken:
            log.info("requests continue without a router", extra={"requests": len(taken), "seconds": self._orphan_s})

    def store_ended(self, ended: list[Orphan]) -> None:
        """Stores requests that ended while they had a router."""
        self._keep(ended)

    def adopt(self, id: str, tenant: str) -> Orphan | None:
        """Transfers the request of this id and tenant to the caller; None if unknown. An ended request stays stored."""
        kept = self._kept.get(id)
        if kept is None or kept.tenant != tenant:
            return None
        if kept.handle is not None:
            del self._running[kept.handle]
            self._drop(kept)
        return kept

    def router_reconnected(self, router: tuple[str, str]) -> None:
        """Aborts the orphans of a router that has reconnected."""
        self._abort([kept for kept in self._running.values() if kept.router == router])

    # Sink

    def tokens(self, frame: wire.Tokens) -> None:
        """Stores the tokens of a step. A handle may be unknown: another sink of the same step can evict an orphan."""
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            if (kept := self._running.get(handle)) is not None:
                kept.tokens.append(token)
                self._num_bytes += TOKEN_BYTES
        for end in frame.finished:
            if (kept := self._running.pop(end.handle, None)) is not None:
                kept.handle, kept.finish = None, end.reason
        self._bound()

    def refused(self, frame: wire.Refused) -> None:
        """Keeps the tokens of a request that no longer runs here."""
        self._running.pop(frame.handle).handle = None

    def _state_changed(self) -> None:
        """Marks all requests of an ended incarnation as not running."""
        incarnation = self._engine.state().incarnation
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            for kept in self._running.values():
                kept.handle = None
            self._running = {}

    def _keep(self, news: list[Orphan]) -> None:
        if not news:
            return
        loop = asyncio.get_running_loop()
        for kept in news:
            if kept.id in self._kept:  # the latest replaces it, and moves to the end
                self._forget([self._kept[kept.id]])
            kept.until = loop.time() + self._orphan_s
            self._kept[kept.id] = kept
            self._num_bytes += kept.num_bytes
        if self._timer is None:
            self._timer = loop.call_later(self._orphan_s, self._expire)
        self._bound()

    def _expire(self) -> None:
        """Drops expired requests. One timer serves all of them and holds no reference to any."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.until > loop.time():
                self._timer = loop.call_at(oldest.until, self._expire)
                return
            self._forget([oldest])

    def _bound(self) -> None:
        """Drops the oldest requests beyond the memory bound."""
        while self._num_bytes > self._max_bytes:
            self._forget([next(iter(self._kept.values()))])

    def _forget(self, old: list[Orphan]) -> None:
        for kept in old:
            self._drop(kept)
        self._abort(old)

    def _drop(self, kept: Orphan) -> None:
        del self._kept[kept.id]
        self._num_bytes -= kept.num_bytes

    def _abort(self, orphans: list[Orphan]) -> None:
        """Aborts those that run."""
        handles = [kept.handle for kept in orphans if kept.handle is not None]
        for kept in orphans:
            if kept.handle is not None:
                del self._running[kept.handle]
                kept.handle = None
        self._engine.abort(handles)
