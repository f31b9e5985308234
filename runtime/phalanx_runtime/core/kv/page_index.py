"""Finds a cached page by its first tokens, to copy when a prefix ends inside a page; and logs key changes."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

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


MAX_DISK_KEYS = 1 << 18
"""Of pages that only the disk has, those that routers know: 28 MB in each router and leader."""


class PageEvents:
    """Bounded log of numbered key changes (is_added, key), for routers with a copy of the keys."""

    __slots__ = ("_length", "_log", "_on_disk", "next_number")

    def __init__(self, length: int) -> None:
        self.next_number = 0
        """Number of the next change."""
        self._length = length
        self._log: list[tuple[bool, bytes]] = []
        self._on_disk: list[int] = []

    def append(self, is_added: bool, key: bytes, *, is_on_disk: bool = False) -> None:
        """Logs one change. is_on_disk: only the disk has the page now."""
        if len(self._log) <= self._length:
            if is_on_disk:
                self._on_disk.append(len(self._log))
            self._log.append((is_added, key))
        self.next_number += 1

    def drain(self) -> wire.PageChanges | None:
        """Returns the changes since the last call, unless the log overflowed."""
        changes, on_disk, self._log, self._on_disk = self._log, self._on_disk, [], []
        if len(changes) > self._length:
            return None
        return wire.PageChanges(self.next_number - len(changes), changes, on_disk=on_disk)


class KeyReports:
    """The keys of one page pool that routers count as cached, and those of pages that only the disk has.

    without parts    a page on the device or in host memory
    with parts       a page that has its part too, each on the device or in host memory: a hit ends after as many of these as the
                     window needs. On the device, the pages before them are there, with or without parts.
    """

    def __init__(self, log_length: int, is_cached: Callable[[bytes], bool]) -> None:
        """is_cached: whether routers should count a key now."""
        self.keys: dict[bytes, None] = {}
        """By the changes so far."""
        self.on_disk: OrderedDict[bytes, None] = OrderedDict()
        """The newest ones that only the disk has."""
        self.is_on_disk: Callable[[bytes], bool] = _is_never_on_disk
        """Whether memory and disk together have a page."""
        self._events = PageEvents(log_length)
        self._is_cached = is_cached

    def update(self, *keys: bytes | None) -> None:
        """Logs the changes of these keys, if any; each may have changed."""
        for key in keys:
            if key is None:
                continue
            is_cached = self._is_cached(key)
            is_on_disk = not is_cached and self.is_on_disk(key)
            if is_cached == (key in self.keys) and is_on_disk == (key in self.on_disk):
                continue
            self.keys.pop(key, None)
            self.on_disk.pop(key, None)
            if is_cached:
                self.keys[key] = None
            elif is_on_disk:
                self.on_disk[key] = None
            self._events.append(is_cached, key, is_on_disk=is_on_disk)
            if len(self.on_disk) > MAX_DISK_KEYS:
                self._events.append(False, self.on_disk.popitem(last=False)[0])

    def take(self) -> wire.PageChanges:
        """Returns the changes since the last call, or all keys if the log overflowed."""
        return self._events.drain() or snapshot_of(self._events.next_number, self.keys, self.on_disk)


def snapshot_of(next_number: int, keys: Collection[bytes], on_disk: Iterable[bytes]) -> wire.PageChanges:
    """Returns all keys, with the number of the next change. on_disk: keys of pages that only the disk has."""
    changes = [*((True, key) for key in keys), *((False, key) for key in on_disk)]
    return wire.PageChanges(next_number, changes, is_snapshot=True, on_disk=list(range(len(keys), len(changes))))


def _is_never_on_disk(key: bytes) -> bool:
    return False
