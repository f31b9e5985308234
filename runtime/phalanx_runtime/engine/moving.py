"""Moves in the engine: state machines (`core.migration`) decide, scheduler and ranks execute.

    frames of routers, reports of ranks, time  ->  machines  ->  freeze, reserve, send, expect, forget  and frames to routers

Reserved pages return to the pool only after every rank has reported that it no longer writes them. A request that loses its pages
during the copy is not moved: the copy is invalid, and its last round is never sent.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from phalanx_api import moves, wire
from phalanx_runtime.core.admission import Refuse
from phalanx_runtime.core.migration import page_orders as copying
from phalanx_runtime.core.migration import records as do
from phalanx_runtime.core.migration.rescue import Rescue
from phalanx_runtime.core.migration.source import SourceMoves
from phalanx_runtime.core.migration.target import PageReservation, TargetMoves
from phalanx_runtime.core.scheduling.scheduler import RunningRequest, Scheduler
from phalanx_runtime.core.speculation.draft_backfill import drafted_when_sent
from phalanx_runtime.engine.ports import PageTransport

log = logging.getLogger(__name__)

KEY_BYTES = 32
COPY_FOLLOW, STEP_FOLLOW = 0.3, 0.1
"""Smoothing factors (weight of the latest sample) of the copy rate and of the step time."""
Action = do.SourceAction | do.TargetAction
MoveOrder = wire.Prepare | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel


@dataclass(slots=True)
class _Outgoing:
    """An outgoing request."""

    handle: int
    losses: int
    """Number of times it had lost its pages when the move began."""
    drafted: int | None = None
    """Leading tokens for which the sent pages contain the draft model's KV."""
    ends: dict[int, int] = field(default_factory=dict)
    """Tokens that each rank has sent."""


