"""Processes that share one event loop in virtual time and can be frozen and killed.

A process is a context: callbacks and tasks that it starts belong to it. Callbacks of a frozen process wait until it continues, so
its timers are late and its clock jumps, as after SIGSTOP or in a suspended machine. Callbacks of a killed process never run.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar, TypeVarTuple
from unittest import mock

from bench.virtual.clock import Handle, VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
EPOCH_S = 1_700_000_000.0
"""Unix time of the start of a run."""
NETWORK = Context()
"""Context of what no process does: it is never frozen."""


class Execution:
    """What runs of one process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        """Whether no callback runs."""
        self.wall_offset_s = 0.0
        """Error of the process's Unix clock."""
        self._waiting: deque[Callable[[], object]] = deque()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in this process."""
        context = copy_context()
        context.run(_CURRENT.set, self)
        return context.run(function, *args, **kwargs)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task of this process."""
        return self.run(asyncio.get_running_loop().create_task, coroutine)

    def freeze(self) -> None:
        """Stops all callbacks until `thaw`."""
        self.is_stopped = True

    def thaw(self) -> None:
        """Runs what has waited, in order."""
        if self.is_alive:
            self.is_stopped = False
            self._release()

    def kill(self) -> None:
        """Runs nothing more of this process."""
        self.is_alive, self.is_stopped = False, True

    def bury(self) -> None:
        """Lets tasks of a killed process be cancelled, at the end of a run."""
        self.is_alive, self.is_stopped = True, False
        self._release()

    def hold(self, callback: Callable[[], object]) -> None:
        """Keeps a callback until the process continues."""
        self._waiting.append(callback)

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for callback in waiting:
            callback()


_CURRENT: ContextVar[Execution | None] = ContextVar("execution", default=None)


def current_execution() -> Execution | None:
    """Returns the process that runs now; null outside of all."""
    return _CURRENT.get()


class ProcessLoop(VirtualLoop):
    """An event loop in virtual time that holds the callbacks of stopped processes."""

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        """Runs a callback once its process runs."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if context is None:
            context = copy_context()
        handle = Handle(callback, args, context)
        execution = context.get(_CURRENT)
        if execution is None or not execution.is_stopped:
            self._ready.append(handle)
        else:
            execution.hold(partial(self._ready.append, handle))
        return handle  # type: ignore[return-value]

    def _owner_of(self, context: Context) -> Execution | None:
        return context.get(_CURRENT)


@contextmanager
def wall_clock(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Makes `time.time` the Unix clock of the process that calls it, in virtual time."""

    def now() -> float:
        execution = _CURRENT.get()
        return EPOCH_S + loop.time() + (execution.wall_offset_s if execution is not None else 0.0)

    with mock.patch.object(time, "time", now):
        yield


def run_processes(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that starts processes. Raises Stuck on a deadlock; remaining tasks are cancelled."""

    async def run() -> T:
        with wall_clock(asyncio.get_running_loop()):
            return await main

    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        return runner.run(run())
