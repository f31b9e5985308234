"""Pages on disk: the third tier of the prefix cache, below host memory.

Each page that is stored in host memory is also written to disk, by each rank its own part. A new request may fetch the pages that
neither device nor host memory has: the ranks read them into slots of host memory while it is held, and once all ranks have
them, it starts and loads them like other pages there. The keys are those of rank 0's disk. A rank that lacks a page, or finds it
damaged, reports fewer pages, and the request computes the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from phalanx_api.cost import StepModel
from phalanx_runtime.core.kv.host_tier import LOAD_SMOOTHING, pays_to_load
from phalanx_runtime.core.kv.page_pool import PagePool

MAX_WAIT_S = 10.0
"""A request that waits longer for its pages computes them."""


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Pages that all ranks read from disk, in chain order."""

    number: int
    keys: list[bytes]
    slots: list[int]
    why: str


@dataclass(slots=True)
class _Fetch:
    order: FetchOrder
    deadline_s: float
    handles: list[int]
    counts: dict[int, int] = field(default_factory=dict)
    """Pages that each rank has read."""


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """Pages since the start."""

    fetched: int = 0
    failed: int = 0
    """Requested, and not read by all ranks."""
    declined: int = 0
    """Found, but faster to compute than to read."""
    compacted_bytes: int = 0
    """Written by compaction, over all ranks."""
    reclaimed_bytes: int = 0
    """Of removed segments, over all ranks."""


class DiskTier:
    """The disks of all ranks. Deterministic: times are arguments."""

    def __init__(self, pool: PagePool, pages_before: int | None = None) -> None:
        """pages_before: pages of a prefix that requests read, the last ones, if every layer has a window."""
        self.keys: set[bytes] = set()
        self.counters = DiskCounters()
        self.page_s: float | None = None
        """Measured seconds to read a page."""
        self._pool = pool
        self._pages_before = pages_before
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_of: dict[int, int] = {}
        self._number = 0

    @property
    def deadline(self) -> float | None:
        """Time of the next `tick`, if a request waits."""
        return min((fetch.deadline_s for fetch in self._fetches.values() if fetch.handles), default=None)

    def is_waiting(self, handle: int) -> bool:
        """Returns whether a request waits for its pages."""
        return handle in self._fetch_of

    def start(
        self, handle: int, missing: Iterable[bytes], num_found: int, *, model: StepModel | None, now: float
    ) -> FetchOrder | None:
        """Returns the pages to read for a held request, if that is faster than computing them; then it waits.

        missing: keys of its full pages after the first `num_found`, which are in memory. It also waits, without an order, if its
        first page is being read for another request.
        """
        on_disk = list(takewhile(self.keys.__contains__, missing))
        keys = on_disk if self._pages_before is None else on_disk[-self._pages_before :]
        if not keys:
            return None
        for fetch in self._fetches.values():
            if keys[0] in fetch.order.keys:
                self._wait(handle, fetch)
                return None
        size = self._pool.page_size
        load_s = None if self.page_s is None else self.page_s * len(keys)
        if not pays_to_load(len(on_disk) * size, num_found * size, model, load_s):
            self.counters.declined += len(keys)
            return None
        slots = self._pool.reserve_slots(len(keys))
        if len(slots) < len(keys) < len(on_disk):  # a part of a window is of no use
            self._pool.fill_slots(slots, [])
            return None
        if not slots:
            return None
        self._number += 1
        order = FetchOrder(self._number, keys[: len(slots)], slots, f"{len(slots)} pages after {num_found} are on disk")
        fetch = self._fetches[order.number] = _Fetch(order, now + MAX_WAIT_S, [])
        self._wait(handle, fetch)
        return order

    def fetched(self, rank: int, number: int, count: int, wall_s: float, num_ranks: int) -> list[int]:
        """Records what one of `num_ranks` ranks read. Returns the requests that wait no longer, once all ranks have reported."""
        fetch = self._fetches.get(number)
        if fetch is None:
            return []
        fetch.counts[rank] = count
        keys = fetch.order.keys
        if rank == 0 and count:
            page_s = wall_s / count
            self.page_s = page_s if self.page_s is None else self.page_s + LOAD_SMOOTHING * (page_s - self.page_s)
        if len(fetch.counts) < num_ranks:
            return []
        num_read = min(fetch.counts.values())
        self.counters.fetched += num_read
        self.counters.failed += len(keys) - num_read
        self.keys.difference_update(keys[num_read : num_read + 1])
        self._pool.fill_slots(fetch.order.slots, keys[:num_read])
        del self._fetches[number]
        return self._end_wait(fetch)

    def changed(self, rank: int, added: Iterable[bytes], dropped: Iterable[bytes]) -> None:
        """Records changed keys of a rank."""
        if rank == 0:
            self.keys.update(added)
        self.keys.difference_update(dropped)

    def compacted(self, compacted_bytes: int, reclaimed_bytes: int) -> None:
        """Records what a rank wrote in compaction, and the bytes of segments that it removed."""
        self.counters.compacted_bytes += compacted_bytes
        self.counters.reclaimed_bytes += reclaimed_bytes

    def tick(self, now: float) -> list[int]:
        """Returns the requests that have waited too long; their pages may still arrive for others."""
        late = [fetch for fetch in self._fetches.values() if fetch.deadline_s <= now]
        return [handle for fetch in late for handle in self._end_wait(fetch)]

    def request_left(self, handle: int) -> None:
        """Forgets a request."""
        number = self._fetch_of.pop(handle, None)
        if number is not None:
            self._fetches[number].handles.remove(handle)

    def _wait(self, handle: int, fetch: _Fetch) -> None:
        fetch.handles.append(handle)
        self._fetch_of[handle] = fetch.order.number

    def _end_wait(self, fetch: _Fetch) -> list[int]:
        handles, fetch.handles = fetch.handles, []
        for handle in handles:
            del self._fetch_of[handle]
        return handles
