"""The page pool and its prefix cache: reference counts of KV pages, and pages by key.

    free      no holder and no key                                 allocated first
    held      reference count > 0; a key may find it
    cached    no holder, found by a key, fully written             evicted when no page is free, leaf pages first

A new request calls `match`, `reuse`, `allocate` (which may evict unheld pages), then `publish` for each page with a key. A page
is published before it is written, so equal prompts of a burst are computed once. Any holder may write the slots after `written`,
so a writer that ends needs no handover.

With a host tier, an evicted page is copied there. Routers count its key until both have lost it (`page_index.KeyReports`).

If a page in use has the key already, this and later pages of the request stay unpublished: they would keep that page in use.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.eviction.adaptive import make_eviction
from phalanx_runtime.core.kv.eviction.orders import Eviction
from phalanx_runtime.core.kv.host_tier import HostTier
from phalanx_runtime.core.kv.page_check import PoolState, find_errors
from phalanx_runtime.core.kv.page_index import KeyReports, Parent, PartialPageIndex
from phalanx_runtime.core.kv.tier_sizing import SizingRules
from phalanx_runtime.core.request import RequestPages
from phalanx_runtime.core.step_plan import HostResize
from phalanx_runtime.core.window_parts import NO_PART, WindowParts


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Counts since the start."""

    hits: int = 0
    misses: int = 0

    reused: int = 0
    """Hits without a holder."""
    published: int = 0
    evicted: int = 0
    evicted_page_s: float = 0.0
    """Seconds from publication to eviction, summed over evicted pages."""
    copied: int = 0


