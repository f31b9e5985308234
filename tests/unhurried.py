"""An event loop with a clock that excludes stalls of the process."""

import asyncio
import selectors

MAX_BUSY_S = 0.05
"""Longest time between two readings of the clock that counts, in addition to planned sleep."""


class UnhurriedLoop(asyncio.SelectorEventLoop):
    """A loop with a clock that pauses while the process is stalled: a slow machine causes no heartbeat timeout.

    Blocking the loop ages nothing either; time passes in `asyncio.sleep`.
    """

    def __init__(self) -> None:
        self._last_time = self._stalled_s = 0.0
        self._allowed_s = float("inf")
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Returns `time.monotonic` without the stalls, in seconds."""
        now = super().time()
        self._stalled_s += max(0.0, now - self._last_time - self._allowed_s)
        self._last_time, self._allowed_s = now, MAX_BUSY_S
        return now - self._stalled_s

    def will_sleep(self, timeout: float | None) -> None:
        """Allows this time to pass until the next reading of the clock; any time if it is `None`."""
        self.time()
        self._allowed_s = float("inf") if timeout is None else max(timeout, 0.0) + MAX_BUSY_S


class _Selector(selectors.DefaultSelector):
    """Reports the planned sleep to the loop."""

    def __init__(self, loop: UnhurriedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Selects as the system's selector does."""
        self._loop.will_sleep(timeout)
        return super().select(timeout)
