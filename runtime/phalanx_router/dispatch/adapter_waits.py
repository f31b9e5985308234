"""Requests that wait for an adapter: the requests of one name share one check."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_frontend.backend import BackendError
from phalanx_router.dispatch.limits import ColdStartHold
from phalanx_router.links.link_pool import LinkPool

RECHECK_S = 0.5
"""Interval of checks while requests wait for a load: load reports change what groups are open, without an event."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """One request."""

    future: asyncio.Future[None]
    is_held: bool = False


@dataclass(slots=True, eq=False)
class _Wait:
    """The requests of one name."""

    waiters: dict[_Waiter, None] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class AdapterWaits:
    """The waiting requests, on one event loop."""

    def __init__(
        self,
        links: LinkPool,
        cold_start: ColdStartHold,
        is_over: Callable[[str], bool],
        check_room: Callable[[int], None],
    ) -> None:
        """`is_over`: whether requests of a name wait no longer; it orders loads. Raises BackendError if no group will.

        `check_room` raises BackendError 429 if these many requests wait and one more may not.
        """
        self._links = links
        self._cold_start = cold_start
        self._is_over = is_over
        self._check_room = check_room
        self._waits: dict[str, _Wait] = {}

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(len(wait.waiters) for wait in self._waits.values())

    def has(self, name: str) -> bool:
        """Whether requests wait for a name."""
        return name in self._waits

    async def wait_for(self, name: str, timeout_s: float) -> None:
        """Returns once the wait is over. Raises BackendError, and TimeoutError after `timeout_s`."""
        self._check_room(self.num_waiting)
        waiter = _Waiter(asyncio.get_running_loop().create_future())
        wait = self._waits.setdefault(name, _Wait())
        wait.waiters[waiter] = None
        if wait.task is None:
            wait.task = asyncio.create_task(self._run(name, wait))
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.future
        finally:
            wait.waiters.pop(waiter, None)
            if waiter.is_held:
                self._cold_start.release()
            if not wait.waiters and self._waits.get(name) is wait:
                del self._waits[name]
                wait.task.cancel()

    async def _run(self, name: str, wait: _Wait) -> None:
        try:
            while not self._is_over(name):
                if not self._links.serving():
                    self._hold(wait)
                await self._links.wait_for_change(RECHECK_S)
        except Exception as error:  # each request gets it
            self._end(name, wait, error)
        else:
            self._end(name, wait, None)

    def _hold(self, wait: _Wait) -> None:
        """Counts the requests as held, which has a group started. Ends those beyond the limit."""
        for waiter in wait.waiters:
            if not waiter.is_held and not waiter.future.done():
                try:
                    self._cold_start.hold()
                    waiter.is_held = True
                except BackendError as error:
                    waiter.future.set_exception(error)

    def _end(self, name: str, wait: _Wait, error: Exception | None) -> None:
        if self._waits.get(name) is wait:
            del self._waits[name]
        for waiter in wait.waiters:
            if not waiter.future.done():  # its client may have left
                waiter.future.set_result(None) if error is None else waiter.future.set_exception(error)
