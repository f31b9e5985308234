"""An asyncio event loop in virtual time: its clock jumps to the next timer. Equal seeds give equal runs."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(Exception):
    """Every task waits and no timer is set: a deadlock."""


class _ClockSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advances the clock; no file is ever ready."""
        if timeout is None:
            raise Stuck("every task waits and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selector = _ClockSelector()
        super().__init__(self._selector)

    def time(self) -> float:
        return self._selector.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine. Raises Stuck on a deadlock; remaining tasks are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