class EngineMoves:
    """The moves of one engine. `tell` sends a frame to the HTTP process; `forget` ends a request without a frame.

    All calls come from the loop's thread, between steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        carrier: PageTransport,
        tell: Callable[[wire.FromEngine], None],
        forget: Callable[[int], None],
        limits: do.MoveLimits | None = None,
    ) -> None:
        self.num_refused = 0
        """Number of refused KV transfer connections."""
        self._step_s = 0.0
        self._step = 0
        self._limits = limits or do.MoveLimits()
        self._size = scheduler.pool.page_size
        self._scheduler = scheduler
        self._carrier = carrier
        self._tell = tell
        self._forget = forget
        self._num_ranks = len(carrier.addresses)
        self._out = SourceMoves(self._size, self._limits)
        self._in = TargetMoves(self._num_ranks, self._limits)
        self._outgoing: dict[str, _Outgoing] = {}
        self._opening: dict[str, tuple[PageReservation, set[int]]] = {}
        """Moves with reserved pages, and the ranks that do not accept their pages yet."""
        self._closing: dict[str, set[int]] = {}
        """Moves whose pages are being returned, and the ranks that may still write them."""
        self._pages_per_s = self._limits.slow_pages_per_s
        self._rescue = Rescue()

    @property
    def deadline(self) -> float | None:
        """Latest time of the next `turn`; None if no move is pending."""
        return min((at for at in (self._out.deadline, self._in.deadline) if at is not None), default=None)

    def obey(self, frame: MoveOrder, now: float) -> None:
        """Executes a router's frame; its handle is the engine's."""
        match frame:
            case moves.MoveOut():
                self._move_out(frame, now)
            case moves.Thaw(move):
                self._act(self._out.thaw(move), now)
            case moves.Release(move):
                self._act(self._out.release(move), now)
            case wire.Prepare():
                self._act(self._in.prepare(frame, now), now)
            case moves.Cancel(move):
                self._act(self._in.cancel(move, now), now)

    def submit(self, handle: int, request: wire.Request, move: str, now: float) -> bool:
        """Whether transferred pages exist for this request, so that the scheduler can start it on them; then call `began`."""
        begin, actions = self._in.submit(handle, request, move, now)
        self._act(actions, now)
        if begin is None:
            log.info("a moved request is recomputed", extra={"move": move})
            return False
        self._scheduler.reservations.arrived(move, begin.num_computed)
        return True

    def began(self, move: str) -> None:
        """Call after the scheduler accepted or rejected a request on these pages."""
        if self._scheduler.reservations.get(move) is None:
            self._carrier.forget(move)  # the transfer is complete
        else:
            self._drop(move)

    def stepped(self, step: int, wall_s: float, ended: Sequence[int], now: float) -> None:
        """Records a committed step; requests in `ended` have ended. Requests rescues if the page pool is about to be
        exhausted."""
        self._step = step
        self._step_s += STEP_FOLLOW * (wall_s - self._step_s)
        for handle in ended:
            self._ended(handle, "it finished", now)
        self._ask_rescue(now)

    def request_left(self, handle: int, now: float) -> None:
        """Ends the moves of a request that has left: another group owns it, or its client disconnected."""
        self._rescue.left(handle, now)
        self._ended(handle, "it was aborted", now)

    def _ended(self, handle: int, why: str, now: float) -> None:
        if self._out.is_moving(handle):
            self._act(self._out.ended(handle, "ended", why), now)

    def turn(self, now: float) -> None:
        """Handles reports and timeouts. Called between steps, before the next is planned."""
        for rank, report in self._carrier.reports():
            self._heard(rank, report, now)
        for move, outgoing in list(self._outgoing.items()):
            held = self._scheduler.held_by(outgoing.handle)
            if held is None or held.num_losses != outgoing.losses:
                self._act(self._out.ended(outgoing.handle, "preempted", "it lost its pages"), now)
            elif held.is_settled:
                self._act(self._out.stopped(move, held.num_output, self._progress(held), now), now)
        self._act(self._out.tick(now), now)
        self._act(self._in.tick(now), now)

    def _ask_rescue(self, now: float) -> None:
        pressure = self._scheduler.pressure(self._pages_per_s)
        if pressure is None:
            return
        if handles := self._rescue.victims(pressure, self._out.handles, now):
            self._tell(moves.AskRescue(handles, pressure.steps_to_full * pressure.step_s))

    def _move_out(self, asked: moves.MoveOut, now: float) -> None:
        held = self._scheduler.held_by(asked.handle)
        epoch = None if held is None else self._scheduler.epoch_of(asked.handle)
        if (
            held is not None and epoch == asked.epoch and asked.move not in self._outgoing
        ):  # a repeated MoveOut keeps the recorded losses
            self._outgoing[asked.move] = _Outgoing(asked.handle, held.num_losses)
        self._act(self._out.ask(asked, epoch, None if held is None else self._progress(held), now), now)
        if not self._out.is_moving(asked.handle):
            self._outgoing.pop(asked.move, None)

    def _heard(self, rank: int, report: copying.Report, now: float) -> None:
        """Handles a report of one rank."""
        match report:
            case copying.PagesSent():
                self._sent(rank, report, now)
            case copying.SendFailed(move, code, why):
                self._act(self._out.failed(move, code, f"rank {rank}: {why}"), now)
            case copying.Expecting(move):
                self._expecting(move, rank, now)
            case copying.PagesReceived(move, num_bytes, num_computed, num_drafted):
                if num_drafted:
                    self._scheduler.reservations.drafted(move, num_drafted)
                self._act(self._in.came(move, rank, num_bytes, num_computed, now), now)
            case copying.ReceiveFailed(move, code, why):
                self._act(self._in.failed(move, code, f"rank {rank}: {why}", now), now)
            case copying.Forgotten(move):
                self._forgotten(move, rank)
            case copying.PeerRefused(why):
                self.num_refused += 1
                log.warning("KV transfer connection refused", extra={"rank": rank, "why": why})
            case _:
                assert_never(report)

    def _sent(self, rank: int, sent: copying.PagesSent, now: float) -> None:
        outgoing = self._outgoing.get(sent.move)
        held = None if outgoing is None else self._scheduler.held_by(outgoing.handle)
        if outgoing is None or held is None:
            return
        before = outgoing.ends.get(rank, sent.end)
        if sent.end > before and sent.wall_s > 0:
            self._pages_per_s += COPY_FOLLOW * ((sent.end - before) / sent.wall_s - self._pages_per_s)
        outgoing.ends[rank] = sent.end
        if len(outgoing.ends) == self._num_ranks:
            self._act(self._out.copied(sent.move, min(outgoing.ends.values()), self._progress(held), now), now)

    def _forgotten(self, move: str, rank: int) -> None:
        left = self._closing.get(move)
        if left is not None:
            left.discard(rank)
            if not left:
                del self._closing[move]
                self._scheduler.reservations.drop(move)

    def _progress(self, held: RunningRequest) -> do.RequestProgress:
        return do.RequestProgress(held.num_tokens, held.computed, self._step_s)

    def _act(self, actions: Sequence[Action], now: float) -> None:
        """Executes actions in order; some cause further ones."""
        for action in actions:
            log.debug("move", extra={"action": type(action).__name__, "why": action.why})
            match action:
                case do.SendFrame(frame):
                    self._tell(frame)
                case do.StartCopy():
                    self._start_copy(action, now)
                case do.StopCopy(move):
                    self._outgoing.pop(move, None)
                    self._carrier.stop(move)
                case do.Freeze(move, handle):
                    if not self._scheduler.freeze(handle):
                        self._act(self._out.failed(move, "unknown", "the request does not run"), now)
                case do.Unfreeze(_, handle):
                    self._scheduler.thaw(handle)
                case do.ReleaseMoved(_, handle):
                    self._forget(handle)
                case do.Reserve():
                    self._reserve(action, now)
                case do.Drop(move):
                    self._drop(move)
                case _:
                    assert_never(action)

    def _start_copy(self, action: do.StartCopy, now: float) -> None:
        asked, outgoing = action.asked, self._outgoing.get(action.asked.move)
        held = None if outgoing is None else self._scheduler.held_by(outgoing.handle)
        if held is None or outgoing is None:
            self._act(self._out.failed(asked.move, "preempted", "it lost its pages"), now)
        elif len(asked.prepared.addresses) != self._num_ranks:
            why = f"the target has {len(asked.prepared.addresses)} ranks, this group {self._num_ranks}"
            self._act(self._out.failed(asked.move, "incompatible", why), now)
        else:
            pages = list(held.pages[action.first : action.end])
            first, end = action.first * self._size, action.end * self._size
            outgoing.drafted = drafted_when_sent(outgoing.drafted, first, end, held.num_drafted)
            # A plan in flight may write shared pages, so the copy follows the last planned step.
            step = self._scheduler.planned_step
            self._carrier.send(asked, action.first, pages, step, action.num_computed, num_drafted=outgoing.drafted)

    def _reserve(self, action: do.Reserve, now: float) -> None:
        move = action.asked.move
        answer = self._scheduler.reservations.reserve(move, action.asked.request, action.num_tokens)
        if isinstance(answer, Refuse):
            self._act(self._in.refused(move, answer.code, answer.message, now), now)
            return
        key = secrets.token_bytes(KEY_BYTES)
        self._carrier.expect(move, key, answer.num_held, answer.pages[answer.num_held :], self._step)
        addresses = list(self._carrier.addresses)
        reserved = PageReservation(answer.num_held * self._size, len(answer.pages) * self._size, addresses, key)
        self._opening[move] = reserved, set(range(1, self._num_ranks))
        self._expecting(move, 0, now)

    def _expecting(self, move: str, rank: int, now: float) -> None:
        """Records that a rank accepts pages of this move. The source is notified once all do, since others would refuse it."""
        reserved, left = self._opening.get(move, (None, set[int]()))
        left.discard(rank)
        if reserved is not None and not left:
            del self._opening[move]
            self._act(self._in.reserved(move, reserved, now), now)

    def _drop(self, move: str) -> None:
        """Returns reserved pages once no rank can write them."""
        if self._scheduler.reservations.get(move) is not None and move not in self._closing:
            self._closing[move] = set(range(self._num_ranks))
            self._carrier.forget(move)
