"""Finds a cached page that begins like given tokens, the source of a copy when a prefix ends inside a page; and logs changes of
keys."""

from array import array
from collections.abc import Sequence


class PartialPageIndex:
    """Tokens of cached pages by (parent page, first token). Of pages with equal values the latest is found."""

    __slots__ = ("_found_by", "_page_size", "_places", "_tokens")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = array("q", bytes(8 * num_pages * page_size))
        self._places: list[tuple[int, int] | None] = [None] * num_pages
        self._found_by: dict[tuple[int, int], int] = {}

    def add(self, page: int, parent: int, tokens: Sequence[int]) -> None:
        """Adds the tokens of a page after `parent`."""
        size = self._page_size
        self._tokens[page * size : (page + 1) * size] = array("q", tokens)
        place = parent, tokens[0]
        self._places[page] = place
        self._found_by[place] = page

    def remove(self, page: int) -> None:
        """Removes a page, if it was added."""
        place = self._places[page]
        if place is not None:
            self._places[page] = None
            if self._found_by.get(place) == page:
                del self._found_by[place]

    def find(self, parent: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Returns a page after `parent` and how many of `tokens` it begins with, if that is at least one."""
        page = self._found_by.get((parent, tokens[0])) if tokens else None
        if page is None:
            return None
        start = page * self._page_size
        length = min(len(tokens), self._page_size)
        same = 1
        while same < length and self._tokens[start + same] == tokens[same]:
            same += 1
        return page, same


# Numbered changes of the prefix cache's keys, for routers that keep a copy.
#     replay of all changes on an empty set = the current keys of the pool
# The log is bounded: a reader that is too late receives all keys instead.


class PageEvents:
    """The latest changes (is_added, key) since the last `take`. Numbers rise by one, from 0."""

    __slots__ = ("_length", "_log", "next_number")

    def __init__(self, length: int) -> None:
        self.next_number = 0
        """Number of the next change."""
        self._length = length
        self._log: list[tuple[bool, bytes]] = []

    def append(self, is_added: bool, key: bytes) -> None:
        """Logs one change."""
        if len(self._log) <= self._length:
            self._log.append((is_added, key))
        self.next_number += 1

    def take(self) -> list[tuple[bool, bytes]] | None:
        """Returns the changes since the last call, oldest first, if the log holds all of them."""
        changes, self._log = self._log, []
        return changes if len(changes) <= self._length else None
