"""Which cached page begins like given tokens: the source of a copy when a prefix ends inside a page."""

from array import array
from collections.abc import Sequence


class PartialPageIndex:
    """Tokens of cached pages, found by (page before it, first token). Of pages that meet there the latest is found."""

    __slots__ = ("_found_by", "_page_size", "_places", "_tokens")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = array("q", bytes(8 * num_pages * page_size))
        self._places: list[tuple[int, int] | None] = [None] * num_pages
        self._found_by: dict[tuple[int, int], int] = {}

    def add(self, page: int, parent: int, tokens: Sequence[int]) -> None:
        """Notes the tokens of a page that follows `parent`."""
        size = self._page_size
        self._tokens[page * size : (page + 1) * size] = array("q", tokens)
        place = parent, tokens[0]
        self._places[page] = place
        self._found_by[place] = page

    def remove(self, page: int) -> None:
        """Forgets a page; one that was never added is no error."""
        place = self._places[page]
        if place is not None:
            self._places[page] = None
            if self._found_by.get(place) == page:
                del self._found_by[place]

    def find(self, parent: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A page after `parent` and how many of `tokens` it begins with, at least one; None when there is none."""
        page = self._found_by.get((parent, tokens[0])) if tokens else None
        if page is None:
            return None
        start = page * self._page_size
        length = min(len(tokens), self._page_size)
        same = 1
        while same < length and self._tokens[start + same] == tokens[same]:
            same += 1
        return page, same


# What became findable in the prefix cache and what did no longer, numbered, for those who keep a copy (routers).
#     replay of all changes on an empty set = the keys that the pool finds now
# The log is bounded: who takes too late is told that the oldest are forgotten, and takes all keys instead.


class PageEvents:
    """The latest changes that nobody took yet: (is_added, key) each. Numbers go up by one, from 0."""

    __slots__ = ("_length", "_log", "next_number")

    def __init__(self, length: int) -> None:
        self.next_number = 0
        """Number of the change to come: what is found now comes of all changes before it."""
        self._length = length
        self._log: list[tuple[bool, bytes]] = []

    def append(self, is_added: bool, key: bytes) -> None:
        """Takes note of one change."""
        if len(self._log) <= self._length:
            self._log.append((is_added, key))
        self.next_number += 1

    def take(self) -> list[tuple[bool, bytes]] | None:
        """The changes since the call before, oldest first; None when there were more than the log holds."""
        changes, self._log = self._log, []
        return changes if len(changes) <= self._length else None
