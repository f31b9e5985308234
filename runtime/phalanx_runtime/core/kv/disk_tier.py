"""Pages on disk: the third tier of the prefix cache, below host memory.

Each page that is stored in host memory is also written to disk, by each rank its own share. A new request may fetch the pages
that neither device nor host memory has: the ranks read them into slots of host memory while it is held, and once all ranks have
them, it starts and loads them like other pages there. The keys are those that all ranks have which have reported their disks: the
first requests after a start do not wait for the others. A rank that finds a page damaged, or lacks it, reports fewer pages, and
the request computes the rest.

Parts of pages (`core.window_parts`) have a log of their own. A request fetches pages up to the last one after which it could
start, and of the parts those of the window before it.

If requests have states, their snapshots (`core.kv.snapshots`) take the place of parts: a snapshot is the part of the page that it
follows. A request fetches pages up to the last one with a snapshot, and that snapshot.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Protocol

from phalanx_api.cost import StepModel
from phalanx_api.prefix import longest_hit
from phalanx_runtime.core.copy_fit import ReadQueue
from phalanx_runtime.core.kv.host_loads import pays_to_load
from phalanx_runtime.core.kv.host_tier import HostTier
from phalanx_runtime.core.kv.page_index import RankKeys
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.window_parts import WindowParts

Waiter = int | str
"""A held request by its handle, or a prefix that is to be sent to another group by its move."""
MAX_WAIT_S = 10.0
"""A request that waits longer for its pages computes them."""


class SnapshotTier(Protocol):
    """Snapshots of states in memory, each by the key of the page that it follows."""

    def __contains__(self, key: bytes) -> bool: ...

    def keep(self, key: bytes) -> bool:
        """Returns whether a key has a snapshot, which is then replaced late."""
        ...

    def reserve(self, count: int) -> list[int]:
        """Reserves up to `count` slots of host memory."""
        ...

    def fill(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Ends the reservation of `slots`, of which the first have the snapshots of `keys`."""
        ...


