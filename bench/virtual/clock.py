"""An asyncio event loop in virtual time: its clock jumps to the next timer. Equal seeds give equal runs.

The loop waits for no file, so one turn is the callbacks that are ready; this takes half the time of asyncio's own turn, which
whole fleets consist of.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
RESOLUTION_S = 1e-9
"""Timers this close to the present are due."""


class Stuck(Exception):
    """Every task waits and no timer is set: a deadlock."""


class Timer(asyncio.TimerHandle):
    """A timer without what asyncio keeps for debugging: fleets set millions of them."""

    __slots__ = ()
    _callback: Callable[..., object] | None
    _context: Context
    _loop: asyncio.AbstractEventLoop
    _repr: str | None
    _scheduled: bool
    _source_traceback: None
    _when: float

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: Context | None = None,
    ) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        """Drops the callback."""
        self._cancelled = True
        self._callback, self._args = None, ()


class Callback(asyncio.Handle):
    """A handle without what asyncio keeps for debugging."""

    __slots__ = ()
    _callback: Callable[..., object] | None
    _context: Context
    _loop: asyncio.AbstractEventLoop
    _repr: str | None
    _source_traceback: None

    def __init__(
        self, callback: Callable[..., object], args: Sequence[Any], loop: asyncio.AbstractEventLoop, context: Context | None
    ) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers of equal time run in the order in which they were set."""

    _closed: bool
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs a callback at a time."""
        return self._add(when, Timer(when, callback, args, self, context))

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs a callback after a delay."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _add(self, when: float, timer: Timer) -> Timer:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """Runs what is ready, and the timers that are due; advances the clock if nothing is. Called by asyncio."""
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if timers:
                self._now = max(self._now, timers[0][0])
            elif not self._stopping:
                raise Stuck("every task waits and no timer is set")
        end = self._now + RESOLUTION_S
        while timers and timers[0][0] < end:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine. Raises Stuck on a deadlock; remaining tasks are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
