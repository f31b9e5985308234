"""Admission of requests of batches, in the order in which they ask."""

import asyncio
from collections import deque
from collections.abc import Callable

TICK_S = 0.25
"""Between two looks at the groups: longer than a load report takes, so that started requests are counted in the next look."""
MAX_IN_FLIGHT = 256
"""Of one router."""


class Slots:
    """Lets requests start while `spare` says so. spare: how many more may start, by the number in flight."""

    def __init__(self, spare: Callable[[int], int], tick_s: float = TICK_S) -> None:
        self._spare = spare
        self._tick_s = tick_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = 0

    async def run(self) -> None:
        """Grants slots until it is cancelled."""
        while True:
            await asyncio.sleep(self._tick_s)
            if self._waiting:
                self._grant(min(self._spare(self.in_flight), MAX_IN_FLIGHT - self.in_flight))

    def _grant(self, count: int) -> None:
        while count > 0 and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                self.in_flight += 1
                count -= 1

    async def acquire(self) -> None:
        """Waits for a slot, which `release` returns."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.in_flight -= 1
            raise

    def release(self) -> None:
        """Returns a slot."""
        self.in_flight -= 1
