"""The page pool and its prefix cache: reference counts of KV pages, and pages by their key.

Arrays, not objects: a page is an index. Each call costs O(1) per page, eviction O(log pages).

    free      no holder and no key                                 allocated first
    held      reference count > 0; a key may find it               a writer fills it, others share it
    cached    no holder, found by a key, fully written             evicted when no page is free, leaf pages first
    free_pages = free + cached                                     when idle: no page is held

Use by a request (`keys`: `phalanx_api.prefix.PrefixKeys` of its full pages):

    run = pool.match(keys[: (len(tokens) - 1) // page_size])       one token is left to compute, for its logits
    fits = pool.free_pages - pool.unheld(run) >= wanted            holding the run removes its cached pages from the free ones
    pool.reuse(run, len(keys)); pages = run + pool.take(...)       reuse first: `take` may evict unheld pages
    pool.publish(pages[i], keys[i], pages[i - 1])                  at once, in order, for each page with a key
    pool.mark_written(pages[i], slots)                             when a chunk that writes them is certainly in the plan
    pool.mark_drafted(pages[i], slots)                             likewise for a draft model that shares the page numbers
    pool.give_back(pages)                                          at end, abort and preemption

A page is published before it is written, so a burst of equal prompts computes its prefix once. The plans so far write
`written(page)` slots of it: a chunk of the same or a later plan may read them. A page has no fixed writer: the first request that
schedules a chunk there writes it, all other holders skip to `written`. So a writer that leaves needs no hand-over; pages without
holder and writer become free. Pages are written in chain order and freed together.

A key that finds another page is not published again, nor are the pages after it: they would keep the other page in use. If that
page has no holder and no child, the new page replaces it. `match` counts nothing, so a waiting request may call it every step.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.eviction.registry import make_eviction
from phalanx_runtime.core.kv.page_check import PoolState, find_wrong
from phalanx_runtime.core.kv.page_index import PageEvents, PartialPageIndex


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Page counts since the start."""

    hits: int = 0
    """Found by `reuse`."""
    misses: int = 0
    """Not found by `reuse`."""
    reused: int = 0
    """Hits without a holder."""
    published: int = 0
    evicted: int = 0
    copied: int = 0
    """Pages that start as a copy."""


