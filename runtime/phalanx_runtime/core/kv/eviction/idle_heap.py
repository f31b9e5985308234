"""Idle pages in an order: the smallest rank goes first."""

from heapq import heapify, heappop, heappush


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
