"""Pages in the order of their last use, as a doubly linked list in arrays."""

from array import array


class Recency:
    """A ring through `num_pages + 1` places; the last place is its end. Each call costs O(1)."""

    __slots__ = ("_end", "_next", "_previous", "size")

    def __init__(self, num_pages: int) -> None:
        self._end = num_pages
        self._next = array("q", range(num_pages + 1))
        self._previous = array("q", range(num_pages + 1))
        self.size = 0

    def add(self, page: int) -> None:
        """Puts a page that is not in the ring at its most recent end."""
        end, following, previous = self._end, self._next, self._previous
        last = previous[end]
        following[last] = page
        previous[page] = last
        following[page] = end
        previous[end] = page
        self.size += 1

    def remove(self, page: int) -> None:
        """Takes a page out of the ring."""
        following, previous = self._next, self._previous
        before, after = previous[page], following[page]
        following[before] = after
        previous[after] = before
        self.size -= 1

    def renew(self, page: int) -> None:
        """Moves a page of the ring to its most recent end."""
        end, following, previous = self._end, self._next, self._previous
        before, after = previous[page], following[page]
        following[before] = after
        previous[after] = before
        last = previous[end]
        following[last] = page
        previous[page] = last
        following[page] = end
        previous[end] = page

    def oldest(self) -> int:
        """The page used longest ago of a ring that is not empty."""
        assert self.size, "an empty ring has no oldest page"
        return self._next[self._end]