class PagePool:
    """Pages 0 to num_pages - 1, allocated in a deterministic order."""

    def __init__(self, num_pages: int, page_size: int, eviction: EvictionPolicy = "lru", event_log: int = 65536) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and slots, got num_pages={num_pages} page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.counters = CacheCounters()
        self.events = PageEvents(event_log)
        self._free = array("q", range(num_pages - 1, -1, -1))
        self._refs = array("q", bytes(8 * num_pages))
        """Reference counts. A holder of a published page holds all pages before it, so an idle chain is idle to its end."""
        self._written = array("q", bytes(8 * num_pages))
        self._drafted = array("q", bytes(8 * num_pages))
        self._keys: list[bytes | None] = [None] * num_pages
        """The key of each page."""
        self._page_of: dict[bytes, int] = {}
        self._published = bytearray(num_pages)
        """1: a key finds the page."""
        self._parents: list[int | None] = [None] * num_pages
        self._children = array("q", bytes(8 * num_pages))
        """Number of published children of each page."""
        self._num_cached = 0
        self._releases = 0
        self._idle = bytearray(num_pages)
        """1: cached, without a published child."""
        self._policy = make_eviction(eviction, num_pages, self._idle)
        self._beginnings = PartialPageIndex(num_pages, page_size)

    @property
    def free_pages(self) -> int:
        """Number of pages without a holder; all can be allocated."""
        return len(self._free) + self._num_cached

    @property
    def cached_pages(self) -> int:
        """Number of free pages with a key."""
        return self._num_cached

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """Returns `count` pages with one holder each, if as many are free. May evict cached pages."""
        free = self._free
        if count > len(free) + self._num_cached:
            return None
        while len(free) < count:
            self._evict()
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
            self._written[page] = self._drafted[page] = 0
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to held or cached pages, in chain order."""
        for page in pages:
            if not self._refs[page]:
                assert self._published[page], f"page {page} is free and cannot be shared"
                self._num_cached -= 1
                self._idle[page] = 0
            self._refs[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Removes one holder from each page; unheld pages become free. The last page is freed first and allocated last."""
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} is given back once too often"
            self._refs[page] -= 1
            if not self._refs[page]:
                self._let_go(page)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest run of keys from the first. Some may not be written yet."""
        found, pages = self._page_of.get, []
        for key in keys:
            page = found(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def unheld(self, pages: Iterable[int]) -> int:
        """Returns how many of these pages, found by `match`, count as free: holding them reduces `free_pages`."""
        refs = self._refs
        return sum(not refs[page] for page in pages)

    def reuse(self, run: Sequence[int], num_keys: int) -> None:
        """Holds a run that `match` found, and counts hits, and misses up to the number of looked-up keys."""
        counters = self.counters
        counters.hits += len(run)
        counters.misses += num_keys - len(run)
        counters.reused += self.unheld(run)
        self.share(run)
        for page in run:
            self._policy.on_hit(page)

    def publish(self, page: int, key: bytes, parent: int | None, tokens: Sequence[int] = ()) -> bool:
        """Returns whether `key` finds this held page from now on; not if another page in use has the key, or the parent has no
        key.

        parent: the page before it in the same request. tokens: its contents, for `match_beginning`.
        """
        assert self._refs[page] > 0 and not self._published[page], f"page {page} is free or published already"
        if parent is not None and not self._published[parent]:
            return False
        other = self._page_of.get(key)
        if other is not None:
            if not self._idle[other]:
                return False
            self._drop(other)
        self._page_of[key] = page
        self._keys[page] = key
        self._published[page] = 1
        self._parents[page] = parent
        if parent is not None:
            self._children[parent] += 1
            if tokens:
                self._beginnings.add(page, parent, tokens)
        self.counters.published += 1
        self.events.append(True, key)
        self._policy.on_insert(page, int.from_bytes(key[:8], "little"))
        return True

    def mark_written(self, page: int, slots: int) -> None:
        """Records that the plans so far write the first `slots` slots of the page."""
        if slots > self._written[page]:
            parent = self._parents[page]
            assert parent is None or self._written[parent] == self.page_size, f"page {page} is written before page {parent}"
            self._written[page] = slots

    def written(self, page: int) -> int:
        """Returns how many slots of the page the plans so far write."""
        return self._written[page]

    def mark_drafted(self, page: int, slots: int) -> None:
        """Records that a draft model computes the first `slots` slots by the plans so far; it may lag behind `written`."""
        self._drafted[page] = max(slots, self._drafted[page])

    def drafted(self, page: int) -> int:
        """Returns how many slots of the page a draft model computes by the plans so far."""
        return self._drafted[page]

    def copied(self, source: int, target: int, slots: int, is_drafted: bool) -> None:
        """Records a copy of the first `slots` slots of a page, with or without the draft model's values."""
        self.counters.copied += 1
        self._drafted[target] = min(slots, self._drafted[source]) if is_drafted else 0

    def match_beginning(self, parent: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Returns a page published after `parent`, and how many of `tokens` it begins with and has written, if there is one."""
        found = self._beginnings.find(parent, tokens)
        if found is None:
            return None
        page, same = found
        same = min(same, self._written[page])
        return (page, same) if same else None

    def keys(self) -> list[bytes]:
        """Returns all current keys."""
        return list(self._page_of)

    def take_changes(self) -> wire.PageChanges:
        """Returns the changes of keys since the last call; all keys if the log is too short."""
        changes = self.events.take()
        if changes is None:
            return wire.PageChanges(self.events.next_number, [(True, key) for key in self.keys()], is_snapshot=True)
        return wire.PageChanges(self.events.next_number - len(changes), changes)

    def check(self, held: list[list[int]]) -> list[str]:
        """Returns errors of the pool, given the pages of every holder; empty if it is consistent."""
        state = PoolState(
            page_size=self.page_size,
            free=self._free,
            refs=self._refs,
            written=self._written,
            keys=self._keys,
            page_of=self._page_of,
            published=self._published,
            parents=self._parents,
            children=self._children,
            idle=self._idle,
            num_cached=self._num_cached,
        )
        return find_wrong(state, held)

    def _let_go(self, page: int) -> None:
        """Caches a page that lost its last holder if it has a key and is fully written, else frees it."""
        if not self._published[page]:
            self._free.append(page)
        elif self._written[page] < self.page_size:
            self._unpublish(page)
            self._free.append(page)
        else:
            self._num_cached += 1
            self._releases += 1
            self._policy.on_release(page, self._releases)
            if not self._children[page]:
                self._idle[page] = 1
                self._policy.on_idle(page)

    def _evict(self) -> None:
        """Frees the idle page that the policy selects."""
        self.counters.evicted += 1
        self._drop(self._policy.victim())

    def _drop(self, page: int) -> None:
        """Frees an idle page; its parent may become idle."""
        parent = self._parents[page]
        self._idle[page] = 0
        self._num_cached -= 1
        self._unpublish(page)
        self._free.append(page)
        if parent is not None and not self._children[parent] and not self._refs[parent]:
            self._idle[parent] = 1
            self._policy.on_idle(parent)

    def _unpublish(self, page: int) -> None:
        """Removes the key of a page without published children."""
        key, parent = self._keys[page], self._parents[page]
        assert key is not None and not self._children[page], f"page {page} is removed before the pages that follow it"
        del self._page_of[key]
        self._keys[page] = self._parents[page] = None
        self._published[page] = 0
        if parent is not None:
            self._children[parent] -= 1
        self._beginnings.remove(page)
        self._policy.on_remove(page)
        self.events.append(False, key)
