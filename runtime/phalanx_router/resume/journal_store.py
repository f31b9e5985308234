"""Stores journals of streams that are not open here: closed streams, and copies of other routers' streams.

Over `max_bytes` a new copy is dropped; a stream that grows keeps its first tokens, and a resume samples the rest again. A choice
that has ended is kept as long as another one of its stream is open.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx_frontend.ids import stream_of_choice
from phalanx_router.resume import peer_wire
from phalanx_router.resume.peer_wire import JournalChanges, JournalCopy, JournalHistory

ENTRY_BYTES = 256
"""Size of an entry in addition to its encoded bytes."""


class JournalStore:
    """Encoded journals for `keep_s`; over `max_bytes` the oldest are dropped."""

    def __init__(self, clock: Callable[[], float], keep_s: float = 60.0, max_bytes: int = 64 << 20) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._entries: dict[str, tuple[float, bytes]] = {}  # expiry, encoded copy
        self._num_bytes = 0
        self._num_open: Counter[str] = Counter()  # open choices by stream, of those with several

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, copy: JournalCopy, displaces: bool = True) -> None:
        """Stores a copy, in place of an earlier one. `displaces`: also if older ones must be dropped for it."""
        self.forget(copy.request.id)
        packed = peer_wire.encode(copy)
        self._evict()
        if not displaces and self._num_bytes + ENTRY_BYTES + len(packed) > self._max_bytes:
            return
        self._entries[copy.request.id] = (self._clock() + self._keep_s, packed)
        self._num_bytes += ENTRY_BYTES + len(packed)
        self._evict()

    def get(self, id: str) -> JournalCopy | None:
        """Copy of a stream, unless unknown or expired."""
        self._evict()
        entry = self._entries.get(id)
        return None if entry is None else peer_wire.decode_copy(entry[1])

    def forget(self, id: str) -> None:
        """Removes a copy."""
        entry = self._entries.pop(id, None)
        if entry is not None:
            self._num_bytes -= ENTRY_BYTES + len(entry[1])

    def opened(self, id: str) -> None:
        """Records an open stream, or choice of one."""
        if stream := stream_of_choice(id):
            self._num_open[stream] += 1

    def ended(self, id: str) -> None:
        """Records its end."""
        if stream := stream_of_choice(id):
            self._evict()
            self._num_open[stream] -= 1
            if not self._num_open[stream]:
                del self._num_open[stream]

    def _evict(self) -> None:
        now = self._clock()
        while self._entries:
            id, (expires_at, packed) = next(iter(self._entries.items()))  # the first entry is the oldest
            is_over = self._num_bytes > self._max_bytes
            if expires_at > now and not is_over:
                return
            if not is_over and stream_of_choice(id) in self._num_open:
                del self._entries[id]
                self._entries[id] = now + self._keep_s, packed
            else:
                self.forget(id)


TOKEN_BYTES = 4
LIVE_BYTES = 512
"""Size of a live copy in addition to bytes and tokens."""


def with_history(copy: JournalCopy, history: JournalHistory) -> JournalCopy:
    """The copy with this history."""
    request = msgspec.structs.replace(copy.request, epoch=history.epoch, alone=history.is_alone)
    return msgspec.structs.replace(copy, request=request, deaths=history.deaths)


@dataclass(slots=True)
class _LiveCopy:
    """Open stream of another router."""

    id: str
    packed: bytes  # as received
    tokens: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]  # received since
    is_truncated: bool = False  # later tokens were dropped
    history: JournalHistory | None = None  # received since

    @property
    def num_bytes(self) -> int:
        return LIVE_BYTES + len(self.packed) + TOKEN_BYTES * len(self.tokens)

    def copy(self) -> JournalCopy:
        """The copy with all tokens."""
        copy = peer_wire.decode_copy(self.packed)
        request = msgspec.structs.replace(copy.request, delivered=[*copy.request.delivered, *self.tokens])
        copy = msgspec.structs.replace(copy, request=request)
        return copy if self.history is None else with_history(copy, self.history)


class PeerCopies:
    """Copies of other routers' journals."""

    def __init__(self, store: JournalStore, max_bytes: int = 256 << 20) -> None:
        self.num_dropped = 0
        self._store = store
        self._free_bytes = max_bytes
        self._live: dict[str, _LiveCopy] = {}

    def __len__(self) -> int:
        return len(self._live)

    def find(self, ids: Iterable[str]) -> list[JournalCopy]:
        """Known copies of these streams."""
        copies = []
        for id in ids:
            live = self._live.get(id)
            copy = live.copy() if live is not None else self._store.get(id)
            if copy is not None:
                copies.append(copy)
        return copies

    def receiver(self) -> "CopyReceiver":
        """Receiver of a new connection."""
        return CopyReceiver(self)

    def add(self, live: _LiveCopy) -> bool:
        """Adds a copy; returns False over the limit."""
        if live.num_bytes > self._free_bytes:
            self.num_dropped += 1
            return False
        self._free_bytes -= live.num_bytes
        self._live[live.id] = live
        self._store.opened(live.id)
        return True

    def extend(self, live: _LiveCopy, tokens: Sequence[int]) -> None:
        """Appends tokens, except after dropped ones."""
        if live.is_truncated:
            return
        if TOKEN_BYTES * len(tokens) > self._free_bytes:
            live.is_truncated = True
            self.num_dropped += 1
            return
        live.tokens.extend(tokens)
        self._free_bytes -= TOKEN_BYTES * len(tokens)

    def remove(self, live: _LiveCopy) -> None:
        """Removes a copy."""
        self._free_bytes += live.num_bytes
        self._store.ended(live.id)
        if self._live.get(live.id) is live:
            del self._live[live.id]

    def archive(self, live: _LiveCopy, end: peer_wire.JournalEnd | None) -> None:
        """Moves a copy to the `JournalStore`. `end`: absent if the stream lost its router."""
        self.remove(live)
        if end is None or not end.is_forgotten:
            finish = None if end is None or live.is_truncated else end.finish
            self._store.put(msgspec.structs.replace(live.copy(), finish=finish))


class CopyReceiver:
    """Copies received on one connection, by the sender's numbers."""

    def __init__(self, copies: PeerCopies) -> None:
        self._copies = copies
        self._by_number: dict[int, _LiveCopy] = {}

    def apply(self, changes: JournalChanges) -> None:
        """Applies a frame. Raises msgspec.ValidationError, before any change, if lengths do not match."""
        if len(changes.numbers) != len(changes.counts) or sum(changes.counts) != len(changes.tokens):
            raise msgspec.ValidationError("the lists of a Changes frame differ in length")
        for number, copy in changes.opened:
            live = _LiveCopy(copy.request.id, peer_wire.encode(copy))
            if (before := self._by_number.pop(number, None)) is not None:  # the sender reused the number
                self._copies.remove(before)
            if self._copies.add(live):
                self._by_number[number] = live
        for number, history in changes.replayed:
            if (replayed := self._by_number.get(number)) is not None:
                replayed.history = history
        start = 0
        for number, count in zip(changes.numbers, changes.counts, strict=True):
            if (extended := self._by_number.get(number)) is not None:
                self._copies.extend(extended, changes.tokens[start : start + count])
            start += count
        for end in changes.closed:
            if (closed := self._by_number.pop(end.number, None)) is not None:
                self._copies.archive(closed, end)

    def close(self) -> None:
        """Moves all copies to the `JournalStore`."""
        for live in self._by_number.values():
            self._copies.archive(live, None)
        self._by_number = {}
