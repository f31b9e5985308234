"""Admission of requests of batches: tenants take turns, each in the order in which its batches ask."""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Between two looks at the groups. Half of it is longer than a load report takes, so the next look counts started requests."""
MAX_IN_FLIGHT = 256
"""Of one router."""
Slot = asyncio.Future[None]
"""Done once it is granted."""


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
