"""Moves in the engine: state machines (`core.migration`) decide, scheduler and ranks execute.

A request that loses its pages during the copy is not moved.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from phalanx_api import moves, wire
from phalanx_runtime.core.admission import Refusal
from phalanx_runtime.core.migration import page_orders, records
from phalanx_runtime.core.migration.rescue import Rescue
from phalanx_runtime.core.migration.source import SourceMoves
from phalanx_runtime.core.migration.target import PageReservation, TargetMoves
from phalanx_runtime.core.page_window import NULL_PAGE
from phalanx_runtime.core.scheduling.scheduler import RunningRequest, Scheduler
from phalanx_runtime.core.speculation.draft_backfill import drafted_when_sent
from phalanx_runtime.engine.disk_fetches import DiskFetches
from phalanx_runtime.engine.ports import PageTransport
from phalanx_runtime.engine.prefix_sender import PrefixSender

log = logging.getLogger(__name__)

KEY_BYTES = 32
COPY_SMOOTHING, STEP_SMOOTHING = 0.3, 0.1
"""Weight of the latest sample of copy rate and step time."""
DEFAULT_LIMITS = records.MoveLimits()
MoveAction = records.SourceAction | records.TargetAction
MoveOrder = wire.Prepare | moves.MoveOut | moves.SendPrefix | moves.Thaw | moves.Release | moves.Cancel


@dataclass(slots=True)
class _OutgoingCopy:
    handle: int
    num_preemptions: int
    """At the start of the move."""
    drafted: int | None = None
    """Leading tokens with the draft model's KV in all sent pages."""
    ends: dict[int, int] = field(default_factory=dict)
    """Page position that each rank has reached."""