class PagePool:
    """Pages 0 to num_pages - 1, allocated in a deterministic order."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        eviction: EvictionPolicy = "lru",
        event_log: int = 65536,
        *,
        num_host_pages: int = 0,
        host_rules: SizingRules | None = None,
        has_disk: bool = False,
        parts: WindowParts | None = None,
        host_part_rules: SizingRules | None = None,
    ) -> None:
        """`parts`: of the pages, if some layers have a window and others have not.

        `host_part_rules`: of the slots for parts in host memory.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and slots, got num_pages={num_pages} page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.counters = CacheCounters()
        self.parts = parts
        if parts is not None:
            parts.pages = self
        self.now_s = 0.0
        """Monotonic seconds, set with each load report: the resolution of `evicted_page_s`."""
        self.reports = KeyReports(event_log, self._is_cached)
        self.host = HostTier(num_host_pages, eviction, has_disk=has_disk, num_device_pages=num_pages, rules=host_rules)
        self.host_parts = HostTier(0, eviction, has_disk=has_disk, rules=host_part_rules, follows=self.host)
        """Wanted parts, by the keys of their pages."""
        self._free = array("q", range(num_pages - 1, -1, -1))
        self._refs = array("q", bytes(8 * num_pages))
        """A holder of a published page holds all pages before it."""
        self._written = array("q", bytes(8 * num_pages))
        self._drafted = array("q", bytes(8 * num_pages))
        self._keys: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._published = bytearray(num_pages)
        self._published_s = array("d", bytes(8 * num_pages))
        self._parents: list[int | None] = [None] * num_pages
        self._num_children = array("q", bytes(8 * num_pages))
        self._num_cached = 0
        self._num_releases = 0
        self._idle = bytearray(num_pages)
        """1: cached, without a published child."""
        self._policy = make_eviction(eviction, num_pages, self._idle)
        self._partial_pages = PartialPageIndex(num_pages, page_size)

    @property
    def free_pages(self) -> int:
        """Pages without a holder: all can be allocated."""
        return len(self._free) + self._num_cached

    @property
    def cached_pages(self) -> int:
        """Free pages with a key."""
        return self._num_cached

    @property
    def eviction(self) -> Eviction:
        """The eviction policy."""
        return self._policy

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages for this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int, *, by_step: bool = True) -> list[int] | None:
        """Returns `count` pages with one holder each, if available. `by_step`: only steps write them."""
        free = self._free
        if count > len(free) + self._num_cached:
            return None
        while len(free) < count:
            self._evict()
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
            self._written[page] = self._drafted[page] = 0
        if not by_step:
            self.reports.update(*self.host.cancel(pages))
        return pages

    def evict_ahead(self, count: int) -> None:
        """Evicts cached pages until `count` pages are free without a key, so that their copies precede their use by a step."""
        while len(self._free) < count and self._num_cached:
            self._evict()

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to held or cached pages, in chain order."""
        for page in pages:
            if not self._refs[page]:
                assert self._published[page], f"page {page} is free and cannot be shared"
                self._num_cached -= 1
                self._idle[page] = 0
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes one holder from each page, the last page first."""
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} is released once too often"
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free_or_cache(page)

    def has_slot(self, pages: RequestPages, position: int) -> bool:
        """Returns whether a request has a slot for the token at `position`."""
        num_pages = len(pages.ids) if self.parts is None else pages.part_end
        return position < num_pages * self.page_size

    def add_slot(self, pages: RequestPages, position: int) -> bool:
        """Adds the page of the token at `position`, or its part. Returns false if none is free."""
        if position >= len(pages.ids) * self.page_size:
            page = self.allocate(1)
            if page is None:
                return False
            pages.ids += page
        end = position // self.page_size + 1
        return self.parts is None or self.parts.extend(pages, end) >= end

    def truncate(self, pages: RequestPages, count: int) -> None:
        """Releases the pages of a request after the first `count`."""
        if self.parts is not None:
            self.parts.truncate(pages, count)
        self.release(pages.ids[count:])
        del pages.ids[count:]

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest found prefix of `keys`, written or not."""
        find, pages = self._page_of.get, []
        for key in keys:
            page = find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, key: bytes) -> int | None:
        """Returns the page with this key, written or not."""
        return self._page_of.get(key)

    def is_published(self, page: int) -> bool:
        """Returns whether a key finds this page."""
        return bool(self._published[page])

    def num_unheld(self, pages: Iterable[int]) -> int:
        """Returns how many matched pages count as free."""
        refs = self._refs
        return sum(not refs[page] for page in pages)

    def reuse(self, pages: Sequence[int], num_keys: int, num_null: int = 0) -> None:
        """Holds matched pages, and counts hits and misses of `num_keys`. `num_null`: hits before them that need no page."""
        num_unheld = self.num_unheld(pages)
        self.share(pages)
        self.record_hits(pages, num_keys, num_null, num_unheld)

    def record_hits(self, pages: Sequence[int], num_keys: int, num_null: int, num_unheld: int) -> None:
        """Counts pages that a request found, of which `num_unheld` had no holder before it."""
        counters, num_hits = self.counters, num_null + len(pages)
        counters.hits += num_hits
        counters.misses += num_keys - num_hits
        counters.reused += num_unheld
        for page in pages:
            self._policy.on_hit(page)

    def publish(self, page: int, key: bytes, parent: int | None, tokens: Sequence[int] = (), before: bytes | None = None) -> bool:
        """Lets `key` find this held page, unless a page in use has the key or `parent`, the page before it, has no key.

        `before`: key of a page before it that may be evicted first, instead of `parent`.
        """
        assert self._refs[page] > 0 and not self._published[page], f"page {page} is free or published already"
        if parent is not None and not self._published[parent]:
            return False
        other = self._page_of.get(key)
        if other is not None:
            if not self._idle[other]:
                return False
            if self.parts is not None:
                self.parts.save(other)
            self._free_idle(other)
        self._page_of[key] = page
        self._keys[page] = key
        self._published[page] = 1
        self._published_s[page] = self.now_s
        self._parents[page] = parent
        if parent is not None:
            self._num_children[parent] += 1
        chained = parent if before is None else before
        if tokens and chained is not None:
            self._partial_pages.add(page, chained, tokens)
        self.counters.published += 1
        self.reports.update(key)
        self._policy.on_insert(page, int.from_bytes(key[:8], "little"))
        return True

    def mark_written(self, page: int, slots: int) -> None:
        """Records that the plans so far write the first `slots` slots; parents first."""
        if slots > self._written[page]:
            parent = self._parents[page]
            assert parent is None or self._written[parent] == self.page_size, f"page {page} is written before page {parent}"
            self._written[page] = slots
            if slots == self.page_size and self.parts is not None:
                self.part_changed(page)

    def unmark_written(self, page: int, slots: int) -> None:
        """Records that only the first `slots` slots are written, because a plan was taken back."""
        self._written[page] = slots
        self.part_changed(page)

    def written(self, page: int) -> int:
        """Returns how many slots the plans so far write."""
        return self._written[page]

    def mark_drafted(self, page: int, slots: int) -> None:
        """The same for a draft model's KV, which may lag behind."""
        self._drafted[page] = max(slots, self._drafted[page])

    def unmark_drafted(self, page: int) -> None:
        """Records that no slot has the draft model's KV, because a plan was taken back; it is computed again."""
        self._drafted[page] = 0

    def drafted(self, page: int) -> int:
        """Returns how many slots have the draft model's KV after the plans so far."""
        return self._drafted[page]

    def record_copy(self, source: int, target: int, slots: int, is_drafted: bool) -> None:
        """Records a copy of `slots` slots, with or without the draft model's KV."""
        self.counters.copied += 1
        self._drafted[target] = min(slots, self._drafted[source]) if is_drafted else 0

    def match_partial(self, parent: Parent, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Returns a page after `parent` and how many of `tokens` it starts with and has written, at least one."""
        found = self._partial_pages.find(parent, tokens)
        if found is None:
            return None
        page, same = found
        same = min(same, self._written[page])
        return (page, same) if same else None

    def keys(self) -> list[bytes]:
        """Returns all keys that routers count."""
        return list(self.reports.keys)

    def take_changes(self) -> wire.PageChanges:
        """Returns the key changes since the last call, or all keys if the log overflowed."""
        return self.reports.take()

    def check(self, held: list[list[int]]) -> list[str]:
        """Returns the errors, given the pages of every holder."""
        return find_errors(self.state(), held) + self.host.check() + self.host_parts.check()

    def state(self) -> PoolState:
        """Returns the arrays of the pool, for checks; valid until the next change."""
        return PoolState(
            page_size=self.page_size,
            free=self._free,
            refs=self._refs,
            written=self._written,
            keys=self._keys,
            page_of=self._page_of,
            published=self._published,
            parents=self._parents,
            num_children=self._num_children,
            idle=self._idle,
            num_cached=self._num_cached,
        )

    def _free_or_cache(self, page: int) -> None:
        if not self._published[page]:
            self._free_page(page)
        elif self._written[page] < self.page_size:
            self._unpublish(page)
            self._free_page(page)
        else:
            self._num_cached += 1
            self._num_releases += 1
            self._policy.on_release(page, self._num_releases)
            if not self._num_children[page]:
                self._idle[page] = 1
                self._policy.on_idle(page)

    def _free_page(self, page: int) -> None:
        if self.parts is not None:
            self.parts.forget(page)
        self._free.append(page)

    def _evict(self) -> None:
        page = self._policy.victim()
        self.counters.evicted += 1
        self.counters.evicted_page_s += self.now_s - self._published_s[page]
        key = self._keys[page]
        assert key is not None, "a cached page has a key"
        dropped = self.host.store(page, key)
        if self.parts is not None:
            self.parts.save(page)
        self._free_idle(page)
        self.reports.update(dropped)

    def save_part(self, page: int, part: int) -> None:
        """Copies the part of a page with a key to host memory, if there are slots."""
        key = self._keys[page]
        assert key is not None, "a part without a holder belongs to a published page"
        self.reports.update(self.host_parts.store(part, key), key)

    def part_changed(self, page: int) -> None:
        """Reports a page that got or lost its content or its part, if it has a key."""
        self.reports.update(self._keys[page])

    def reserve_slots(self, count: int, *, of_parts: bool = False) -> list[int]:
        """Reserves up to `count` slots of host memory for pages, or parts, from elsewhere."""
        slots, dropped = (self.host_parts if of_parts else self.host).reserve(count)
        self.reports.update(*dropped)
        return slots

    def fill_slots(self, slots: Sequence[int], keys: Sequence[bytes], *, of_parts: bool = False) -> None:
        """Ends a reservation: the first slots have the pages, or parts, of `keys`."""
        self.reports.update(*(self.host_parts if of_parts else self.host).fill(slots, keys))

    def resize_host(self) -> tuple[HostResize | None, HostResize | None]:
        """Returns the next step to another size of the host tier, for a plan that has all copies so far: of pages, of parts."""
        (resize, dropped), (part_resize, dropped_parts) = self.host.resize(), self.host_parts.resize()
        self.reports.update(*dropped, *dropped_parts)
        return resize, part_resize

    def _is_cached(self, key: bytes) -> bool:
        page, parts = self._page_of.get(key), self.parts
        if page is None:
            return key in self.host and (parts is None or key in self.host_parts)
        if parts is None or parts.written(page) == self.page_size:
            return True
        return self._written[page] == self.page_size and parts.part_of(page) == NO_PART and key in self.host_parts

    def _free_idle(self, page: int) -> None:
        parent = self._parents[page]
        self._idle[page] = 0
        self._num_cached -= 1
        self._unpublish(page)
        self._free_page(page)
        if parent is not None and not self._num_children[parent] and not self._refs[parent]:
            self._idle[parent] = 1
            self._policy.on_idle(parent)

    def _unpublish(self, page: int) -> None:
        key, parent = self._keys[page], self._parents[page]
        assert key is not None and not self._num_children[page], f"page {page} is removed before the pages that follow it"
        del self._page_of[key]
        self._keys[page] = self._parents[page] = None
        self._published[page] = 0
        if parent is not None:
            self._num_children[parent] -= 1
        self._partial_pages.remove(page)
        self._policy.on_remove(page)
        self.reports.update(key)
