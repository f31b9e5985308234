"""Requests whose router was lost: they go on for a while, so that another router may adopt them where they stand.

    kept        by a link, of each request that may be resumed: its Submit as it came, and its tokens
    orphan      the link ended without an Abort, or the router disowned it: the request goes on, and its tokens are kept here
    adopted     another link has it; nobody came within `orphan_s`: aborted
    ended       for as long, because its router may be lost before the client has the last of it

What is kept here takes at most `max_kept_bytes`; beyond that the oldest goes first. Nothing but `Orphans` holds it after that.
A router whose link broke while it lived has given its streams to other groups: when it comes back, its orphans are aborted.
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
"""What a request takes beside its Submit and its tokens, about."""


class Engine(Protocol):
    """What orphans need of the engine client."""

    def abort(self, handles: list[int]) -> None:
        """Forgets these requests; unknown handles are no error."""
        ...

    def has(self, handle: int) -> bool:
        """Whether a request is still in the engine: one that was moved has left it without a word."""
        ...

    def hand_over(self, handles: Iterable[int], sink: "Orphans") -> None:
        """Lets `sink` hear of these requests from now on."""
        ...

    def state(self) -> wire.State:
        """Whether the group serves, and its incarnation."""
        ...

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change of `state`."""
        ...


@dataclass(slots=True, eq=False)
class Kept:
    """What another router needs to go on with one request. `submit`: the frame that brought it. `tokens`: drawn here since.

    `handle`: the engine's, None once it does not run here any more. `router`: who submitted it, in which of its lives; None once
    another one has it, for nobody knows whether the answer to an Adopt arrived.
    """

    id: str
    submit: bytes
    router: tuple[str, str] | None
    handle: int | None
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    finish: wire.FinishReason | None = None
    tenant: str = ""
    until: float = 0.0
    """When it is forgotten, on the event loop's clock; only among orphans."""

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return KEPT_BYTES + len(self.submit) + TOKEN_BYTES * len(self.tokens)

    def request(self) -> wire.Request:
        """The request with all its tokens so far."""
        frame = wire.decode_to_leader(self.submit)
        assert isinstance(frame, wire.Submit), "only Submits are kept"
        request = frame.request
        return msgspec.structs.replace(request, delivered=[*request.delivered, *self.tokens])


class KeptRequests:
    """Those requests of one link that may be resumed, by the engine's handle."""

    def __init__(self, orphans: "Orphans", router: tuple[str, str]) -> None:
        self._orphans = orphans
        self._router = router
        self._kept: dict[int, Kept] = {}

    def submitted(self, handle: int, request: wire.Request, message: bytes) -> None:
        """Keeps a request that came with this message, if it may be resumed."""
        if request.can_resume:
            self._kept[handle] = Kept(request.id, message, self._router, handle, tenant=request.tenant)

    def adopted(self, kept: Kept) -> None:
        """Keeps a request that another link or none had."""
        if kept.handle is not None:
            kept.router = None
            self._kept[kept.handle] = kept

    def tokens(self, frame: wire.Tokens) -> None:
        """Notes the tokens of a step; what has ended is the orphans' from now on."""
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
        self._orphans.keep_ended(ended)

    def forget(self, handle: int) -> None:
        """Keeps this one no more."""
        self._kept.pop(handle, None)

    def clear(self) -> None:
        """Keeps none."""
        self._kept.clear()

    def find(self, id: str, tenant: str) -> Kept | None:
        """The request of this id and tenant, if it is here."""
        return next((kept for kept in self._kept.values() if (kept.id, kept.tenant) == (id, tenant)), None)

    def leave(self, open_handles: Iterable[int]) -> list[int]:
        """Makes orphans of those that are open; the handles of the other open ones, which nobody will ask for."""
        others = self.disown(open_handles)
        self._kept.clear()
        return others

    def disown(self, handles: Iterable[int]) -> list[int]:
        """Makes orphans of these; the handles of those that nobody will ask for."""
        known = {handle: self._kept.pop(handle, None) for handle in handles}  # whoever asks for one finds it among the orphans
        self._orphans.take([kept for kept in known.values() if kept is not None])
        return [handle for handle, kept in known.items() if kept is None]


