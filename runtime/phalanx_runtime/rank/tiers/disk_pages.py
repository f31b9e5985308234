"""The disk tier of a rank: a thread that writes stored pages to the log, reads fetched ones, and compacts.

Requests wait for reads, not for writes, so a read comes before all pages that wait to be written: it names only pages that the
log has.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx_runtime.core.migration.page_orders import DiskChanged, DiskReport, FetchPages, PagesFetched
from phalanx_runtime.rank.tiers.page_log import PageLog

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 128 << 20
"""Of pages that wait to be written; further ones are not written: the disk is slower than evictions."""
MIN_QUEUED_PAGES = 16
MAX_REPORTED_KEYS = 10_000
"""Of one report: a frame between ranks has a bound."""
IDLE_S = 1.0
"""A log that has nothing to compact, or no budget, is tried again after this time, or after the next page."""
PAUSE_S = 0.01
"""Between two pieces of compaction, each of which ends before the next page is written or read."""


def max_queued_pages(page_bytes: int, least: int = MIN_QUEUED_PAGES) -> int:
    """Returns how many pages may wait to be written. A step may store the pages of all its tokens at once."""
    return max(least, MAX_QUEUED_BYTES // page_bytes)


@dataclass(frozen=True, slots=True)
class _Put:
    key: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class _DiskRead:
    order: FetchPages
    wait_for: Callable[[int], None]
    write: Callable[[int, memoryview], None]
    report: Callable[[DiskReport], None]


class DiskPages:
    """The log of one rank, owned by one thread."""

    def __init__(self, pages: PageLog, *, of_parts: bool = False, min_queued: int = MIN_QUEUED_PAGES) -> None:
        """of_parts: it has the parts of pages, or snapshots of states. min_queued: see `max_queued_pages`."""
        self.num_unqueued = 0
        """Pages that were not written because the disk is too slow. Counted by the thread that calls `put`."""
        self._log = pages
        self._of_parts = of_parts
        self._reads: deque[_DiskRead] = deque()
        self._puts: deque[_Put] = deque()
        self._has_jobs = threading.Condition()
        self._max_queued = max_queued_pages(pages.page_bytes, min_queued)
        self._reported = 0, 0, 0
        self._report: Callable[[DiskReport], None] | None = None
        self._started = threading.Event()
        threading.Thread(target=self._run, name="disk-pages", daemon=True).start()

    def start(self, report: Callable[[DiskReport], None]) -> None:
        """Reports all keys before it returns, also that there are no keys, and from now on each change. `report`: thread-safe."""
        self._report = report
        keys = self._log.keys()
        if keys:
            self._changed(keys, [])
        else:
            report(DiskChanged([], [], is_part=self._of_parts))
        self._started.set()

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Writes a page later, from a copy of `parts`, unless too many pages wait."""
        if len(self._puts) >= self._max_queued:
            self.num_unqueued += 1
            return
        job = _Put(key, b"".join(parts))
        with self._has_jobs:
            self._puts.append(job)
            self._has_jobs.notify()

    def fetch(
        self,
        order: FetchPages,
        wait_for: Callable[[int], None],
        write: Callable[[int, memoryview], None],
        report: Callable[[DiskReport], None],
    ) -> None:
        """Reads pages later and gives each to `write` with its slot, once `wait_for` returns for the order's step."""
        with self._has_jobs:
            self._reads.append(_DiskRead(order, wait_for, write, report))
            self._has_jobs.notify()

    def _run(self) -> None:
        self._started.wait()
        wait_s = IDLE_S
        while True:
            job = self._next_job(wait_s)
            try:
                if job is not None:
                    self._execute(job)
                wait_s = PAUSE_S if self._compact() else IDLE_S
            except Exception:  # a defect costs these pages; requests must not wait for them
                log.exception("the disk tier failed")
                if isinstance(job, _DiskRead):
                    job.report(PagesFetched(job.order.number, 0, self._of_parts))

    def _next_job(self, timeout_s: float) -> _Put | _DiskRead | None:
        """Returns the first read, else the first page to be written, else None after the timeout."""
        with self._has_jobs:
            self._has_jobs.wait_for(lambda: self._reads or self._puts, timeout_s)
            if self._reads:
                return self._reads.popleft()
            return self._puts.popleft() if self._puts else None

    def _compact(self) -> bool:
        """Compacts a piece, unless a job waits. Returns whether another one may follow at once."""
        if self._reads or self._puts:
            return False
        before = self._log.counters.compacted_bytes
        self._changed([], self._log.compact(time.monotonic()))
        return self._log.counters.compacted_bytes > before

    def _execute(self, job: _Put | _DiskRead) -> None:
        match job:
            case _Put():
                self._put(job)
            case _DiskRead():
                self._fetch(job)

    def _put(self, job: _Put) -> None:
        dropped = self._log.put(job.key, [memoryview(job.content)])
        # Also a key that this rank had: rank 0 forgets one that another rank lost, until it is stored again.
        self._changed([job.key] if job.key in self._log else [], dropped)

    def _fetch(self, job: _DiskRead) -> None:
        """Reads the last page first: of a chain, the first page is used last, so that it is dropped last."""
        job.wait_for(job.order.step)
        page = memoryview(bytearray(self._log.page_bytes))
        count = len(job.order.keys)
        for place in reversed(range(len(job.order.keys))):
            if self._log.get(job.order.keys[place], page):
                job.write(job.order.slots[place], page)
            else:
                count = place
        job.report(PagesFetched(job.order.number, count, self._of_parts))
        lost = [key for key in job.order.keys if key not in self._log]
        self._changed([], lost)

    def _changed(self, added: list[bytes], dropped: list[bytes]) -> None:
        assert self._report is not None, "the thread waits for `start`"
        compacted, reclaimed, unwritten = self._take_counts()
        num_keys = max(len(added), len(dropped))
        for first in range(0, max(num_keys, (compacted, reclaimed, unwritten) > (0, 0, 0)), MAX_REPORTED_KEYS):
            end = first + MAX_REPORTED_KEYS
            changed = DiskChanged(
                added[first:end],
                dropped[first:end],
                compacted_bytes=compacted,
                reclaimed_bytes=reclaimed,
                is_part=self._of_parts,
                unwritten=unwritten,
                has_more=end < num_keys,
            )
            self._report(changed)
            compacted = reclaimed = unwritten = 0

    def _take_counts(self) -> tuple[int, int, int]:
        """Returns the bytes that compaction wrote, those of removed segments, and unwritten pages, since the last call."""
        former, counters = self._reported, self._log.counters
        self._reported = counters.compacted_bytes, counters.reclaimed_bytes, counters.unwritten + self.num_unqueued
        compacted, reclaimed, unwritten = (now - before for now, before in zip(self._reported, former, strict=True))
        return compacted, reclaimed, unwritten
