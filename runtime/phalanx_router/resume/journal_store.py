"""Copies of journals that other routers send while they live, and what is told of them to those who ask.

A sender's copies stand here as long as its connection; once that ends they go to the shelf, from where a client may resume them.
All together hold at most `max_bytes`. A stream that comes beyond that is not kept; one that grows beyond it is kept as far as it
was: a resume draws the rest again. Both are counted.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx_router.resume import peer_wire
from phalanx_router.resume.peer_wire import Changes, Copy

# Journals of streams that are not open here: closed ones of this router, and those of a router that was lost.
# Each is kept for `keep_s`, packed; all together within `max_bytes`, beyond which the oldest go first. Pure: the clock is
# given.

ENTRY_BYTES = 256
"""What a copy takes beside its packed bytes, about."""


class Shelf:
    """Copies of journals, by request id."""

    def __init__(self, clock: Callable[[], float], keep_s: float = 60.0, max_bytes: int = 64 << 20) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._packed: dict[str, tuple[float, bytes]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, copy: Copy) -> None:
        """Keeps a copy; the latest of a stream counts."""
        self.forget(copy.request.id)
        packed = peer_wire.encode(copy)
        self._packed[copy.request.id] = (self._clock() + self._keep_s, packed)
        self._num_bytes += ENTRY_BYTES + len(packed)
        self._bound()

    def get(self, id: str) -> Copy | None:
        """The copy of this stream; None when it was never here or is too old."""
        self._bound()
        entry = self._packed.get(id)
        return None if entry is None else peer_wire.decode_copy(entry[1])

    def forget(self, id: str) -> None:
        """Drops it, if it is there."""
        entry = self._packed.pop(id, None)
        if entry is not None:
            self._num_bytes -= ENTRY_BYTES + len(entry[1])

    def _bound(self) -> None:
        now = self._clock()
        while self._packed:
            id, (until, _) = next(iter(self._packed.items()))  # the oldest stands first
            if until > now and self._num_bytes <= self._max_bytes:
                return
            self.forget(id)


TOKEN_BYTES = 4
LIVE_BYTES = 512
"""What a copy takes beside its packed bytes and its tokens, about."""


@dataclass(slots=True)
class _Live:
    """One stream of another router: its copy as it came, and the tokens since; `is_cut`: those that had room."""

    id: str
    packed: bytes
    tokens: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        return LIVE_BYTES + len(self.packed) + TOKEN_BYTES * len(self.tokens)

    def copy(self) -> Copy:
        """What is known of it now."""
        copy = peer_wire.decode_copy(self.packed)
        request = copy.request
        whole = msgspec.structs.replace(request, delivered=[*request.delivered, *self.tokens])
        return msgspec.structs.replace(copy, request=whole)


class PeerCopies:
    """All copies that are here. A connection that brings some is one `Sender`."""

    def __init__(self, shelf: Shelf, max_bytes: int = 256 << 20) -> None:
        self.num_dropped = 0
        self._shelf = shelf
        self._left = max_bytes
        self._live: dict[str, _Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def find(self, ids: Iterable[str]) -> list[Copy]:
        """Those of these streams that are known here."""
        found = []
        for id in ids:
            live = self._live.get(id)
            copy = live.copy() if live is not None else self._shelf.get(id)
            if copy is not None:
                found.append(copy)
        return found

    def sender(self) -> "Sender":
        """A new connection."""
        return Sender(self)

    def add(self, live: _Live) -> bool:
        """Whether there was room for it."""
        if live.num_bytes > self._left:
            self.num_dropped += 1
            return False
        self._left -= live.num_bytes
        self._live[live.id] = live
        return True

    def grow(self, live: _Live, tokens: Sequence[int]) -> None:
        """More tokens of a stream. What follows a gap is nothing worth."""
        if live.is_cut:
            return
        if TOKEN_BYTES * len(tokens) > self._left:
            live.is_cut = True
            self.num_dropped += 1
            return
        live.tokens.extend(tokens)
        self._left -= TOKEN_BYTES * len(tokens)

    def remove(self, live: _Live) -> None:
        """Forgets a stream."""
        self._left += live.num_bytes
        if self._live.get(live.id) is live:
            del self._live[live.id]

    def shelve(self, live: _Live, ended: peer_wire.Ended | None) -> None:
        """Keeps for a while what ended, or lost its router."""
        self.remove(live)
        if ended is None or not ended.forgotten:
            copy = live.copy()
            finish = None if ended is None or live.is_cut else ended.finish
            self._shelf.put(msgspec.structs.replace(copy, finish=finish))


class Sender:
    """The copies of one connection, by the sender's numbers."""

    def __init__(self, copies: PeerCopies) -> None:
        self._copies = copies
        self._mine: dict[int, _Live] = {}

    def take(self, changes: Changes) -> None:
        """What became of the sender's journals. Numbers that are not known are of streams that had no room.

        Raises msgspec.ValidationError for lists that do not fit together; nothing is taken then.
        """
        if len(changes.numbers) != len(changes.counts) or sum(changes.counts) != len(changes.tokens):
            raise msgspec.ValidationError("the lists of a Changes frame differ in length")
        for number, copy in changes.begun:
            live = _Live(copy.request.id, peer_wire.encode(copy))
            if (before := self._mine.pop(number, None)) is not None:  # a number that is used twice
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
                self._copies.shelve(over, ended)

    def lost(self) -> None:
        """The connection ended: its streams may be resumed."""
        for live in self._mine.values():
            self._copies.shelve(live, None)
        self._mine = {}
