"""Sends the load reports of the engine loop when they are due; checks the page pool when the engine becomes idle."""

import logging
import math
import time
from collections.abc import Callable

import msgspec

from phalanx_api import wire
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.utilization import UtilizationMeter
from phalanx_runtime.engine.engine_moves import EngineMoves

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
"""Load report interval of a busy engine. Routers choose groups by these reports."""
URGENT_INTERVAL_S = 0.01
"""Shortest load report interval, after a refusal or before and after preemptions."""
CHECK_INTERVAL_S = 1.0
"""Shortest interval of page pool checks."""


class LoadReports:
    """The load reports of one engine. `clock`: monotonic seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        moves: EngineMoves,
        clock: Callable[[], float],
        send: Callable[[wire.FromEngine], None],
        meter: UtilizationMeter,
    ) -> None:
        self._scheduler = scheduler
        self._meter = meter
        self._moves = moves
        self._clock = clock
        self._send = send
        self._load_due = 0.0
        self._urgent_due = 0.0
        self._is_urgent = False
        self._num_preemptions = 0
        """At the latest plan."""
        self._was_preemption_near = False
        self._idle_refused: int | None = None
        """Refused KV transfer connections in the latest idle report; absent after a later message."""
        self._idle_disk = 0
        """Changes of the disk in that report."""
        self._check_due = -math.inf
        self._sized_why = ""
        """Reason of the latest size of the host tier that was logged."""
        self._leaks = 0

    def message_received(self) -> None:
        """Lets an engine that is still idle report again."""
        self._idle_refused = None

    def request_refused(self) -> None:
        """Makes the next report urgent: the queue is full."""
        self._is_urgent = True

    def plan_composed(self) -> None:
        """Makes the next report urgent if the plan preempted requests or brought preemption near."""
        num_preemptions, is_near = self._scheduler.num_preemptions, self._scheduler.is_preemption_near()
        self._is_urgent |= num_preemptions > self._num_preemptions or (is_near and not self._was_preemption_near)
        self._num_preemptions, self._was_preemption_near = num_preemptions, is_near

    def report_before_step(self, is_stalled: bool) -> None:
        """Reports if urgent. `is_stalled`: no step runs, so the regular report is sent here: silence would count as a failure."""
        if self._is_urgent:
            now = self._clock()
            if now >= self._urgent_due:
                self._report(now)
        if is_stalled and self._clock() >= self._load_due:
            self._report(self._clock())

    def report_after_step(self, now: float) -> None:
        """Reports if due."""
        if now >= (self._urgent_due if self._is_urgent else self._load_due):
            self._report(now)

    @property
    def deadline(self) -> float | None:
        """Time of the report of an idle engine whose disk has changed since the latest one, if any: pages are written later."""
        has_changed = self._idle_refused is not None and self._idle_disk != self._scheduler.sharing.disk.num_changes
        return self._load_due if has_changed else None

    def report_before_blocking(self) -> None:
        """Reports at each call, or once while idle, no connection is refused and the disk does not change.

        Checks the page pool on becoming idle.
        """
        now = self._clock()
        if not self._scheduler.is_idle():
            self._report(now)
            return
        is_due = self.deadline is not None and now >= self._load_due
        if self._idle_refused == self._moves.num_refused and not is_due:
            return
        self._idle_refused, self._idle_disk = self._moves.num_refused, self._scheduler.sharing.disk.num_changes
        errors = self._check(now)
        self._report(now)
        for error in errors:
            log.error("page pool is wrong", extra={"why": error})

    def _check(self, now: float) -> list[str]:
        """Returns the errors of the page pool, at most once per interval."""
        if now < self._check_due:
            return []
        self._check_due = now + CHECK_INTERVAL_S
        errors = self._scheduler.check()
        self._leaks += len(errors)
        return errors

    def _log_size(self) -> None:
        """Logs a new decision about the size of the host tier."""
        host = self._scheduler.pool.host
        if host.sized_why != self._sized_why:
            self._sized_why = host.sized_why
            log.info("the host tier gets another size", extra={"why": host.sized_why})

    def _report(self, now: float) -> None:
        self._log_size()
        changes = self._scheduler.pool.take_changes()
        if changes.changes or changes.is_snapshot:
            self._send(changes)
        load, used = self._scheduler.load(now), self._meter.utilization(now, self._scheduler.is_idle())
        self._send(
            msgspec.structs.replace(
                load,
                leaks=self._leaks,
                refused_transfers=self._moves.num_refused,
                device_busy=used.busy,
                bandwidth_utilization=used.bandwidth,
                flop_utilization=used.flops,
                unix_s=time.time(),
            )
        )
        self._load_due, self._urgent_due = now + LOAD_INTERVAL_S, now + URGENT_INTERVAL_S
        self._is_urgent = False