@dataclass(frozen=True, slots=True)
class DiskPrefix:
    """What a held request could read from disk: pages, and parts of its pages, in chain order."""

    start: int
    """Pages after which it starts without the disk."""
    end: int
    """Pages after which it starts with it."""
    keys: list[bytes]
    part_keys: list[bytes]
    needs_all: bool
    """Whether a share of them is of no use."""
    kept_keys: Sequence[bytes] = ()
    """Of pages and parts in host memory that it needs before these."""


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Pages and parts that all ranks read from disk, in chain order."""

    number: int
    keys: list[bytes]
    slots: list[int]
    part_keys: list[bytes]
    part_slots: list[int]
    why: str


@dataclass(slots=True)
class _Fetch:
    order: FetchOrder
    ordered_s: float
    waiters: list[Waiter]
    counts: dict[int, int] = field(default_factory=dict)
    """Pages that each rank has read."""
    part_counts: dict[int, int] = field(default_factory=dict)
    """Parts that each rank has read."""

    @property
    def deadline_s(self) -> float:
        """When its waiters have waited too long."""
        return self.ordered_s + MAX_WAIT_S

    def is_complete(self, num_ranks: int) -> bool:
        """Returns whether each rank has reported what it read."""
        order = self.order
        pages, parts = (num_ranks if keys else 0 for keys in (order.keys, order.part_keys))
        return len(self.counts) == pages and len(self.part_counts) == parts


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """Pages since the start."""

    fetched: int = 0
    fetched_parts: int = 0
    failed: int = 0
    """Pages and parts that were requested, and not read by all ranks."""
    declined: int = 0
    """Found, but faster to compute than to read."""
    compacted_bytes: int = 0
    """Written by compaction, over all ranks."""
    reclaimed_bytes: int = 0
    """Of removed segments, over all ranks."""
    unwritten: int = 0
    """Pages and parts that were not written, over all ranks."""


class DiskTier:
    """The disks of all ranks. Deterministic: times are arguments."""

    def __init__(self, pool: PagePool, pages_before: int | None = None, snapshots: SnapshotTier | None = None) -> None:
        """pages_before: pages of a prefix that requests read, the last ones, if every layer has a window.

        snapshots: of states, if requests have some.
        """
        self.num_ranks = 1
        """Ranks of the group, set before the first report."""
        self._pages_on_disk, self._parts_on_disk = RankKeys(), RankKeys()
        self.keys = self._pages_on_disk.common
        """Pages on the disks of all ranks."""
        self.part_keys = self._parts_on_disk.common
        """Pages whose parts, or snapshots, are there."""
        self.counters = DiskCounters()
        self._reads, self._part_reads = ReadQueue(), ReadQueue()
        self.num_changes = 0
        """Reports of changed keys, of all ranks."""
        self._pool = pool
        self._pages_before, self._snapshots = pages_before, snapshots
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_of: dict[Waiter, int] = {}
        self._number = 0
        pool.reports.is_on_disk = self._has

    @property
    def deadline(self) -> float | None:
        """Time of the next `tick`, if a request waits."""
        return min((fetch.deadline_s for fetch in self._fetches.values() if fetch.waiters), default=None)

    @property
    def page_s(self) -> float | None:
        """Seconds until all ranks have read a page, the mean of measured reads."""
        return self._reads.fit.mean_page_s

    @property
    def part_s(self) -> float | None:
        """The same of a part."""
        return self._part_reads.fit.mean_page_s

    def is_waiting(self, waiter: Waiter) -> bool:
        """Returns whether a request or send waits for its pages."""
        return waiter in self._fetch_of

    def find(self, keys: Sequence[bytes]) -> DiskPrefix:
        """Returns what a request with these full pages could read. Memory keeps for it what it has before that."""
        pool = self._pool
        pages = pool.match(keys)
        num_found = len(pages) + pool.host.keep(keys[len(pages) :])
        if self._snapshots is not None:
            return self._find_with_snapshot(keys, len(pages), num_found, self._snapshots)
        if pool.parts is None:
            return self.find_after(keys, num_found, len(pages))
        return self._find_with_parts(keys, pages, num_found, pool.parts)

    def find_after(self, keys: Sequence[bytes], num_found: int, first: int = 0) -> DiskPrefix:
        """Returns what a request could read of the pages after the first `num_found`, which are in memory.

        It starts from those at `first` and later, so they must stay there.
        """
        on_disk = list(takewhile(self.keys.__contains__, islice(keys, num_found, None)))
        read = on_disk if self._pages_before is None else on_disk[-self._pages_before :]
        is_cut = len(read) < len(on_disk)
        return DiskPrefix(num_found, num_found + len(on_disk), read, [], needs_all=is_cut, kept_keys=keys[first:num_found])

    def num_known(self, keys: Sequence[bytes], num_found: int) -> int:
        """Returns how many leading pages the tiers have, with or without parts, given those that the device has."""
        host = self._pool.host
        return num_found + sum(1 for _ in takewhile(lambda key: key in host or key in self.keys, islice(keys, num_found, None)))

    def start(self, waiter: Waiter, prefix: DiskPrefix, *, model: StepModel | None, now: float) -> FetchOrder | None:
        """Returns the pages to read for a held request or a send, if that is faster than computing them; then it waits.

        It also waits, without an order, if the first page or part is being read for another request.
        """
        keys, part_keys, size = prefix.keys, prefix.part_keys, self._pool.page_size
        if not keys and not part_keys:
            return None
        for fetch in self._fetches.values():
            if not set(keys[:1]).isdisjoint(fetch.order.keys) or not set(part_keys[:1]).isdisjoint(fetch.order.part_keys):
                if now < fetch.deadline_s:
                    self._wait(waiter, fetch)
                return None
        if not pays_to_load((prefix.end - prefix.start) * size, prefix.start * size, model, self._read_s(prefix)):
            self.counters.declined += len(keys)
            for reads in (self._reads, self._part_reads):
                reads.fit = reads.fit.declined()
            return None
        slots, part_slots = self._reserve(prefix)
        is_short = len(slots) < len(keys) or len(part_slots) < len(part_keys)
        if (prefix.needs_all and is_short) or not (slots or part_slots):
            self._fill(slots, part_slots, [], [])
            return None
        self._number += 1
        why = f"{len(slots)} pages and {len(part_slots)} parts after {prefix.start} pages are on disk"
        keys = keys[: len(slots)]
        order = FetchOrder(self._number, keys, slots, part_keys=part_keys, part_slots=part_slots, why=why)
        fetch = self._fetches[order.number] = _Fetch(order, now, [])
        for reads, size in ((self._reads, len(keys)), (self._part_reads, len(part_keys))):
            if size:
                reads.add(order.number, size, now)
        self._wait(waiter, fetch)
        return order

    def fetched(self, rank: int, number: int, count: int, now: float, *, is_part: bool = False) -> list[Waiter]:
        """Records what a rank has read. Returns those that wait no longer, once all ranks have reported."""
        fetch = self._fetches.get(number)
        if fetch is None:
            return []
        counts, reads = (fetch.part_counts, self._part_reads) if is_part else (fetch.counts, self._reads)
        counts[rank] = count
        if len(counts) == self.num_ranks:
            reads.end(number, max(counts.values()), now)
        if not fetch.is_complete(self.num_ranks):
            return []
        order, counters = fetch.order, self.counters
        num_read, num_parts = (min(counts.values(), default=0) for counts in (fetch.counts, fetch.part_counts))
        counters.fetched += num_read
        counters.fetched_parts += num_parts
        counters.failed += len(order.keys) - num_read + len(order.part_keys) - num_parts
        lost, lost_parts = order.keys[num_read:], order.part_keys[num_parts:]  # until all ranks store them again
        self.keys.difference_update(lost)
        self.part_keys.difference_update(lost_parts)
        self._fill(order.slots, order.part_slots, order.keys[:num_read], order.part_keys[:num_parts])
        self._pool.reports.update(*lost, *lost_parts)
        del self._fetches[number]
        return self._end_wait(fetch)

    def changed(
        self, rank: int, added: Collection[bytes], dropped: Collection[bytes], *, is_part: bool = False, has_more: bool = False
    ) -> None:
        """Records changed keys of a rank. has_more: the next report has the rest of the change, which counts when complete."""
        self.num_changes += 1
        on_disk = self._parts_on_disk if is_part else self._pages_on_disk
        self._pool.reports.update(*on_disk.change(rank, added, dropped, has_more=has_more))

    def wrote(self, compacted_bytes: int, reclaimed_bytes: int, unwritten: int) -> None:
        """Records what a rank wrote in compaction, the bytes of segments that it removed, and pages that it did not write."""
        self.counters.compacted_bytes += compacted_bytes
        self.counters.reclaimed_bytes += reclaimed_bytes
        self.counters.unwritten += unwritten

    def tick(self, now: float) -> list[Waiter]:
        """Returns those that have waited too long; their pages may still arrive for others."""
        late = [fetch for fetch in self._fetches.values() if fetch.waiters and fetch.deadline_s <= now]
        if late:
            self._reads.learn_late(now)
            self._part_reads.learn_late(now)
        return [waiter for fetch in late for waiter in self._end_wait(fetch)]

    def leave(self, waiter: Waiter) -> None:
        """Forgets a request or send."""
        number = self._fetch_of.pop(waiter, None)
        if number is not None:
            self._fetches[number].waiters.remove(waiter)

    def _has(self, key: bytes) -> bool:
        """Returns whether memory and disk together have a page, with its part if pages have parts."""
        pool, page = self._pool, self._pool.find(key)
        if page is None and key not in pool.host and key not in self.keys:
            return False
        if pool.parts is None or key in pool.host_parts or key in self.part_keys:
            return True
        return page is not None and pool.parts.written(page) == pool.page_size

    def _find_with_parts(self, keys: Sequence[bytes], pages: list[int], num_found: int, parts: WindowParts) -> DiskPrefix:
        """Returns the longest prefix that fits the slots, of which the first `num_found` pages are in memory."""
        pool, size, window = self._pool, self._pool.page_size, parts.window
        num_slots = max(0, pool.host.num_reservable)
        num_on_disk = sum(1 for _ in takewhile(self.keys.__contains__, islice(keys, num_found, num_found + num_slots)))

        def is_in_memory(index: int) -> bool:
            return (index < len(pages) and parts.written(pages[index]) == size) or keys[index] in pool.host_parts

        start = window.longest_hit(is_in_memory, num_found)
        end = window.longest_hit(lambda i: is_in_memory(i) or keys[i] in self.part_keys, num_found + num_on_disk)
        wanted = range(window.first_page(end * size), end)
        missing = [keys[i] for i in wanted if not is_in_memory(i)]
        if end <= start or len(missing) > pool.host_parts.num_reservable:
            return DiskPrefix(start, start, [], [], needs_all=True)
        for i in wanted:
            pool.host_parts.keep([keys[i]])
        parts.want(pages, end)
        kept = keys[min(len(pages), window.first_page(end * size)) : end]
        return DiskPrefix(start, end, list(keys[num_found:end]), missing, needs_all=True, kept_keys=kept)

    def _find_with_snapshot(self, keys: Sequence[bytes], num_device: int, num_found: int, snapshots: SnapshotTier) -> DiskPrefix:
        """Returns the longest prefix that fits the slots, with a snapshot at its end; `num_found` pages are in memory."""
        num_slots = max(0, self._pool.host.num_reservable)
        num_on_disk = sum(1 for _ in takewhile(self.keys.__contains__, islice(keys, num_found, num_found + num_slots)))
        start = longest_hit(lambda i: keys[i] in snapshots, num_found, 1)
        end = longest_hit(lambda i: keys[i] in snapshots or keys[i] in self.part_keys, num_found + num_on_disk, 1)
        if end <= start:
            return DiskPrefix(start, start, [], [], needs_all=True)
        missing = [] if snapshots.keep(keys[end - 1]) else [keys[end - 1]]
        return DiskPrefix(start, end, list(keys[num_found:end]), missing, needs_all=True, kept_keys=keys[num_device:end])

    def _reserve(self, prefix: DiskPrefix) -> tuple[list[int], list[int]]:
        """Returns slots for pages and parts. What the prefix has in memory keeps its slots.

        Nothing is evicted for a prefix that needs all of them and does not fit, or if what it has fills a tier.
        """
        pool = self._pool
        kept, kept_parts = (_pin_all(tier, prefix.kept_keys) for tier in (pool.host, pool.host_parts))
        slots, part_slots = list[int](), list[int]()
        if kept is not None and kept_parts is not None and self._may_fit(prefix):
            num_parts = len(prefix.part_keys)
            if self._snapshots is not None:
                part_slots = self._snapshots.reserve(num_parts)
            else:
                part_slots = pool.reserve_slots(num_parts, of_parts=True)
            if len(part_slots) == num_parts or not prefix.needs_all:
                slots = pool.reserve_slots(len(prefix.keys))
        for tier, pinned in ((pool.host, kept), (pool.host_parts, kept_parts)):
            tier.unpin(reversed(pinned or ()))  # the first page of a chain is evicted last
        return slots, part_slots

    def _may_fit(self, prefix: DiskPrefix) -> bool:
        """Returns whether there are slots for the pages and parts of a prefix, or a share of them is of use."""
        pool = self._pool
        fits = len(prefix.keys) <= pool.host.num_reservable
        if self._snapshots is None:
            fits = fits and len(prefix.part_keys) <= pool.host_parts.num_reservable
        return fits or not prefix.needs_all

    def _read_s(self, prefix: DiskPrefix) -> float | None:
        """Returns the expected seconds until all ranks have read pages and parts, after the reads before them, if measured."""
        pages_s, parts_s = self._reads.expect(len(prefix.keys)), self._part_reads.expect(len(prefix.part_keys))
        return None if pages_s is None or parts_s is None else pages_s + parts_s

    def _fill(self, slots: list[int], part_slots: list[int], keys: list[bytes], part_keys: list[bytes]) -> None:
        """Ends the reservations: the first slots have the pages and parts of these keys."""
        self._pool.fill_slots(slots, keys)
        if self._snapshots is not None:
            self._snapshots.fill(part_slots, part_keys)
        else:
            self._pool.fill_slots(part_slots, part_keys, of_parts=True)

    def _wait(self, waiter: Waiter, fetch: _Fetch) -> None:
        fetch.waiters.append(waiter)
        self._fetch_of[waiter] = fetch.order.number

    def _end_wait(self, fetch: _Fetch) -> list[Waiter]:
        waiters, fetch.waiters = fetch.waiters, []
        for waiter in waiters:
            del self._fetch_of[waiter]
        return waiters


def _pin_all(tier: HostTier, keys: Iterable[bytes]) -> list[int] | None:
    """Returns the pinned slots of those of `keys` that a tier has; `None`, without a pin, if no slot would be left for others."""
    kept = tier.evictable(keys)
    slots = tier.pin(kept, max_share=1.0)
    if len(slots) == len(kept):
        return slots
    tier.unpin(reversed(slots))
    return None
