"""Finds a cached page by its first tokens, to copy when a prefix ends inside a page; logs key changes, also of disks."""

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


class RankKeys:
    """Keys that all ranks have which have reported theirs, and those that only some of these have.

    When a group starts again, each rank reports all keys on its disk, of which the others have nearly all: a rank's first change
    is applied as sets, not key by key.
    """

    def __init__(self) -> None:
        self.common: set[bytes] = set()
        self._ranks_of: dict[bytes, int] = {}
        """Ranks that have a key which others lack, as bits."""
        self._reporting = 0
        """Ranks that have reported, as bits: the first requests after a start do not wait for the others."""
        self._pieces: dict[int, tuple[list[bytes], list[bytes]]] = {}
        """By rank: what a change has added and dropped that is not complete."""

    def change(self, rank: int, added: Collection[bytes], dropped: Collection[bytes], *, has_more: bool = False) -> list[bytes]:
        """Records the keys that a rank has, and has no longer. Returns those that all ranks have, or lack, from now on.

        has_more: the next call for this rank continues the change, which counts with the last one.
        """
        if has_more or rank in self._pieces:
            pieces = self._pieces.setdefault(rank, ([], []))
            pieces[0].extend(added)
            pieces[1].extend(dropped)
            if has_more:
                return []
            added, dropped = self._pieces.pop(rank)
        own = 1 << rank
        changed = [] if self._reporting & own else self._add_rank(own, added)
        for key in added:
            if key not in self.common and self._set(key, self._ranks_of.pop(key, 0) | own):
                changed.append(key)
        for key in dropped:
            former = self._ranks_of.pop(key, 0)
            if key in self.common:
                self.common.remove(key)
                former = self._reporting
                changed.append(key)
            self._set(key, former & ~own)
        return changed

    def _add_rank(self, own: int, has: Iterable[bytes]) -> list[bytes]:
        """Counts a rank from now on. Returns the keys that all had before, and it lacks."""
        lacks = self.common.difference(has)
        self.common -= lacks
        self._ranks_of.update(dict.fromkeys(lacks, self._reporting))
        self._reporting |= own
        return list(lacks)

    def _set(self, key: bytes, ranks: int) -> bool:
        """Records the ranks that have a key. Returns whether these are all."""
        if ranks == self._reporting:
            self.common.add(key)
            return True
        if ranks:
            self._ranks_of[key] = ranks
        return False


def snapshot_of(next_number: int, keys: Collection[bytes], on_disk: Iterable[bytes]) -> wire.PageChanges:
    """Returns all keys, with the number of the next change. on_disk: keys of pages that only the disk has."""
    changes = [*((True, key) for key in keys), *((False, key) for key in on_disk)]
    return wire.PageChanges(next_number, changes, is_snapshot=True, on_disk=list(range(len(keys), len(changes))))


def _is_never_on_disk(key: bytes) -> bool:
    return False
