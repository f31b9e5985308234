"""Policies that are one order of pages: LRU, LFU, FIFO.

LRU: rank = last release · LFU: rank = (hits since insertion, last release) · FIFO: rank = insertion
"""

from array import array
from heapq import heapify, heappop, heappush

# Idle pages in an order: the smallest rank goes first.


class IdleHeap:
    """A heap of (rank, page) with lazy removal: an entry counts while the page is idle and was not pushed again since.

    `idle[page]` is the pool's word on which pages may go; it is shared, never written here.
    """

    __slots__ = ("_entries", "_heap", "_idle", "_limit", "_num_pages")

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._num_pages = num_pages
        self._idle = idle
        self._heap: list[int] = []
        self._entries = [0] * num_pages
        self._limit = 4 * num_pages + 64

    def push(self, rank: int, page: int) -> None:
        """Puts an idle page in its place; an earlier place of the same page is void."""
        entry = rank * self._num_pages + page
        self._entries[page] = entry
        heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = [e for e in self._heap if self._counts(e)]
            heapify(self._heap)

    def void(self, page: int) -> None:
        """Takes an idle page out of this order."""
        self._entries[page] = 0

    def first(self) -> int | None:
        """The page of the smallest rank, or None when no idle page is here."""
        heap, entries, idle, num_pages = self._heap, self._entries, self._idle, self._num_pages
        while heap:
            entry = heap[0]
            page = entry % num_pages
            if idle[page] and entries[page] == entry:
                return page
            heappop(heap)
        return None

    def _counts(self, entry: int) -> bool:
        page = entry % self._num_pages
        return bool(self._idle[page]) and self._entries[page] == entry


_TIME_BITS = 48


class Lru:
    """The page that was released longest ago goes first."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._order = IdleHeap(num_pages, idle)
        self._released = array("q", bytes(8 * num_pages))

    def on_insert(self, page: int, key: int) -> None:
        """Nothing to note: only releases count."""

    def on_hit(self, page: int) -> None:
        """Nothing to note: only releases count."""

    def on_release(self, page: int, time: int) -> None:
        """Notes the time."""
        self._released[page] = time

    def on_idle(self, page: int) -> None:
        """Puts the page where its last release was."""
        self._order.push(self._released[page], page)

    def on_remove(self, page: int) -> None:
        """Nothing to forget: the page is not idle any more, and is told anew when it is again."""

    def victim(self) -> int:
        """The page released longest ago."""
        return _existing(self._order.first())


class Lfu:
    """The page that was found least often since it was inserted goes first; among equals the one released longest ago."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._order = IdleHeap(num_pages, idle)
        self._hits = array("q", bytes(8 * num_pages))
        self._released = array("q", bytes(8 * num_pages))

    def on_insert(self, page: int, key: int) -> None:
        """Starts to count."""
        self._hits[page] = 0

    def on_hit(self, page: int) -> None:
        """Counts."""
        self._hits[page] += 1

    def on_release(self, page: int, time: int) -> None:
        """Notes the time."""
        self._released[page] = time

    def on_idle(self, page: int) -> None:
        """Puts the page where its count is."""
        self._order.push(self._hits[page] << _TIME_BITS | self._released[page], page)

    def on_remove(self, page: int) -> None:
        """Nothing to forget: the page is not idle any more, and is told anew when it is again."""

    def victim(self) -> int:
        """The page found least often."""
        return _existing(self._order.first())


class Fifo:
    """The page inserted longest ago goes first, however often it was found."""

    def __init__(self, num_pages: int, idle: bytearray) -> None:
        self._order = IdleHeap(num_pages, idle)
        self._inserted = array("q", bytes(8 * num_pages))
        self._count = 0

    def on_insert(self, page: int, key: int) -> None:
        """Notes who came before."""
        self._count += 1
        self._inserted[page] = self._count

    def on_hit(self, page: int) -> None:
        """Nothing to note."""

    def on_release(self, page: int, time: int) -> None:
        """Nothing to note."""

    def on_idle(self, page: int) -> None:
        """Puts the page where its insertion was."""
        self._order.push(self._inserted[page], page)

    def on_remove(self, page: int) -> None:
        """Nothing to forget: the page is not idle any more, and is told anew when it is again."""

    def victim(self) -> int:
        """The page inserted longest ago."""
        return _existing(self._order.first())


def _existing(page: int | None) -> int:
    """The page; the pool asks for a victim only when a page is idle."""
    assert page is not None, "a victim was asked for when no page is idle"
    return page
