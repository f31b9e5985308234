"""Cached prefixes that other groups pull: `core.migration.prefix` decides, scheduler and ranks execute."""

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

from phalanx_api import moves
from phalanx_runtime.core.migration import page_orders, records
from phalanx_runtime.core.migration.prefix import PrefixSends
from phalanx_runtime.core.page_window import NULL_PAGE
from phalanx_runtime.core.scheduling.prefix_holds import NO_SLOT, HeldPrefix, NotHeld
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.engine.disk_fetches import DiskFetches
from phalanx_runtime.engine.ports import PageTransport

log = logging.getLogger(__name__)


class PrefixSender:
    """The prefixes that leave one engine. Called between steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        transport: PageTransport,
        send: Callable[[moves.MoveFailed], None],
        limits: records.MoveLimits,
        fetches: DiskFetches,
    ) -> None:
        self._fetches = fetches
        self._limits = limits
        self._reading: dict[str, tuple[moves.SendPrefix, float]] = {}
        """Orders whose pages are read from disk, by move, with the time until which they wait."""
        self._scheduler = scheduler
        self._transport = transport
        self._send = send
        self._page_size = scheduler.pool.page_size
        self._sends = PrefixSends(len(transport.addresses), self._page_size, limits)

    @property
    def deadline(self) -> float | None:
        """Latest time of the next `tick`, if pages are being sent or read from disk."""
        deadlines = [deadline for _, deadline in self._reading.values()]
        return min(deadlines if self._sends.deadline is None else [*deadlines, self._sends.deadline], default=None)

    def start(self, order: moves.SendPrefix, now: float) -> None:
        """Reads pages from disk if that is faster than computing them; then holds all and sends them, or answers why not."""
        if order.move in self._sends or order.move in self._reading:
            return
        if self._fetches.start_send(order.move, order.keys, now):
            self._reading[order.move] = order, now + self._limits.stall_s
        else:
            self._send_held(order, now)

    def _send_held(self, order: moves.SendPrefix, now: float) -> None:
        held = self._scheduler.prefix_holds.hold(order.move, order.keys, order.prepared.cached_tokens // self._page_size)
        if isinstance(held, NotHeld):
            self._send(moves.MoveFailed(order.move, held.code, held.why))
            return
        for action in self._sends.start(order, len(held.pages), now):
            self._execute(action, held)

    def stop(self, move: str, why: str) -> None:
        """Ends the sending of a prefix, if any."""
        if self._reading.pop(move, None) is not None:
            self._fetches.send_ended(move)
        self._execute_all(self._sends.stop(move, why))

    def handle_report(self, rank: int, report: page_orders.Report, now: float) -> bool:
        """Handles a report of a rank. Returns whether it was one of a prefix."""
        match report:
            case page_orders.PagesSent(move) if move in self._sends:
                self._execute_all(self._sends.sent(move, now))
            case page_orders.SendFailed(move, code, why) if move in self._sends:
                self._execute_all(self._sends.failed(move, code, f"rank {rank}: {why}"))
            case page_orders.SendEnded(move):
                self._execute_all(self._sends.ended(move, rank))
            case _:
                return False
        return True

    def tick(self, now: float) -> None:
        """Sends what was read from disk, or took too long, and handles timeouts."""
        for move, (order, deadline) in list(self._reading.items()):
            if deadline <= now or not self._fetches.is_reading(move):
                del self._reading[move]
                self._fetches.send_ended(move)
                self._send_held(order, now)
        self._execute_all(self._sends.tick(now))

    def _execute_all(self, actions: Sequence[records.PrefixAction]) -> None:
        for action in actions:
            self._execute(action)

    def _execute(self, action: records.PrefixAction, held: HeldPrefix | None = None) -> None:
        log.debug("prefix", extra={"action": type(action).__name__, "why": action.why})
        match action:
            case records.SendFrame(frame):
                assert isinstance(frame, moves.MoveFailed), "a holder sends no other frame"
                self._send(frame)
            case records.StartSend(order=order, first=first, num_computed=num_computed):
                assert held is not None, "pages are held before they are sent"
                # Plans in flight may write the pages: the copy follows the last planned step.
                copy = self._copy(held, max(first, held.first_readable), num_computed)
                self._transport.send(order, copy)
            case records.StopCopy(move):
                self._transport.stop(move)
            case records.ReleasePrefix(move):
                self._scheduler.prefix_holds.release(move)
            case _:
                assert_never(action)

    def _copy(self, held: HeldPrefix, first: int, num_computed: int) -> page_orders.PageCopy:
        """Returns what each rank sends: positions from `first` on."""
        pages, parts = held.pages[first:], self._scheduler.pool.parts
        slots, part_slots = list(held.slots[first:]), list(held.part_slots[first:])
        return page_orders.PageCopy(
            first=first,
            pages=pages,
            step=self._scheduler.planned_step,
            num_computed=num_computed,
            num_drafted=self._num_drafted(held.pages),
            parts=[] if parts is None else parts.in_window(pages, first, num_computed),
            slots=slots if any(slot != NO_SLOT for slot in slots) else [],
            part_slots=part_slots if any(slot != NO_SLOT for slot in part_slots) else [],
        )

    def _num_drafted(self, pages: Sequence[int]) -> int:
        """Leading tokens with the draft model's KV."""
        pool, size = self._scheduler.pool, self._page_size
        if NULL_PAGE in pages:
            return 0
        num_full = next((i for i, page in enumerate(pages) if pool.drafted(page) < size), len(pages))
        return num_full * size + (pool.drafted(pages[num_full]) if num_full < len(pages) else 0)
