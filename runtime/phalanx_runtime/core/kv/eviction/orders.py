"""Interface between the page pool and an eviction policy, and LRU, LFU and FIFO.

A policy selects among idle pages: those without holder and cached child, so leaf pages go first.

    insert -> (hit | release | idle)* -> remove          a hit ends idleness until the next `on_idle`
"""

from array import array
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from math import exp2, log2
from typing import Protocol

_TIME_BITS = 48
HALF_LIFE = 4
"""Insertions and hits, per page of the pool, until a use of a page counts half: counts follow a working set that changes."""
_STEPS = 256
"""Of a score, per doubling."""


class Eviction(Protocol):
    """An eviction policy, with calls of O(log pages) at most, amortised."""

    def on_insert(self, page: int, key: int) -> None:
        """The page got a key. `key`: 64 bits of its hash."""
        ...

    def on_hit(self, page: int) -> None:
        """The page was found and got one more holder."""
        ...

    def on_release(self, page: int, time: int) -> None:
        """The page lost its last holder. `time` increases; a chain is released from its end."""
        ...

    def on_idle(self, page: int) -> None:
        """The page became idle."""
        ...

    def on_remove(self, page: int) -> None:
        """The page lost its key."""
        ...

    def victim(self) -> int:
        """Returns the idle page that the pool evicts next. One exists."""
        ...


class IdleHeap:
    """Idle pages by rank: a heap with lazy removal. An entry is valid while its page is idle and has no newer entry."""

    __slots__ = ("_entries", "_heap", "_idle", "_limit", "_num_pages")

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._num_pages = num_pages
        self._idle = idle
        self._heap: list[int] = []
        self._entries = [0] * num_pages
        self._limit = 4 * num_pages + 64

    def push(self, rank: int, page: int) -> None:
        """Adds an idle page, or changes its rank."""
        entry = rank * self._num_pages + page
        self._entries[page] = entry
        heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = [e for e in self._heap if self._is_valid(e)]
            heapify(self._heap)

    def remove(self, page: int) -> None:
        """Removes a page."""
        self._entries[page] = 0

    def first(self) -> int | None:
        """Returns the idle page with the smallest rank, if any."""
        heap, entries, idle, num_pages = self._heap, self._entries, self._idle, self._num_pages
        while heap:
            entry = heap[0]
            page = entry % num_pages
            if idle[page] and entries[page] == entry:
                return page
            heappop(heap)
        return None

    def _is_valid(self, entry: int) -> bool:
        page = entry % self._num_pages
        return bool(self._idle[page]) and self._entries[page] == entry


class Lru:
    """Evicts the least recently released page."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._order = IdleHeap(num_pages, idle)
        self._released = array("q", bytes(8 * num_pages))

    def on_insert(self, page: int, key: int) -> None:
        """Ignored."""

    def on_hit(self, page: int) -> None:
        """Ignored."""

    def on_release(self, page: int, time: int) -> None:
        """Records the time."""
        self._released[page] = time

    def on_idle(self, page: int) -> None:
        """Ranks the page by its last release."""
        self._order.push(self._released[page], page)

    def on_remove(self, page: int) -> None:
        """Ignored: a page that is not idle has no valid entry."""

    def victim(self) -> int:
        """Returns the least recently released page."""
        return _existing(self._order.first())


class FadingUses:
    """Insertion and hits of each page, the older the less.

        score(page) = log2(sum over uses of 2 ^ (time / half-life))        time: insertions and hits of all pages

    Two pages keep their order while neither is used, so that their ranks need no update.
    """

    __slots__ = ("_per_access", "_scores", "_time")

    def __init__(self, num_pages: int) -> None:
        self._per_access = 1 / (HALF_LIFE * num_pages)
        self._scores = array("d", bytes(8 * num_pages))
        self._time = 0

    def insert(self, page: int) -> None:
        """Forgets the uses of the page's slot, and counts one."""
        self._time += 1
        self._scores[page] = self._time * self._per_access

    def hit(self, page: int) -> None:
        """Counts a use."""
        self._time += 1
        now = self._time * self._per_access
        scores = self._scores
        scores[page] = now + log2(1 + exp2(scores[page] - now))

    def rank(self, page: int) -> int:
        """Returns the score in steps; pages that are about equally used have the same."""
        return int(self._scores[page] * _STEPS)

    def hits(self, page: int) -> int:
        """Returns the hits as they count now, rounded, without the insertion."""
        return max(0, round(exp2(self._scores[page] - self._time * self._per_access)) - 1)


class Lfu:
    """Evicts the page with the fewest uses since its insertion, the older the less; of equal ones the least recently released."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._order = IdleHeap(num_pages, idle)
        self._uses = FadingUses(num_pages)
        self._released = array("q", bytes(8 * num_pages))

    def on_insert(self, page: int, key: int) -> None:
        """Starts the count."""
        self._uses.insert(page)

    def on_hit(self, page: int) -> None:
        """Counts the hit."""
        self._uses.hit(page)

    def on_release(self, page: int, time: int) -> None:
        """Records the time."""
        self._released[page] = time

    def on_idle(self, page: int) -> None:
        """Ranks the page by uses and last release."""
        self._order.push(self._uses.rank(page) << _TIME_BITS | self._released[page], page)

    def on_remove(self, page: int) -> None:
        """Ignored: a page that is not idle has no valid entry."""

    def victim(self) -> int:
        """Returns the page with the fewest uses."""
        return _existing(self._order.first())


class Fifo:
    """Evicts the page inserted first."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._order = IdleHeap(num_pages, idle)
        self._inserted = array("q", bytes(8 * num_pages))
        self._count = 0

    def on_insert(self, page: int, key: int) -> None:
        """Records the order of insertion."""
        self._count += 1
        self._inserted[page] = self._count

    def on_hit(self, page: int) -> None:
        """Ignored."""

    def on_release(self, page: int, time: int) -> None:
        """Ignored."""

    def on_idle(self, page: int) -> None:
        """Ranks the page by its insertion."""
        self._order.push(self._inserted[page], page)

    def on_remove(self, page: int) -> None:
        """Ignored: a page that is not idle has no valid entry."""

    def victim(self) -> int:
        """Returns the page inserted first."""
        return _existing(self._order.first())


ORDERS: Mapping[str, Callable[[int, bytearray], Eviction]] = {"lru": Lru, "lfu": Lfu, "fifo": Fifo}
"""Policies of this module by name."""


def _existing(page: int | None) -> int:
    assert page is not None, "the pool requests a victim only if a page is idle"
    return page
