"""An event loop whose clock does not count the time that the machine took away."""

import asyncio
import selectors

UNASKED_S = 0.05
"""What may pass between two looks at the clock, beside the time that the loop meant to sleep."""


class UnhurriedLoop(asyncio.SelectorEventLoop):
    """A loop that stands still while its process does: a stalled machine makes no peer silent that told all it could.

    A test that blocks the loop for long does not age anything either: what has to grow old needs `asyncio.sleep`.
    """

    def __init__(self) -> None:
        self._seen = self._lost = 0.0
        self._allowed = float("inf")
        super().__init__(_Sleeper(self))

    def time(self) -> float:
        """Seconds, as `time.monotonic` less the stalls."""
        now = super().time()
        self._lost += max(0.0, now - self._seen - self._allowed)
        self._seen, self._allowed = now, UNASKED_S
        return now - self._lost

    def will_sleep(self, timeout: float | None) -> None:
        """Lets this much time pass until the next look at the clock, without an end if it is None."""
        self.time()
        self._allowed = float("inf") if timeout is None else max(timeout, 0.0) + UNASKED_S


class _Sleeper(selectors.DefaultSelector):
    """Tells the loop for how long it is about to sleep."""

    def __init__(self, loop: UnhurriedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the selector of the system."""
        self._loop.will_sleep(timeout)
        return super().select(timeout)