class EngineMoves:
    """The moves of one engine. Called between steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        transport: PageTransport,
        send: Callable[[wire.FromEngine], None],
        end_request: Callable[[int], None],
        limits: records.MoveLimits = DEFAULT_LIMITS,
        fetches: DiskFetches | None = None,
    ) -> None:
        """`end_request` ends a request without a frame. `fetches` gets the reports about disks."""
        self._fetches = fetches or DiskFetches(scheduler, transport)
        self._scheduler = scheduler
        self._transport = transport
        self._send = send
        self._end_request = end_request
        self._num_ranks = len(transport.addresses)
        self._page_size = scheduler.pool.page_size
        self.source = SourceMoves(self._page_size, limits)
        self.target = TargetMoves(self._num_ranks, limits)
        self._prefixes = PrefixSender(scheduler, transport, send, limits, self._fetches)
        self.num_refused = 0
        """Refused KV transfer connections."""
        self._step_s = 0.0
        self._pages_per_s = limits.initial_pages_per_s
        self._rescue = Rescue()
        self._copies: dict[str, _OutgoingCopy] = {}
        self._opening: dict[str, tuple[PageReservation, set[int]]] = {}
        """By move: ranks that do not accept pages yet."""
        self._closing: dict[str, set[int]] = {}
        """By move: ranks that may still write pages."""

    @property
    def deadline(self) -> float | None:
        """Latest time of the next `turn`, if a move is pending."""
        deadlines = self.source.deadline, self.target.deadline, self._prefixes.deadline
        return min((at for at in deadlines if at is not None), default=None)

    def handle(self, order: MoveOrder, now: float) -> None:
        """Executes a router's order; its handle is the engine's."""
        match order:
            case moves.MoveOut() | moves.SendPrefix() | wire.Prepare() if not self._num_ranks:
                self._send(moves.MoveFailed(order.move, "incompatible", "this engine does not support moves"))
            case moves.SendPrefix() if self._scheduler.has_states:
                self._send(moves.MoveFailed(order.move, "incompatible", "cached pages lack the state of their request"))
            case moves.MoveOut():
                self._move_out(order, now)
            case moves.SendPrefix():
                self._prefixes.start(order, now)
            case moves.Thaw(move):
                self._prefixes.stop(move, "the router cancelled the pull")
                self._execute(self.source.thaw(move), now)
            case moves.Release(move):
                self._prefixes.stop(move, "the pages have arrived")
                self._execute(self.source.release(move), now)
            case wire.Prepare():
                self._execute(self.target.prepare(order, now), now)
            case moves.Cancel(move):
                self._execute(self.target.cancel(move, now), now)

    def submit(self, handle: int, request: wire.Request, move: str, now: float) -> bool:
        """Whether all pages have arrived, so that the scheduler can start on them; then call `submitted`."""
        start, actions = self.target.submit(handle, request, move, now)
        self._execute(actions, now)
        if start is None:
            log.info("a moved request is recomputed", extra={"move": move})
            return False
        if self._scheduler.has_states and start.num_computed != start.num_received:
            log.info(
                "a moved request is recomputed: its state is that of other tokens",
                extra={"move": move, "tokens": start.num_computed, "state_tokens": start.num_received},
            )
            self._free(move)
            return False
        self._scheduler.reservations.set_arrived(move, start.num_computed, start.num_sent)
        return True

    def submitted(self, move: str) -> None:
        """Ends the transfer after the scheduler accepted or rejected the request."""
        if self._scheduler.reservations.get(move) is None:
            self._transport.forget(move)
        else:
            self._free(move)

    def step_committed(self, wall_s: float, ended: Sequence[int], now: float) -> None:
        """Records a step and the requests that ended in it, freezes those that leave; requests rescues before preemptions.

        The engine may block after this step, so a freeze cannot wait for the next turn.
        """
        self._step_s += STEP_SMOOTHING * (wall_s - self._step_s)
        for handle in ended:
            self._end_move(handle, "it finished", now)
        self._check_copies(now)
        if self._num_ranks:
            self._request_rescues(now)

    def request_left(self, handle: int, now: float) -> None:
        """Ends the moves of an aborted or moved request."""
        self._rescue.request_left(handle, now)
        self._end_move(handle, "it was aborted", now)

    def _end_move(self, handle: int, why: str, now: float) -> None:
        if self.source.is_moving(handle):
            self._execute(self.source.ended(handle, "ended", why), now)

    def turn(self, now: float) -> None:
        """Handles reports and timeouts."""
        for rank, report in self._transport.reports():
            if isinstance(report, page_orders.PagesFetched | page_orders.DiskChanged):
                self._fetches.report(rank, report, now)
            elif not self._prefixes.handle_report(rank, report, now):
                self._handle_report(rank, report, now)
        self._check_copies(now)
        self._execute(self.source.tick(now), now)
        self._execute(self.target.tick(now), now)
        self._prefixes.tick(now)

    def _check_copies(self, now: float) -> None:
        """Freezes requests that no step has, and ends moves of those that lost their pages."""
        for move, copy in list(self._copies.items()):
            running = self._scheduler.running_request(copy.handle)
            if running is None or running.num_preemptions != copy.num_preemptions:
                self._execute(self.source.ended(copy.handle, "preempted", "it lost its pages"), now)
            elif running.is_settled:
                self._execute(self.source.stopped(move, running.num_output, self._progress(running), now), now)

    def _request_rescues(self, now: float) -> None:
        pressure = self._scheduler.pressure(self._pages_per_s)
        if pressure is None:
            return
        if handles := self._rescue.select(pressure, self.source.handles, now):
            self._send(moves.RescueRequest(handles, pressure.steps_to_full * pressure.step_s))

    def _move_out(self, order: moves.MoveOut, now: float) -> None:
        running = self._scheduler.running_request(order.handle)
        epoch = None if running is None else self._scheduler.epoch_of(order.handle)
        # A repeated MoveOut keeps the recorded losses.
        if running is not None and epoch == order.epoch and order.move not in self._copies:
            self._copies[order.move] = _OutgoingCopy(order.handle, running.num_preemptions)
            self._scheduler.pin(order.handle, True)
        progress = None if running is None else self._progress(running)
        self._execute(self.source.start(order, epoch, progress, now), now)
        if not self.source.is_moving(order.handle):
            self._forget_copy(order.move)

    def _forget_copy(self, move: str) -> None:
        copy = self._copies.pop(move, None)
        if copy is not None:
            self._scheduler.pin(copy.handle, any(other.handle == copy.handle for other in self._copies.values()))

    def _handle_report(self, rank: int, report: page_orders.MoveReport, now: float) -> None:
        match report:
            case page_orders.PagesSent():
                self._pages_sent(rank, report, now)
            case page_orders.SendEnded():
                pass  # of a move, whose source keeps the pages
            case page_orders.SendFailed(move, code, why):
                self._execute(self.source.failed(move, code, f"rank {rank}: {why}"), now)
            case page_orders.Expecting(move):
                self._rank_accepts(move, rank, now)
            case page_orders.PagesReceived(move, num_bytes, num_computed, num_drafted):
                if num_drafted:
                    self._scheduler.reservations.set_drafted(move, num_drafted)
                self._execute(self.target.received(move, rank, num_bytes, num_computed, now), now)
            case page_orders.ReceiveFailed(move, code, why):
                self._execute(self.target.failed(move, code, f"rank {rank}: {why}", now), now)
            case page_orders.Forgotten(move):
                self._rank_closed(move, rank)
            case page_orders.PeerRefused(why):
                self.num_refused += 1
                log.warning("KV transfer connection refused", extra={"rank": rank, "why": why})
            case _:
                assert_never(report)

    def _pages_sent(self, rank: int, sent: page_orders.PagesSent, now: float) -> None:
        copy = self._copies.get(sent.move)
        running = None if copy is None else self._scheduler.running_request(copy.handle)
        if copy is None or running is None:
            return
        before = copy.ends.get(rank, sent.end)
        if sent.end > before and sent.wall_s > 0:
            self._pages_per_s += COPY_SMOOTHING * ((sent.end - before) / sent.wall_s - self._pages_per_s)
        copy.ends[rank] = sent.end
        if len(copy.ends) == self._num_ranks:
            self._execute(self.source.copied(sent.move, min(copy.ends.values()), self._progress(running), now), now)

    def _progress(self, running: RunningRequest) -> records.RequestProgress:
        return records.RequestProgress(running.num_tokens, running.num_computed, self._step_s)

    def _execute(self, actions: Sequence[MoveAction], now: float) -> None:
        for action in actions:
            log.debug("move", extra={"action": type(action).__name__, "why": action.why})
            match action:
                case records.SendFrame(frame):
                    self._send(frame)
                case records.StartCopy():
                    self._start_copy(action, now)
                case records.StopCopy(move):
                    self._forget_copy(move)
                    self._transport.stop(move)
                case records.Freeze(move, handle):
                    if not self._scheduler.freeze(handle):
                        self._execute(self.source.failed(move, "unknown", "the request does not run"), now)
                case records.Unfreeze(_, handle):
                    self._scheduler.thaw(handle)
                case records.ReleaseMoved(_, handle):
                    self._end_request(handle)
                case records.Reserve():
                    self._reserve(action, now)
                case records.Drop(move):
                    self._free(move)
                case _:
                    assert_never(action)

    def _start_copy(self, action: records.StartCopy, now: float) -> None:
        order, copy = action.order, self._copies.get(action.order.move)
        running = None if copy is None else self._scheduler.running_request(copy.handle)
        num_addresses = len(order.prepared.addresses)
        if running is None or copy is None:
            self._execute(self.source.failed(order.move, "preempted", "it lost its pages"), now)
        elif num_addresses != self._num_ranks:
            why = f"the target has {num_addresses} ranks, this group {self._num_ranks}"
            self._execute(self.source.failed(order.move, "incompatible", why), now)
        else:
            pages = list(running.pages[action.first : action.end])
            num_null = pages.count(NULL_PAGE)  # the target needs no page that was dropped here
            start, end = action.first * self._page_size, action.end * self._page_size
            copy.drafted = drafted_when_sent(copy.drafted, start, end, running.num_drafted)
            # Plans in flight may write shared pages: the copy follows the last planned step.
            step, row = self._scheduler.planned_step, page_orders.NO_ROW if action.num_computed is None else running.row
            first, sent = action.first + num_null, pages[num_null:]
            parts = self._scheduler.pool.parts
            self._transport.send(
                order,
                page_orders.PageCopy(
                    first=first,
                    pages=sent,
                    step=step,
                    num_computed=action.num_computed,
                    num_drafted=copy.drafted,
                    parts=[] if parts is None else parts.in_window(sent, first, running.num_computed),
                    row=row,
                ),
            )

    # Ranks accept pages before the source gets addresses, and stop before pages return to the pool.

    def _reserve(self, action: records.Reserve, now: float) -> None:
        move = action.order.move
        order = action.order
        reservation = self._scheduler.reservations.reserve(move, order.request, action.num_tokens, order.num_computed)
        if isinstance(reservation, Refusal):
            self._execute(self.target.refused(move, reservation.code, reservation.message, now), now)
            return
        key, num_held = secrets.token_bytes(KEY_BYTES), reservation.num_held
        # Plans in flight may copy freed pages to or from host memory: arriving pages follow the last planned step.
        pages, step, parts = reservation.pages[num_held:], self._scheduler.planned_step, self._scheduler.pool.parts
        window = self._scheduler.window if parts is None else parts.window.tokens
        part_ids = [] if parts is None else parts.from_position(pages, num_held, reservation.part_start)
        row = reservation.row if self._scheduler.has_states else page_orders.NO_ROW
        self._transport.expect(
            page_orders.ExpectPages(
                move=move, key=key, first=num_held, pages=pages, step=step, window=window, parts=part_ids, row=row
            )
        )
        addresses = list(self._transport.addresses)
        size = self._page_size
        reserved = PageReservation(num_held * size, len(reservation.pages) * size, addresses, key)
        self._opening[move] = reserved, set(range(1, self._num_ranks))
        self._rank_accepts(move, 0, now)

    def _rank_accepts(self, move: str, rank: int, now: float) -> None:
        reserved, pending = self._opening.get(move, (None, set[int]()))
        pending.discard(rank)
        if reserved is not None and not pending:
            del self._opening[move]
            self._execute(self.target.reserved(move, reserved, now), now)

    def _free(self, move: str) -> None:
        if self._scheduler.reservations.get(move) is not None and move not in self._closing:
            self._closing[move] = set(range(self._num_ranks))
            self._transport.forget(move)

    def _rank_closed(self, move: str, rank: int) -> None:
        open_ranks = self._closing.get(move)
        if open_ranks is not None:
            open_ranks.discard(rank)
            if not open_ranks:
                del self._closing[move]
                self._scheduler.reservations.drop(move)
