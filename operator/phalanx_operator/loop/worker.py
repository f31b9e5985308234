"""Keyed queue, and workers that run its reconciles: sequentially per service, after a wake and at least every ten minutes."""

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable

from phalanx_operator.kube.client import Conflict, Denied, Gone, KubeError, Rejected
from phalanx_operator.kube.store import Key
from phalanx_operator.metrics import Metrics

log = logging.getLogger(__name__)
COALESCE_S = 0.05
"""Changes within this time share one reconcile."""
MIN_INTERVAL_S = 0.25
"""Least time between reconciles of a service."""
RECONCILE_TIMEOUT_S = 180.0
"""A longer reconcile is cancelled and retried."""


class Wakeups:
    """The keyed queue. All times are arguments."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()

    def __len__(self) -> int:
        return len(self._due)

    def num_due(self, now: float) -> int:
        """Returns the number of due keys."""
        return sum(at <= now for at in self._due.values())

    def wake(self, key: Key, at: float) -> None:
        """Makes the key due at `at`, unless it is due earlier."""
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))

    def take(self, now: float) -> Key | None:
        """Returns a due key, if any, for a worker that calls `done`."""
        later: list[tuple[float, Key]] = []
        taken = None
        while self._heap and self._heap[0][0] <= now and taken is None:
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue
            if key in self._busy:
                later.append((at, key))
                continue
            taken = key
            del self._due[key]
            self._busy.add(key)
        for entry in later:
            heapq.heappush(self._heap, entry)
        return taken

    def done(self, key: Key) -> None:
        """Releases the key. A wake while it was busy is kept."""
        self._busy.discard(key)

    def next_due(self) -> float | None:
        """Returns when the next key that is not busy is due."""
        busy: list[tuple[float, Key]] = []
        due = None
        while self._heap and due is None:
            at, key = self._heap[0]
            if self._due.get(key) == at and key not in self._busy:
                due = at
            else:
                heapq.heappop(self._heap)
                if self._due.get(key) == at:
                    busy.append((at, key))
        for entry in busy:
            heapq.heappush(self._heap, entry)
        return due


def backoff(failures: int, draw: Callable[[], float]) -> float:
    """Returns the wait after consecutive failures: 0.5 s doubling to 60 s, half random."""
    longest: float = min(60.0, 0.5 * 2.0 ** min(failures, 10))
    return longest * (0.5 + 0.5 * draw())


class Loop:
    """The work queue and its workers."""

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[float | None]],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._reconcile = reconcile
        self._metrics = metrics
        self._clock = clock
        self._draw = draw
        self.wakeups = Wakeups()
        """Due keys."""
        self._changed = asyncio.Event()
        self._waits_until = float("inf")
        self._failures: dict[Key, int] = {}
        self._started_s: dict[Key, float] = {}
        metrics.queue_keys.set_function(lambda: self.wakeups.num_due(self._clock()))

    def wake(self, key: Key, after_s: float = COALESCE_S) -> None:
        """Schedules a reconcile; with `after_s=0` without `MIN_INTERVAL_S`."""
        if key[1]:
            at = self._clock() + after_s
            at = max(at, self._started_s.get(key, float("-inf")) + MIN_INTERVAL_S) if after_s else at
            self.wakeups.wake(key, at)
            if at < self._waits_until:
                self._changed.set()

    async def work(self, workers: int) -> None:
        """Runs forever."""
        free = asyncio.Semaphore(workers)
        async with asyncio.TaskGroup() as reconciles:
            while True:
                await free.acquire()
                reconciles.create_task(self._work(await self._next(), free))

    async def _next(self) -> Key:
        while (key := self.wakeups.take(self._clock())) is None:
            await self._wait()
        return key

    async def _work(self, key: Key, free: asyncio.Semaphore) -> None:
        try:
            await self.run_once(key)
        finally:
            self.wakeups.done(key)
            self._changed.set()
            free.release()

    async def _wait(self) -> None:
        self._changed.clear()
        due = self.wakeups.next_due()
        self._waits_until = float("inf") if due is None else due
        try:
            async with asyncio.timeout(None if due is None else max(due - self._clock(), 0.001)):
                await self._changed.wait()
        except TimeoutError:
            pass  # due now

    async def run_once(self, key: Key) -> None:
        """Reconciles a service and schedules the next reconcile."""
        started_s = self._started_s[key] = self._clock()
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_S):
                next_s = await self._reconcile(key)
            self._failures.pop(key, None)
            if next_s is None:
                del self._started_s[key]
            else:
                self.wake(key, next_s * (0.9 + 0.2 * self._draw()))
        except (Conflict, Gone) as error:
            self._retry(key, error, logging.DEBUG)
        except (Rejected, Denied) as error:
            self._retry(key, error, logging.ERROR)
        except (KubeError, TimeoutError) as error:
            self._retry(key, error, logging.WARNING)
        except Exception as error:  # a bug must not end other services' reconciles
            self._retry(key, error, logging.CRITICAL)
        self._metrics.reconcile_seconds.observe(self._clock() - started_s)

    def _retry(self, key: Key, error: Exception, level: int) -> None:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait_s = backoff(failures, self._draw)
        self._metrics.errors.labels(type(error).__name__).inc()
        fields = {"service": "/".join(key), "why": str(error) or type(error).__name__, "again_s": round(wait_s, 1)}
        log.log(level, "reconcile failed", extra=fields, exc_info=error if level == logging.CRITICAL else None)
        self.wake(key, wait_s)
