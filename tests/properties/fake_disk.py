"""The disk of a fake runner, and the requests that wait for it, as `engine.disk_fetches` has them wait."""

from phalanx_runtime.core.kv.disk_tier import FetchOrder, Waiter
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from tests.runtime.fake_runner import FakeRunner

READ_STEPS = 2
LOSES_EVERY = 7


class FakeDisk:
    """Pages and parts that the runner stored. Every seventh fetch finds that the last one of its pages or parts is lost.

    A read takes steps and no time, so that it is predicted to take less than computing the pages.
    """

    def __init__(self, runner: FakeRunner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._tier = scheduler.sharing.disk
        self._orders: list[tuple[FetchOrder, int, int]] = []
        """With the steps after which they are read: of the loop, and of the plans."""
        self.num_waits = 0
        """Requests that waited."""

    @property
    def is_on(self) -> bool:
        """Whether a request may have to wait."""
        return bool(self._tier.keys or self._tier.part_keys)

    @property
    def is_reading(self) -> bool:
        """Whether it reads pages."""
        return bool(self._orders)

    def start(self, handle: int, step: int) -> None:
        """Reads the pages of a request that the scheduler holds, or releases it."""
        if not self.is_on:
            return
        prefix = self._scheduler.sharing.find_on_disk(self._scheduler.requests[handle])
        order = self._tier.start(handle, prefix, model=self._scheduler.fit.model(), now=0.0)
        if order is not None:
            self._orders.append((order, step + READ_STEPS, self._scheduler.planned_step))
        self.num_waits += self._tier.is_waiting(handle)
        if not self._tier.is_waiting(handle):
            self._scheduler.release(handle, float(step))

    def request_left(self, handle: int) -> None:
        """Forgets an aborted request."""
        self._tier.leave(handle)

    def turn(self, step: int) -> None:
        """Reports what was stored, and what was read of orders whose plans have run."""
        for known, stored, is_part in (
            (self._tier.keys, self._runner.disk, False),
            (self._tier.part_keys, self._runner.disk_parts, True),
        ):
            self._tier.changed(0, [key for key in stored if key not in known], [], is_part=is_part)
        is_ready = [step >= at and self._runner.last_step >= planned for _, at, planned in self._orders]
        ready = [order for (order, _, _), is_due in zip(self._orders, is_ready, strict=True) if is_due]
        self._orders = [order for order, is_due in zip(self._orders, is_ready, strict=True) if not is_due]
        for handle in [handle for order in ready for handle in self._read(order)]:
            assert isinstance(handle, int)
            self._scheduler.release(handle, float(step))

    def _read(self, order: FetchOrder) -> list[Waiter]:
        """Fills the slots of an order. Returns the requests that wait no longer."""
        runner, waiting = self._runner, list[Waiter]()
        kinds = (
            (False, order.keys, order.slots, runner.disk, runner.put_host),
            (True, order.part_keys, order.part_slots, runner.disk_parts, runner.put_host_part),
        )
        for is_part, keys, slots, stored, put in kinds:
            if order.number % LOSES_EVERY == is_part and keys:
                stored.pop(keys[-1], None)
            found = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
            for key, slot in zip(keys[:found], slots, strict=False):
                put(slot, list(stored[key]))
            if keys:
                waiting += self._tier.fetched(0, order.number, found, 0.0, is_part=is_part)
        return waiting
