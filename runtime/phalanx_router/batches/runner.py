"""Runs the batches of a folder, a few at a time. Another router continues a batch whose runner is lost."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

from phalanx_router.batches.batch_run import BatchRun, RunParts
from phalanx_router.batches.records import FINAL, BatchRecord

log = logging.getLogger(__name__)

SCAN_S = 2.0
"""Between two looks for batches to run, and between two writes of a batch."""
EXPIRE_S = 3600.0
INTERRUPTED_S = 30.0
"""Before a batch continues after an error of its storage."""
MAX_RUNNING = 16
"""Batches that one router runs at once."""


def next_batch(waiting: Iterable[BatchRecord], running: Sequence[str]) -> BatchRecord:
    """Returns the oldest batch of the tenant with the fewest running ones. running: tenants of the running batches."""
    counts = Counter(running)
    return min(waiting, key=lambda batch: (counts[batch.owner.tenant], batch.created_at, batch.id))


class BatchRunner:
    """Runs batches that no other router runs. is_leaving: whether this router shuts down and another one is to run them."""

    def __init__(self, parts: RunParts, is_leaving: Callable[[], bool] = lambda: False) -> None:
        self._parts = parts
        self._is_leaving = is_leaving
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tenants: dict[str, str] = {}
        """Of the running batches."""
        self._final: set[str] = set()

    @property
    def num_running(self) -> int:
        """Batches that this router runs."""
        return len(self._running)

    async def run(self) -> None:
        """Runs batches until the router leaves; their requests are then aborted, and sent again by the next runner."""
        granting = asyncio.create_task(self._parts.slots.run())
        expire_s = 0.0
        try:
            while not self._is_leaving():
                try:
                    if self._parts.now() >= expire_s:
                        expire_s = self._parts.now() + EXPIRE_S
                        await self._parts.disk.finish(self._parts.store.expire, int(self._parts.now()))
                        self._final.clear()
                    await self._start_batches()
                except OSError as error:  # clients get a 500 meanwhile
                    log.error("the files of batches cannot be used", extra={"why": str(error)})
                await asyncio.sleep(self._parts.save_s)
        finally:
            tasks = [granting, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_batches(self) -> None:
        store, disk = self._parts.store, self._parts.disk
        if len(self._running) >= MAX_RUNNING:
            return
        found = await disk.finish(store.unknown, self._final | self._running.keys())
        self._final.update(batch.id for batch in found if batch.status in FINAL)
        waiting = [batch for batch in found if batch.status not in FINAL]
        while waiting and len(self._running) < MAX_RUNNING:
            batch = next_batch(waiting, [*self._tenants.values()])
            waiting.remove(batch)
            if (lock := await disk.finish(store.lock, batch.id)) is not None:  # else another router runs it
                self._tenants[batch.id] = batch.owner.tenant
                self._running[batch.id] = asyncio.create_task(self._run_locked(batch.id, lock))

    async def _run_locked(self, id: str, lock: BinaryIO) -> None:
        try:
            batch = await self._parts.disk.finish(self._parts.store.stored, id)  # another router may have ended it meanwhile
            if batch is not None and batch.status not in FINAL:
                await self._run(BatchRun(self._parts, batch))
            self._final.add(id)
        except* OSError as errors:
            log.error("batch interrupted", extra={"batch": id, "why": str(errors.exceptions[0])})
            await asyncio.sleep(INTERRUPTED_S)
        finally:
            lock.close()
            del self._running[id], self._tenants[id]

    async def _run(self, run: BatchRun) -> None:
        """Runs a batch; a bug ends it. Raises OSError."""
        try:
            await run.run()
        except* OSError:
            raise
        except* Exception as errors:
            log.exception("batch failed")
            await run.fail(f"internal error: {type(errors.exceptions[0]).__name__}; see the log of the router")
