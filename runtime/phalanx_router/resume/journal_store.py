"""Stores journals of streams that are not open here: copies that other routers send while they run, and closed streams.

A sender's copies stay in `PeerCopies` while its connection is open, then move to the `JournalStore`, from which a client may
resume them. Live copies take at most `max_bytes` together. A new stream over the limit is dropped; a stream that grows over it
keeps its first tokens, and a resume samples the rest again. Both are counted.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx_router.resume import peer_wire
from phalanx_router.resume.peer_wire import JournalChanges, JournalCopy

# The JournalStore keeps each closed or lost stream for `keep_s`, encoded; over `max_bytes` the oldest are dropped first.

ENTRY_BYTES = 256
"""Approximate size of an entry in addition to its encoded bytes."""


class JournalStore:
    """Closed journals, by request id."""

    def __init__(self, clock: Callable[[], float], keep_s: float = 60.0, max_bytes: int = 64 << 20) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._packed: dict[str, tuple[float, bytes]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, copy: JournalCopy) -> None:
        """Stores a copy and replaces an earlier one of the stream."""
        self.forget(copy.request.id)
        packed = peer_wire.encode(copy)
        self._packed[copy.request.id] = (self._clock() + self._keep_s, packed)
        self._num_bytes += ENTRY_BYTES + len(packed)
        self._bound()

    def get(self, id: str) -> JournalCopy | None:
        """Returns the copy of a stream unless unknown or expired."""
        self._bound()
        entry = self._packed.get(id)
        return None if entry is None else peer_wire.decode_copy(entry[1])

    def forget(self, id: str) -> None:
        """Removes a copy if it exists."""
        entry = self._packed.pop(id, None)
        if entry is not None:
            self._num_bytes -= ENTRY_BYTES + len(entry[1])

    def _bound(self) -> None:
        now = self._clock()
        while self._packed:
            id, (until, _) = next(iter(self._packed.items()))  # the first entry is the oldest
            if until > now and self._num_bytes <= self._max_bytes:
                return
            self.forget(id)


TOKEN_BYTES = 4
LIVE_BYTES = 512
"""Approximate size of a live copy in addition to its encoded bytes and tokens."""


@dataclass(slots=True)
class _LiveCopy:
    """Open stream of another router: the copy as received and the tokens since; `is_cut` when later tokens were dropped."""

    id: str
    packed: bytes
    tokens: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        return LIVE_BYTES + len(self.packed) + TOKEN_BYTES * len(self.tokens)

    def copy(self) -> JournalCopy:
        """Returns the copy with the tokens received since."""
        copy = peer_wire.decode_copy(self.packed)
        request = copy.request
        whole = msgspec.structs.replace(request, delivered=[*request.delivered, *self.tokens])
        return msgspec.structs.replace(copy, request=whole)


class PeerCopies:
    """Copies of all senders. A connection has one `CopySender`."""

    def __init__(self, store: JournalStore, max_bytes: int = 256 << 20) -> None:
        self.num_dropped = 0
        self._store = store
        self._left = max_bytes
        self._live: dict[str, _LiveCopy] = {}

    def __len__(self) -> int:
        return len(self._live)

    def find(self, ids: Iterable[str]) -> list[JournalCopy]:
        """Returns the known copies of these streams."""
        found = []
        for id in ids:
            live = self._live.get(id)
            copy = live.copy() if live is not None else self._store.get(id)
            if copy is not None:
                found.append(copy)
        return found

    def sender(self) -> "CopySender":
        """Returns the sender of a new connection."""
        return CopySender(self)

    def add(self, live: _LiveCopy) -> bool:
        """Adds a copy; returns False if it exceeds the limit."""
        if live.num_bytes > self._left:
            self.num_dropped += 1
            return False
        self._left -= live.num_bytes
        self._live[live.id] = live
        return True

    def grow(self, live: _LiveCopy, tokens: Sequence[int]) -> None:
        """Appends tokens. Tokens after dropped ones are useless and dropped too."""
        if live.is_cut:
            return
        if TOKEN_BYTES * len(tokens) > self._left:
            live.is_cut = True
            self.num_dropped += 1
            return
        live.tokens.extend(tokens)
        self._left -= TOKEN_BYTES * len(tokens)

    def remove(self, live: _LiveCopy) -> None:
        """Removes a copy."""
        self._left += live.num_bytes
        if self._live.get(live.id) is live:
            del self._live[live.id]

    def archive(self, live: _LiveCopy, ended: peer_wire.JournalEnd | None) -> None:
        """Moves a copy to the JournalStore when the stream ended or lost its router."""
        self.remove(live)
        if ended is None or not ended.forgotten:
            copy = live.copy()
            finish = None if ended is None or live.is_cut else ended.finish
            self._store.put(msgspec.structs.replace(copy, finish=finish))


class CopySender:
    """Copies received on one connection, by the sender's numbers."""

    def __init__(self, copies: PeerCopies) -> None:
        self._copies = copies
        self._mine: dict[int, _LiveCopy] = {}

    def take(self, changes: JournalChanges) -> None:
        """Applies a frame. Unknown numbers belong to streams that were dropped.

        Raises msgspec.ValidationError if the lengths of the lists do not match, and then applies no part of the frame.
        """
        if len(changes.numbers) != len(changes.counts) or sum(changes.counts) != len(changes.tokens):
            raise msgspec.ValidationError("the lists of a Changes frame differ in length")
        for number, copy in changes.begun:
            live = _LiveCopy(copy.request.id, peer_wire.encode(copy))
            if (before := self._mine.pop(number, None)) is not None:  # the sender reused the number
                self._copies.remove(before)
            if self._copies.add(live):
                self._mine[number] = live
        start = 0
        for number, count in zip(changes.numbers, changes.counts, strict=True):
            if (found := self._mine.get(number)) is not None:
                self._copies.grow(found, changes.tokens[start : start + count])
            start += count
        for ended in changes.ended:
            if (over := self._mine.pop(ended.number, None)) is not None:
                self._copies.archive(over, ended)

    def lost(self) -> None:
        """Moves all copies to the JournalStore after the connection ended: their streams may be resumed."""
        for live in self._mine.values():
            self._copies.archive(live, None)
        self._mine = {}
