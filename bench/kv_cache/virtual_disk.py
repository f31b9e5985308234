"""A disk in virtual time: one thread writes and reads pages in sequence and keeps the least recently used ones out.

As in `rank.tiers.disk_pages`, a page that is stored while too many wait is not written, and a read comes before the writes that
have not started. Segments and compaction are not
modelled (`bench.kv_cache.disk` measures what they cost).
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx_runtime.core.kv.disk_tier import DiskTier, FetchOrder, Waiter
from phalanx_runtime.rank.tiers.disk_pages import max_queued_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTimes:
    """Seconds per page. `page_bytes`: for the bound of pages that wait."""

    read_page_s: float
    write_page_s: float
    page_bytes: int


def at_rates(page_bytes: int, read: float, write: float) -> DiskTimes:
    """Returns the times at rates in bytes/s."""
    return DiskTimes(read_page_s=page_bytes / read, write_page_s=page_bytes / write, page_bytes=page_bytes)


@dataclass(frozen=True, slots=True)
class _Job:
    end_s: float
    started_s: float
    key: bytes | None
    """Of a written page."""
    order: FetchOrder | None


class VirtualDisk:
    """The pages of one rank."""

    def __init__(self, times: DiskTimes, max_pages: int) -> None:
        self.keys: OrderedDict[bytes, None] = OrderedDict()
        """Least recently used first."""
        self.num_unqueued = 0
        self._times, self._max_pages = times, max_pages
        self._max_queued = max_queued_pages(times.page_bytes)
        self._jobs: deque[_Job] = deque()

    @property
    def next_s(self) -> float | None:
        """Time of the end of the next job."""
        return self._jobs[0].end_s if self._jobs else None

    def restart(self) -> None:
        """Forgets what waits, as the end of the process does."""
        self._jobs.clear()

    def put(self, keys: Iterable[bytes], now: float, page_s: float) -> None:
        """Writes pages later. The copies to host memory, of `page_s` each, come before."""
        ends = deque(job.end_s for job in self._jobs if job.key is not None)
        for number, key in enumerate(keys):
            stored_s = now + (number + 1) * page_s
            while ends and ends[0] <= stored_s:
                ends.popleft()
            if len(ends) >= self._max_queued:
                self.num_unqueued += 1
                continue
            self._add(self._times.write_page_s, stored_s, key=key)
            ends.append(self._jobs[-1].end_s)

    def read(self, order: FetchOrder, now: float) -> None:
        """Reads the pages of an order later, before the writes that have not started."""
        jobs, seconds = list(self._jobs), self._times.read_page_s * len(order.keys)
        num_before = next((i for i, job in enumerate(jobs) if job.order is None and job.started_s > now), len(jobs))
        self._jobs = deque(jobs[:num_before])
        self._add(seconds, now, order=order)
        for job in jobs[num_before:]:
            started_s = max(job.started_s, self._jobs[-1].end_s)
            self._jobs.append(replace(job, started_s=started_s, end_s=started_s + job.end_s - job.started_s))

    def run(self, tier: DiskTier, now: float) -> list[int]:
        """Reports the jobs that ended by `now` to the tier. Returns the requests that wait no longer."""
        ready: list[Waiter] = []
        while self._jobs and self._jobs[0].end_s <= now:
            job = self._jobs.popleft()
            if job.key is not None:
                tier.changed(0, [job.key], self._insert(job.key))
            if job.order is not None:
                ready += tier.fetched(0, job.order.number, self._touch(job.order.keys), job.end_s)
        return [waiter for waiter in ready + tier.tick(now) if isinstance(waiter, int)]

    def _add(self, seconds: float, now: float, key: bytes | None = None, order: FetchOrder | None = None) -> None:
        started = max(now, self._jobs[-1].end_s) if self._jobs else now
        self._jobs.append(_Job(started + seconds, started, key, order))

    def _insert(self, key: bytes) -> list[bytes]:
        """Returns the keys that it drops."""
        self.keys[key] = None
        self.keys.move_to_end(key)
        return [self.keys.popitem(last=False)[0] for _ in range(len(self.keys) - self._max_pages)]

    def _touch(self, keys: list[bytes]) -> int:
        """Returns how many of the keys the disk still has, from the first on."""
        found = next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))
        for key in reversed(keys[:found]):
            self.keys.move_to_end(key)
        return found
