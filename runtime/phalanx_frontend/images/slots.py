"""Who may decode an image now: a tenant gets a second slot only while no tenant without one waits."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DecodeSlots:
    """Slots of one event loop, in the order of arrival, but tenants without a slot first."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._held = Counter[str]()
        self._waiting = deque[tuple[str, asyncio.Future[None]]]()

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """Holds a slot for a tenant, once it has one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, turn))
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._num_free += 1
                self._held[tenant] -= 1
            self._grant()

    def _grant(self) -> None:
        """Gives free slots to those who wait and were not cancelled."""
        self._waiting = deque(one for one in self._waiting if not one[1].done())
        while self._num_free and self._waiting:
            tenant, turn = next((one for one in self._waiting if not self._held[one[0]]), self._waiting[0])
            self._waiting.remove((tenant, turn))
            self._num_free -= 1
            self._held[tenant] += 1
            turn.set_result(None)
