"""Orphans: requests continue for `orphan_s` after the loss of their router, so that another router can adopt them.

A resumable request becomes an orphan when its link ends without an Abort, or when its router disowns it. Ended requests are
stored too: their router may be lost before the client has the last token. A router that reconnects has replayed its streams on
other groups: its orphans are aborted. Several streams may get the tokens of a request: the first one that is resumed adopts it,
and the others get its tokens.
"""

import asyncio
import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from phalanx_api import wire
from phalanx_runtime.server.link.gateway import EngineGateway

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
RECORD_BYTES, SHARE_BYTES = 512, 256
"""Approximate memory of an empty record, and of a stream that shares one, beside its request."""
MAX_SHARES, MAX_SHARED_BYTES = 256, 1 << 20
"""Streams that share a record, the latest, and their requests. Others cannot be resumed after the loss of the only router."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """State to continue one request at another router."""

    id: str
    tenant: str = ""
    submit: bytes
    """Encoded `Submit` frame of the request."""
    router: tuple[str, str] | None
    """Router that submitted it; absent after an adoption, as the Adopted frame may be lost."""
    handle: int | None
    """The engine's, while the request runs here."""
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    """Generated here after `submit`."""
    shared_with: dict[str, bytes] = field(default_factory=dict)
    """Streams that get the same tokens, by id: their requests, see `wire.Share`."""
    finish: wire.FinishReason | None = None
    expires_at: float = 0.0
    """End of the lease, as event loop time."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""
        shares = sum(SHARE_BYTES + len(shared) for shared in self.shared_with.values())
        return RECORD_BYTES + len(self.submit) + TOKEN_BYTES * len(self.tokens) + shares

    def request(self) -> wire.Request:
        """The request, with all tokens as delivered."""
        request = self._submitted()
        return msgspec.structs.replace(request, delivered=[*request.delivered, *self.tokens])

    def _submitted(self) -> wire.Request:
        frame = wire.decode_to_leader(self.submit)
        assert isinstance(frame, wire.Submit), "only Submits are recorded"
        return frame.request

    def shared(self, id: str) -> wire.Request:
        """The request of a stream in `shared_with`, with all tokens as delivered.

        Its epoch is at least that of these tokens: a router that finds it at two groups continues the newer run.
        """
        stream, request = msgspec.msgpack.decode(self.shared_with[id], type=wire.Request), self.request()
        return msgspec.structs.replace(stream.sharing(request), epoch=max(stream.epoch, request.epoch))

    def continue_as(self, id: str) -> None:
        """Makes this the record of a stream in `shared_with`; the former stream shares it.

        The engine's request is the same: its tokens keep their epoch, and it runs alone or not, as before.
        """
        former = self._submitted()
        stream = msgspec.msgpack.decode(self.shared_with.pop(id), type=wire.Request).sharing(former)
        stream = msgspec.structs.replace(stream, epoch=former.epoch, alone=former.alone)
        self.shared_with[self.id] = msgspec.msgpack.encode(former.as_shared())
        self.id, self.submit = id, wire.encode(wire.Submit(handle=0, request=stream))


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A stream that another router continues."""

    request: wire.Request
    """With all tokens as delivered."""
    finish: wire.FinishReason | None
    running: RequestRecord | None = None
    """Record of a request that runs on for this router; null if it has ended, or runs for another stream with a router."""


class LinkRecords:
    """Resumable requests of one link, by engine handle."""

    def __init__(self, orphans: "Orphans", router: tuple[str, str]) -> None:
        self._orphans = orphans
        self._router = router
        self._records: dict[int, RequestRecord] = {}

    def add(self, handle: int, request: wire.Request, message: bytes) -> None:
        """Records a resumable request."""
        if request.can_resume:
            if request.images:  # one image is as large as thousands of other records; who adopts the request has its pixels
                message = wire.encode(wire.Submit(handle=handle, request=request.without_pixels()))
            self._records[handle] = RequestRecord(
                id=request.id, submit=message, router=self._router, handle=handle, tenant=request.tenant
            )

    def share(self, handle: int | None, stream: wire.Request) -> None:
        """Records a stream that gets the tokens of a request, unless that has ended.

        At the limits in place of the oldest ones: routers do not report streams that have left, and early ones mostly have.
        """
        record, encoded = None if handle is None else self._records.get(handle), msgspec.msgpack.encode(stream)
        if record is None or len(encoded) > MAX_SHARED_BYTES:
            return
        shares = record.shared_with
        shares.pop(stream.id, None)
        shares[stream.id] = encoded
        while len(shares) > MAX_SHARES or sum(map(len, shares.values())) > MAX_SHARED_BYTES:
            del shares[next(iter(shares))]

    def adopt(self, record: RequestRecord) -> None:
        """Adds an adopted request."""
        if record.handle is not None:
            record.router = None
            self._records[record.handle] = record

    def tokens(self, frame: wire.Tokens) -> None:
        """Records the tokens of a step; passes ended requests to `Orphans`."""
        if not self._records:
            return
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            if (record := self._records.get(handle)) is not None:
                record.tokens.append(token)
        ended = []
        for end in frame.finished:
            if (record := self._records.get(end.handle)) is not None:
                record.handle, record.finish = None, end.reason
                ended.append(record)
        self._orphans.add_ended(ended)

    def remove(self, handle: int) -> None:
        """Removes a record."""
        self._records.pop(handle, None)

    def abort(self, handle: int) -> None:
        """Removes the record of an aborted request. A router that adopted it may not know the streams that share its tokens."""
        record = self._records.pop(handle, None)
        if record is not None and record.router is None and record.shared_with:
            record.handle = None
            self._orphans.add_ended([record])

    def clear(self) -> None:
        """Removes all records."""
        self._records.clear()

    def find(self, id: str, tenant: str) -> RequestRecord | None:
        """The record, if any."""
        return next((record for record in self._records.values() if (record.id, record.tenant) == (id, tenant)), None)

    def find_shared(self, id: str, tenant: str) -> RequestRecord | None:
        """The record that a stream shares, if any."""
        return _shared(self._records.values(), id, tenant)

    def orphan(self, handles: Iterable[int]) -> list[int]:
        """Makes orphans of resumable requests; returns the other handles."""
        records = {handle: self._records.pop(handle, None) for handle in handles}
        self._orphans.add([record for record in records.values() if record is not None])
        return [handle for handle, record in records.items() if record is None]