class Orphans:
    """Requests without a router, by their id. A sink of the engine client for those that run."""

    def __init__(self, engine: Engine, orphan_s: float, max_kept_bytes: int) -> None:
        self._engine = engine
        self._orphan_s = orphan_s
        self._max_bytes = max_kept_bytes
        self._kept: dict[str, Kept] = {}
        """In the order in which they came, and so of `until`."""
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[int, Kept] = {}
        self._incarnation = engine.state().incarnation
        engine.subscribe(self._state_changed)

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, orphans: Iterable[Kept]) -> None:
        """Keeps requests whose link has ended."""
        taken = [kept for kept in orphans if kept.handle is not None and self._engine.has(kept.handle)]
        running = {kept.handle: kept for kept in taken if kept.handle is not None}
        self._engine.hand_over(running, self)
        self._running |= running
        self._keep(taken)
        if taken:
            log.info("requests without a router go on", extra={"requests": len(taken), "seconds": self._orphan_s})

    def keep_ended(self, ended: list[Kept]) -> None:
        """Keeps requests that have ended while they had a router."""
        self._keep(ended)

    def adopt(self, id: str, tenant: str) -> Kept | None:
        """The request of this id, which is the caller's from now on; None: this tenant has none here. One that ended stays."""
        kept = self._kept.get(id)
        if kept is None or kept.tenant != tenant:
            return None
        if kept.handle is not None:
            del self._running[kept.handle]
            self._drop(kept)
        return kept

    def came_back(self, router: tuple[str, str]) -> None:
        """Aborts the requests of a router that lives."""
        self._abort([kept for kept in self._running.values() if kept.router == router])

    # Sink

    def tokens(self, frame: wire.Tokens) -> None:
        """Keeps the tokens of a step. Another sink that heard of the same step may have pushed some of its requests out."""
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            if (kept := self._running.get(handle)) is not None:
                kept.tokens.append(token)
                self._num_bytes += TOKEN_BYTES
        for end in frame.finished:
            if (kept := self._running.pop(end.handle, None)) is not None:
                kept.handle, kept.finish = None, end.reason
        self._bound()

    def refused(self, frame: wire.Refused) -> None:
        """A request does not run here any more: what it has so far stays."""
        self._running.pop(frame.handle).handle = None

    def _state_changed(self) -> None:
        """An incarnation that ended took its requests along."""
        incarnation = self._engine.state().incarnation
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            for kept in self._running.values():
                kept.handle = None
            self._running = {}

    def _keep(self, news: list[Kept]) -> None:
        if not news:
            return
        loop = asyncio.get_running_loop()
        for kept in news:
            if kept.id in self._kept:  # the latest counts, and stands last
                self._forget([self._kept[kept.id]])
            kept.until = loop.time() + self._orphan_s
            self._kept[kept.id] = kept
            self._num_bytes += kept.num_bytes
        if self._timer is None:
            self._timer = loop.call_later(self._orphan_s, self._expire)
        self._bound()

    def _expire(self) -> None:
        """Forgets those whose time is over. One timer for all, which holds none of them."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.until > loop.time():
                self._timer = loop.call_at(oldest.until, self._expire)
                return
            self._forget([oldest])

    def _bound(self) -> None:
        """Forgets the oldest beyond the bound."""
        while self._num_bytes > self._max_bytes:
            self._forget([next(iter(self._kept.values()))])

    def _forget(self, old: list[Kept]) -> None:
        for kept in old:
            self._drop(kept)
        self._abort(old)

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.id]
        self._num_bytes -= kept.num_bytes

    def _abort(self, orphans: list[Kept]) -> None:
        """Ends those that run; their pages are free."""
        handles = [kept.handle for kept in orphans if kept.handle is not None]
        for kept in orphans:
            if kept.handle is not None:
                del self._running[kept.handle]
                kept.handle = None
        self._engine.abort(handles)
