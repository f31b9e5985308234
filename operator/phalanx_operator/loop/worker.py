"""Runs reconciles: sequentially per service, several services in parallel, after a wake and at least every ten minutes."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from phalanx_operator.kube.client import Conflict, Denied, Gone, KubeError, Rejected
from phalanx_operator.kube.store import Key
from phalanx_operator.loop.wakeups import Wakeups, backoff
from phalanx_operator.metrics import Metrics

log = logging.getLogger(__name__)
COALESCE_S = 0.05
"""Changes within this time share one reconcile."""
SPACE_S = 0.25
"""Shortest interval between reconciles of a service: the pods of a group get nodes and start one by one."""
LOOK_TIMEOUT_S = 180.0
"""Longest reconcile; a longer one is cancelled and retried."""


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
        self._wakeups = Wakeups()
        self._changed = asyncio.Event()
        self._waits_until = float("inf")
        self._failures: dict[Key, int] = {}
        self._began: dict[Key, float] = {}
        metrics.queue_keys.set_function(lambda: self._wakeups.num_due(self._clock()))

    def wake(self, key: Key, after_s: float = COALESCE_S) -> None:
        """Schedules a reconcile of this service; after 0 s without the shortest interval.

        Objects without a service label are ignored.
        """
        if key[1]:
            at = self._clock() + after_s
            at = max(at, self._began.get(key, float("-inf")) + SPACE_S) if after_s else at
            self._wakeups.wake(key, at)
            if at < self._waits_until:
                self._changed.set()

    async def work(self, workers: int) -> None:
        """Runs forever with up to `workers` reconciles in parallel."""
        free = asyncio.Semaphore(workers)
        async with asyncio.TaskGroup() as looks:
            while True:
                await free.acquire()
                looks.create_task(self._work(await self._next(), free))

    async def _next(self) -> Key:
        """Returns the next due key."""
        while (key := self._wakeups.take(self._clock())) is None:
            await self._wait()
        return key

    async def _work(self, key: Key, free: asyncio.Semaphore) -> None:
        try:
            await self.look(key)
        finally:
            self._wakeups.done(key)
            self._changed.set()
            free.release()

    async def _wait(self) -> None:
        """Waits until a key may be due."""
        self._changed.clear()
        due = self._wakeups.next_due()
        self._waits_until = float("inf") if due is None else due
        try:
            async with asyncio.timeout(None if due is None else max(due - self._clock(), 0.001)):
                await self._changed.wait()
        except TimeoutError:
            pass  # due now

    async def look(self, key: Key) -> None:
        """Reconciles one service once and schedules the next reconcile."""
        began = self._began[key] = self._clock()
        name = "/".join(key)
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                next_s = await self._reconcile(key)
            self._failures.pop(key, None)
            if next_s is None:
                del self._began[key]
            else:
                self.wake(key, next_s * (0.9 + 0.2 * self._draw()))
        except (Conflict, Gone) as error:
            self._again(key, error, logging.DEBUG, name)
        except (Rejected, Denied) as error:
            self._again(key, error, logging.ERROR, name)
        except (KubeError, TimeoutError) as error:
            self._again(key, error, logging.WARNING, name)
        except Exception as error:  # a bug in one service's reconcile must not end the others'
            self._again(key, error, logging.CRITICAL, name)
        self._metrics.reconcile_seconds.observe(self._clock() - began)

    def _again(self, key: Key, error: Exception, level: int, name: str) -> None:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait_s = backoff(failures, self._draw)
        self._metrics.errors.labels(type(error).__name__).inc()
        fields = {"service": name, "why": str(error) or type(error).__name__, "again_s": round(wait_s, 1)}
        log.log(level, "reconcile failed", extra=fields, exc_info=error if level == logging.CRITICAL else None)
        self.wake(key, wait_s)
