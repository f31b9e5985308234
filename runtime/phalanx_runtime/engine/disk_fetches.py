"""Requests that wait for pages from disk: `core.kv.disk_tier` decides, the ranks read."""

import logging

from phalanx_runtime.core.migration.page_orders import DiskChanged, DiskReport, PagesFetched
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.engine.ports import PageTransport

log = logging.getLogger(__name__)


class DiskFetches:
    """The fetches of one engine. Called between steps."""

    def __init__(self, scheduler: Scheduler, transport: PageTransport) -> None:
        self._scheduler = scheduler
        self._disk = scheduler.sharing.disk
        self._transport = transport
        self._num_ranks = len(transport.addresses)
        self._ready: list[int] = []
        """Requests that wait no longer."""

    @property
    def is_on(self) -> bool:
        """Whether a request may have to wait."""
        return bool(self._disk.keys)

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
        missing, num_found = self._scheduler.sharing.missing_keys(self._scheduler.requests[handle])
        order = self._disk.start(handle, missing, num_found, model=self._scheduler.fit.model(), now=now)
        if order is not None:
            self._transport.fetch(order.number, order.keys, order.slots, self._scheduler.planned_step)
        return self._disk.is_waiting(handle)

    def report(self, rank: int, report: DiskReport) -> None:
        """Records the report of a rank."""
        match report:
            case DiskChanged(added, dropped, compacted_bytes, reclaimed_bytes):
                self._disk.changed(rank, added, dropped)
                self._disk.compacted(compacted_bytes, reclaimed_bytes)
            case PagesFetched(number, count, wall_s):
                self._ready += self._disk.fetched(rank, number, count, wall_s, self._num_ranks)

    def turn(self, now: float) -> list[int]:
        """Returns the requests that wait no longer."""
        late = self._disk.tick(now)
        if late:
            log.warning("requests compute pages that the disk did not return in time", extra={"handles": late})
        ready, self._ready = [*self._ready, *late], []
        return ready

    def request_left(self, handle: int) -> None:
        """Forgets an aborted or moved request."""
        self._disk.request_left(handle)
