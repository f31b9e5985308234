"""Requests, and prefixes to be sent to other groups, that wait for pages from disk: `core.kv.disk_tier` decides, ranks read."""

import logging
from collections.abc import Iterable, Sequence

from phalanx_runtime.core.kv.disk_tier import DiskPrefix, Waiter
from phalanx_runtime.core.migration.page_orders import DiskChanged, DiskReport, FetchPages, PagesFetched
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.engine.ports import PageTransport

log = logging.getLogger(__name__)


class DiskFetches:
    """The fetches of one engine. Called between steps."""

    def __init__(self, scheduler: Scheduler, transport: PageTransport) -> None:
        self._scheduler = scheduler
        self._disk = scheduler.sharing.disk
        self._transport = transport
        self._disk.num_ranks = max(1, len(transport.addresses))
        self._ready: list[int] = []
        """Requests that wait no longer."""

    @property
    def is_on(self) -> bool:
        """Whether a request may have to wait."""
        return bool(self._disk.keys or self._disk.part_keys)

    @property
    def deadline(self) -> float | None:
        """Time of the next `turn`, if a request waits."""
        return self._disk.deadline

    def is_waiting(self, handle: int) -> bool:
        """Returns whether a request waits for its pages."""
        return self._disk.is_waiting(handle)

    def start(self, handle: int, now: float) -> bool:
        """Reads the pages of a request that the scheduler holds, if that pays. Returns whether it waits for them."""
        if not self.is_on:
            return False
        return self._start(handle, self._scheduler.sharing.find_on_disk(self._scheduler.requests[handle]), now)

    def start_send(self, move: str, keys: Sequence[bytes], now: float) -> bool:
        """The same for the pages of a prefix that is to be sent to another group."""
        return self.is_on and self._start(move, self._scheduler.sharing.find_keys_on_disk(keys), now)

    def is_reading(self, move: str) -> bool:
        """Returns whether a prefix to be sent waits for its pages."""
        return self._disk.is_waiting(move)

    def _start(self, waiter: Waiter, prefix: DiskPrefix, now: float) -> bool:
        order = self._disk.start(waiter, prefix, model=self._scheduler.fit.model(), now=now)
        if order is not None:
            step = self._scheduler.planned_step
            if order.keys:
                self._transport.fetch(FetchPages(number=order.number, keys=order.keys, slots=order.slots, step=step))
            if order.part_keys:
                keys, slots = order.part_keys, order.part_slots
                self._transport.fetch(FetchPages(number=order.number, keys=keys, slots=slots, step=step, is_part=True))
        return self._disk.is_waiting(waiter)

    def report(self, rank: int, report: DiskReport, now: float) -> None:
        """Records the report of a rank."""
        match report:
            case DiskChanged(added, dropped, compacted_bytes, reclaimed_bytes, is_part, unwritten, has_more):
                self._disk.changed(rank, added, dropped, is_part=is_part, has_more=has_more)
                self._disk.wrote(compacted_bytes, reclaimed_bytes, unwritten)
            case PagesFetched(number, count, is_part):
                self._ready += _requests(self._disk.fetched(rank, number, count, now, is_part=is_part))

    def turn(self, now: float) -> list[int]:
        """Returns the requests that wait no longer."""
        late = _requests(self._disk.tick(now))
        if late:
            log.warning("requests compute pages that the disk did not return in time", extra={"handles": late})
        ready, self._ready = [*self._ready, *late], []
        return ready

    def request_left(self, handle: int) -> None:
        """Forgets an aborted or moved request."""
        self._disk.leave(handle)

    def send_ended(self, move: str) -> None:
        """Forgets a prefix to be sent."""
        self._disk.leave(move)


def _requests(waiters: Iterable[Waiter]) -> list[int]:
    return [waiter for waiter in waiters if isinstance(waiter, int)]