def _shared(records: Iterable[RequestRecord], id: str, tenant: str) -> RequestRecord | None:
    return next((record for record in records if id in record.shared_with and record.tenant == tenant), None)


class Orphans:
    """Requests without a router, by id; their sink."""

    def __init__(self, engine: EngineGateway, orphan_s: float, max_kept_bytes: int) -> None:
        self._engine = engine
        self._orphan_s = orphan_s
        self._max_bytes = max_kept_bytes
        self._records: dict[str, RequestRecord] = {}
        """Ordered by `expires_at`."""
        self._running: dict[int, RequestRecord] = {}
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._incarnation = engine.state().incarnation
        engine.subscribe(self._state_changed)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Stores running requests and receives their tokens."""
        orphans = [record for record in records if record.handle is not None and self._engine.has(record.handle)]
        running = {record.handle: record for record in orphans if record.handle is not None}
        self._engine.reassign(running, self)
        self._running |= running
        self._store(orphans)
        if orphans:
            log.info("requests continue without a router", extra={"requests": len(orphans), "seconds": self._orphan_s})

    def add_ended(self, records: list[RequestRecord]) -> None:
        """Stores ended requests."""
        self._store(records)

    def adopt(self, id: str, tenant: str) -> RequestRecord | None:
        """Transfers the request with this id and tenant to the caller. An ended one stays stored."""
        record = self._records.get(id)
        if record is None or record.tenant != tenant:
            return None
        if record.handle is not None:
            del self._running[record.handle]
            self._drop(record)
        return record

    def adopt_shared(self, id: str, tenant: str) -> RequestRecord | None:
        """Transfers the running request that a stream of this id and tenant shares to the caller, as that stream's."""
        record = _shared(self._running.values(), id, tenant)
        if record is not None and record.handle is not None:
            del self._running[record.handle]
            self._drop(record)
            record.continue_as(id)
        return record

    def find_shared(self, id: str, tenant: str) -> RequestRecord | None:
        """The request that a stream of this id and tenant shares, if any."""
        return _shared(self._records.values(), id, tenant)

    def router_reconnected(self, router: tuple[str, str]) -> None:
        """Aborts the orphans of a router."""
        self._abort([record for record in self._running.values() if record.router == router])

    # Sink

    def tokens(self, frame: wire.Tokens) -> None:
        """Stores tokens. A handle may be unknown: another sink of the same step can evict an orphan."""
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            if (record := self._running.get(handle)) is not None:
                record.tokens.append(token)
                self._num_bytes += TOKEN_BYTES
        for end in frame.finished:
            if (record := self._running.pop(end.handle, None)) is not None:
                record.handle, record.finish = None, end.reason
        self._evict()

    def refused(self, frame: wire.Refused) -> None:
        """Keeps the tokens."""
        self._running.pop(frame.handle).handle = None

    def _state_changed(self) -> None:
        incarnation = self._engine.state().incarnation
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            for record in self._running.values():
                record.handle = None
            self._running = {}

    def _store(self, records: list[RequestRecord]) -> None:
        if not records:
            return
        loop = asyncio.get_running_loop()
        for record in records:
            if record.id in self._records:
                self._remove(self._records[record.id])
            record.expires_at = loop.time() + self._orphan_s
            self._records[record.id] = record
            self._num_bytes += record.num_bytes
        if self._timer is None:
            self._timer = loop.call_later(self._orphan_s, self._expire)
        self._evict()

    def _expire(self) -> None:
        """One timer serves all records and references no record."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._records:
            oldest = next(iter(self._records.values()))
            if oldest.expires_at > loop.time():
                self._timer = loop.call_at(oldest.expires_at, self._expire)
                return
            self._remove(oldest)

    def _evict(self) -> None:
        """Drops the oldest records beyond the limit."""
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._records.values())))

    def _remove(self, record: RequestRecord) -> None:
        self._drop(record)
        self._abort([record])

    def _drop(self, record: RequestRecord) -> None:
        del self._records[record.id]
        self._num_bytes -= record.num_bytes

    def _abort(self, records: list[RequestRecord]) -> None:
        handles = [record.handle for record in records if record.handle is not None]
        for record in records:
            if record.handle is not None:
                del self._running[record.handle]
                record.handle = None
        self._engine.abort(handles)
