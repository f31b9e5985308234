"""Admission of requests of batches: how many may start without delaying those of clients, and which.

Tenants take turns, each in the order in which its batches ask.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from phalanx_router.routing.view import GroupView, is_stale

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Between two looks at the groups. Half of it is longer than a load report takes, so the next look counts started requests."""
MAX_IN_FLIGHT = 256
"""Of one router."""
Slot = asyncio.Future[None]
"""Done once it is granted."""
SHARE = 0.8
"""Share of a group's rows, pages and latency target that batches may fill."""
UNKNOWN_ROWS = 16
"""Rows of a group that reports none."""


class Slots:
    """Lets requests start while `spare` says so. spare: how many more may start, by the number in flight."""

    def __init__(self, spare: Callable[[int], int], tick_s: float = TICK_S) -> None:
        self._spare = spare
        self._tick_s = tick_s
        self._waiting: OrderedDict[str, deque[Slot]] = OrderedDict()
        self._unspent = 0
        """Slots of the last look that nothing waited for."""
        self.in_flight = 0

    @property
    def num_waiting(self) -> int:
        """Slots that are asked for."""
        return sum(map(len, self._waiting.values()))

    async def run(self) -> None:
        """Grants slots until it is cancelled."""
        while True:
            await asyncio.sleep(self._tick_s / 2)
            self._unspent = 0
            await asyncio.sleep(self._tick_s / 2)
            if not self._waiting:
                continue
            try:
                self._grant(min(self._spare(self.in_flight), MAX_IN_FLIGHT - self.in_flight))
            except Exception:  # a bug there must not stop all batches
                log.exception("cannot tell how many requests of batches may start")

    def _grant(self, count: int) -> None:
        while count > 0 and self._waiting:
            tenant, slots = self._waiting.popitem(last=False)
            slots.popleft().set_result(None)
            self.in_flight += 1
            count -= 1
            if slots:
                self._waiting[tenant] = slots
        self._unspent = max(0, count)

    def ask(self, tenant: str) -> Slot:
        """Returns a slot to wait for, and to `give_back` in any case."""
        slot = asyncio.get_running_loop().create_future()
        if self._unspent:  # then nothing waits
            self._unspent -= 1
            self.in_flight += 1
            slot.set_result(None)
            return slot
        self._waiting.setdefault(tenant, deque()).append(slot)
        return slot

    def give_back(self, slot: Slot, tenant: str) -> None:
        """Ends the use of a slot, or the wait for it."""
        if slot.done():
            self.in_flight -= 1
            return
        slots = self._waiting[tenant]
        slots.remove(slot)
        if not slots:
            del self._waiting[tenant]


def spare_requests(
    views: Sequence[GroupView], *, queued: int, in_flight: int, itl_target_s: float = 0.0, routers: int = 1
) -> int:
    """Returns how many more requests of batches one of the routers may start.

    None while requests wait at the router or in a group. Without groups one starts, so that a service scaled to zero wakes.
    itl_target_s: 0 without a target.
    """
    if not views:
        return max(0, 1 - in_flight)
    return 0 if queued else -(-sum(_spare(view, itl_target_s) for view in views) // max(1, routers))


def _spare(view: GroupView, itl_target_s: float) -> int:
    load, capacity = view.load, view.capacity
    is_slow = 0 < SHARE * itl_target_s <= view.itl_s and load.running > 0
    is_full = load.used_pages + load.reserved_pages >= SHARE * capacity.total_pages
    if view.is_draining or is_stale(view.state) or not view.has_report or load.waiting or is_slow or is_full:
        return 0
    return max(0, int(SHARE * (capacity.max_num_seqs or UNKNOWN_ROWS)) - load.running)
