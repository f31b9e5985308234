"""Copies of journals that other routers send while they live, and what is told of them to those who ask.

A sender's copies stand here as long as its connection; once that ends they go to the shelf, from where a client may resume them.
All together hold at most `max_bytes`; what comes beyond is not kept, and counted.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from phalanx_router import peer_wire
from phalanx_router.peer_wire import Changes, Copy
from phalanx_router.shelf import Shelf

TOKEN_BYTES = 4


@dataclass(slots=True)
class _Live:
    """One stream of another router: its copy as it came, and the tokens since."""

    id: str
    packed: bytes
    tokens: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]

    @property
    def num_bytes(self) -> int:
        return len(self.packed) + TOKEN_BYTES * len(self.tokens)

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

    def grow(self, live: _Live, tokens: Iterable[int]) -> None:
        """More tokens of a stream."""
        before = len(live.tokens)
        live.tokens.extend(tokens)
        self._left -= TOKEN_BYTES * (len(live.tokens) - before)

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
            self._shelf.put(copy if ended is None else msgspec.structs.replace(copy, finish=ended.finish))


class Sender:
    """The copies of one connection, by the sender's numbers."""

    def __init__(self, copies: PeerCopies) -> None:
        self._copies = copies
        self._mine: dict[int, _Live] = {}

    def take(self, changes: Changes) -> None:
        """What became of the sender's journals. Numbers that are not known are of streams that had no room."""
        for number, copy in changes.begun:
            live = _Live(copy.request.id, peer_wire.encode(copy))
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
