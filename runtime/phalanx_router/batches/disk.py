"""Threads of the Batch API: a disk that does not answer holds these, and none of those that tokenize prompts."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from phalanx_frontend.errors import ApiError

NUM_THREADS = 8
ANSWER_S = 20.0
"""Within this a disk answers a client."""
RETRY_S = 30.0
T = TypeVar("T")


class DiskThreads:
    """Runs calls that use the disk in a few threads."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        """answer_s: after this a client gets a 503."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, "batches")
        self._answer_s = answer_s
        self._late: set[Future[Any]] = set()
        """Calls that run although their clients got a 503 or left."""

    async def answer(self, work: Callable[..., T], *arguments: Any, pieces: int = 1) -> T:
        """Returns the result of a call for a client. Raises ApiError 503 if the disk does not answer in time.

        pieces: of the call, each with as much time.
        """
        if len(self._late) >= NUM_THREADS:  # further calls would queue without bound
            raise _silent()
        call = self._pool.submit(work, *arguments)
        future = asyncio.wrap_future(call)
        try:
            await asyncio.wait({future}, timeout=self._answer_s * pieces)
            if future.done():
                return future.result()
            raise _silent()
        finally:
            if not call.done() and not call.cancel():  # it runs
                self._late.add(call)
                call.add_done_callback(self._late.discard)

    async def finish(self, work: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of a call. A cancellation waits for its end: it may write what a next runner reads."""
        call = self._pool.submit(work, *arguments)
        future = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not call.cancel():
                await asyncio.wait({future})
            raise

    def start(self, work: Callable[[], object]) -> None:
        """Starts a call that nothing waits for."""
        self._pool.submit(work)


def _silent() -> ApiError:
    message = "the disk of the Batch API's files does not answer"
    return ApiError(503, message, code="storage_silent", retry_after_s=RETRY_S)
