"""An event loop whose time jumps to the next timer: a wait of seconds takes microseconds, and equal seeds give equal runs."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(Exception):
    """Everything waits and no timer is set: something would hang for ever."""


class _Jump(selectors.SelectSelector):
    """Never waits: moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing is ever ready to be read."""
        if timeout is None:
            raise Stuck("everything waits and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jump.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """What the coroutine gives. Raises Stuck when nothing can happen any more; tasks that are left are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
