"""An asyncio event loop in virtual time: its clock jumps to the next timer. Equal seeds give equal runs.

The loop waits for no file, so one turn is the callbacks that are ready. Whole fleets consist of turns and handles, so both have
only what a fleet needs: they take a third of the time of asyncio's own.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from itertools import count
from typing import Any, ClassVar, Protocol, TypeVar, TypeVarTuple

import msgspec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
RESOLUTION_S = 1e-9
"""Timers this close to the present are due."""


class Stuck(Exception):
    """Every task waits and no timer is set: a deadlock."""


class Owner(Protocol):
    """A process. While it is stopped, its timers wait."""

    is_stopped: bool

    def hold(self, callback: Callable[[], object]) -> None:
        """Keeps a callback until the process continues."""


def _nothing() -> None:
    """Does nothing."""


class Handle(msgspec.Struct, eq=False):
    """A callback or a timer, in place of `asyncio.Handle`, which keeps more for debugging."""

    callback: Callable[..., object]
    args: tuple[Any, ...]
    context: Context
    owner: Owner | None = None
    """Of a timer."""
    is_cancelled: bool = False
    _source_traceback: ClassVar[None] = None

    def cancel(self) -> None:
        """Drops the callback."""
        self.is_cancelled, self.callback, self.args = True, _nothing, ()

    def cancelled(self) -> bool:
        """Returns whether it was cancelled."""
        return self.is_cancelled


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers of equal time run in the order in which they were set."""

    _closed: bool
    _ready: deque[Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = count()

    def time(self) -> float:
        return self._now

    def _call_soon(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> asyncio.Handle:
        """Runs a callback in the next turn. Called by asyncio."""
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle  # type: ignore[return-value]

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs a callback at a time."""
        return self._add(when, callback, args, context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Runs a callback after a delay."""
        return self._add(self._now + delay, callback, args, context)

    def _add(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if context is None:
            context = copy_context()
        timer = Handle(callback, args, context, self._owner_of(context))
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer  # type: ignore[return-value]

    def _owner_of(self, context: Context) -> Owner | None:
        """Returns the process of a context."""
        return None

    def _run_once(self) -> None:
        """Runs turns until asyncio, which calls this, stops the loop."""
        ready, timers, pop = self._ready, self._timers, heapq.heappop
        while True:
            if not ready:
                self._advance()
            end = self._now + RESOLUTION_S
            while timers and timers[0][0] < end:
                ready.append(pop(timers)[2])
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.is_cancelled:
                    continue
                owner = handle.owner
                if owner is not None and owner.is_stopped:
                    owner.hold(partial(self._continue, handle))
                    continue
                try:
                    handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"Exception in callback {handle.callback}", "exception": error})
            if self._stopping:
                return

    def _advance(self) -> None:
        """Moves the clock to the next timer."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if timers:
            self._now = max(self._now, timers[0][0])
        elif not self._stopping:
            raise Stuck("every task waits and no timer is set")

    def _continue(self, timer: Handle) -> None:
        """Runs a timer whose process was stopped."""
        timer.owner = None
        self._ready.append(timer)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine. Raises Stuck on a deadlock; remaining tasks are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
