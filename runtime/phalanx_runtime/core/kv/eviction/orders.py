"""Policies that are one order of pages: LRU, LFU, FIFO.

LRU: rank = last release · LFU: rank = (hits since insertion, last release) · FIFO: rank = insertion
"""

from array import array

from phalanx_runtime.core.kv.eviction.idle_heap import IdleHeap

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
