"""Finds a cached page by its first tokens, to copy when a prefix ends inside a page; and logs key changes."""

from array import array
from collections.abc import Callable, Sequence

from phalanx_api import wire

Parent = int | bytes
"""What precedes a page: a page, or its key if the page itself may be evicted before."""
Tail = tuple[bytes, tuple[int, ...]]
"""Key before the page, and its tokens."""


class PartialPageIndex:
    """Tokens of cached pages by (parent, first token); the latest page wins."""

    __slots__ = ("_entries", "_page_of", "_page_size", "_tokens")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = array("q", bytes(8 * num_pages * page_size))
        self._entries: list[tuple[Parent, int] | None] = [None] * num_pages
        self._page_of: dict[tuple[Parent, int], int] = {}

    def add(self, page: int, parent: Parent, tokens: Sequence[int]) -> None:
        """Adds a page after `parent`."""
        size = self._page_size
        self._tokens[page * size : (page + 1) * size] = array("q", tokens)
        entry = parent, tokens[0]
        self._entries[page] = entry
        self._page_of[entry] = page

    def remove(self, page: int) -> None:
        """Removes a page, if it was added."""
        entry = self._entries[page]
        if entry is not None:
            self._entries[page] = None
            if self._page_of.get(entry) == page:
                del self._page_of[entry]

    def find(self, parent: Parent, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Returns a page after `parent` and how many of `tokens` it starts with, at least one."""
        page = self._page_of.get((parent, tokens[0])) if tokens else None
        if page is None:
            return None
        start = page * self._page_size
        length = min(len(tokens), self._page_size)
        same = 1
        while same < length and self._tokens[start + same] == tokens[same]:
            same += 1
        return page, same


class TailPages:
    """Pages with the tokens after the last full page of a prompt: its first owner's, then copies."""

    __slots__ = ("_pages", "_tail_of")

    def __init__(self) -> None:
        self._pages: dict[Tail, list[int]] = {}
        self._tail_of: dict[int, Tail] = {}

    def find(self, tail: Tail) -> list[int]:
        """Returns the pages of a tail."""
        return self._pages.get(tail, [])

    def add(self, page: int, tail: Tail) -> None:
        """Adds a page, unless it has a tail already."""
        if page not in self._tail_of:
            self._pages.setdefault(tail, []).append(page)
            self._tail_of[page] = tail

    def remove(self, tail: Tail) -> None:
        """Removes all pages of a tail."""
        for page in self._pages.pop(tail, []):
            del self._tail_of[page]

    def forget(self, pages: Sequence[int]) -> None:
        """Removes these pages."""
        for page in pages if self._tail_of else ():
            tail = self._tail_of.pop(page, None)
            if tail is not None:
                self._pages[tail].remove(page)
                if not self._pages[tail]:
                    del self._pages[tail]


class PageEvents:
    """Bounded log of numbered key changes (is_added, key), for routers with a copy of the keys."""

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

    def drain(self) -> list[tuple[bool, bytes]] | None:
        """Returns the changes since the last call, unless the log overflowed."""
        changes, self._log = self._log, []
        return changes if len(changes) <= self._length else None


class KeyReports:
    """The keys of one page pool that routers count as cached.

    without parts    a page on the device or in host memory
    with parts       a page that has its part too, each on the device or in host memory: a hit ends after as many of these as the
                     window needs. On the device, the pages before them are there, with or without parts.
    """

    def __init__(self, log_length: int, is_cached: Callable[[bytes], bool]) -> None:
        """is_cached: whether routers should count a key now."""
        self.keys: dict[bytes, None] = {}
        """By the changes so far."""
        self._events = PageEvents(log_length)
        self._is_cached = is_cached

    def update(self, *keys: bytes | None) -> None:
        """Logs the changes of these keys, if any; each may have changed."""
        for key in keys:
            if key is None:
                continue
            is_cached = self._is_cached(key)
            if is_cached != (key in self.keys):
                if is_cached:
                    self.keys[key] = None
                else:
                    del self.keys[key]
                self._events.append(is_cached, key)

    def take(self) -> wire.PageChanges:
        """Returns the changes since the last call, or all keys if the log overflowed."""
        changes, number = self._events.drain(), self._events.next_number
        if changes is None:
            return wire.PageChanges(number, [(True, key) for key in self.keys], is_snapshot=True)
        return wire.PageChanges(number - len(changes), changes)
