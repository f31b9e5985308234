"""Moves as the engine acts them out: machines (`core.moving_source`, `core.moving_target`) decide, scheduler and ranks do.

    frames of routers, reports of ranks, time  ->  machines  ->  freeze, reserve, send, expect, forget  and frames to routers

Reserved pages are given to others only after every rank said that it writes them no more. A request that lost its pages while
they were copied is not moved: its copy is worthless, and no last round of it is ever sent.
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
from phalanx_runtime.core.migration.source import MovesOut
from phalanx_runtime.core.migration.target import MovesIn, Reserved
from phalanx_runtime.core.scheduling.scheduler import Held, Scheduler
from phalanx_runtime.core.speculation.draft_backfill import drafted_when_sent
from phalanx_runtime.engine.ports import Carrier

log = logging.getLogger(__name__)

KEY_BYTES = 32
COPY_FOLLOW, STEP_FOLLOW = 0.3, 0.1
"""Weight of the latest copy in the rate of copies, of the latest step in their time."""
Action = do.SourceAction | do.TargetAction
MoveOrder = wire.Prepare | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel


@dataclass(slots=True)
class _Outgoing:
    """A request on its way out: what it had lost when the move began, of how many tokens a draft's part is in the pages that were
    sent, and how far each rank of the target has them."""

    handle: int
    losses: int
    drafted: int | None = None
    ends: dict[int, int] = field(default_factory=dict)


class Moving:
    """The moves of one engine. `tell` sends a frame to the HTTP process; `forget` ends a request without a word.

    All calls come from the loop's thread, between steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        carrier: Carrier,
        tell: Callable[[wire.FromEngine], None],
        forget: Callable[[int], None],
        limits: do.MoveLimits | None = None,
    ) -> None:
        self.num_refused = 0
        """Connections for pages that were turned away."""
        self._step_s = 0.0
        self._step = 0
        self._limits = limits or do.MoveLimits()
        self._size = scheduler.pool.page_size
        self._scheduler = scheduler
        self._carrier = carrier
        self._tell = tell
        self._forget = forget
        self._num_ranks = len(carrier.addresses)
        self._out = MovesOut(self._size, self._limits)
        self._in = MovesIn(self._num_ranks, self._limits)
        self._outgoing: dict[str, _Outgoing] = {}
        self._opening: dict[str, tuple[Reserved, set[int]]] = {}
        """Moves whose pages are reserved, and the ranks that do not let them in yet."""
        self._closing: dict[str, set[int]] = {}
        """Moves whose pages are given back, and the ranks that have not forgotten them yet."""
        self._pages_per_s = self._limits.slow_pages_per_s
        self._rescue = Rescue()

    @property
    def deadline(self) -> float | None:
        """When `turn` has something to do at the latest, if nothing else happens."""
        return min((at for at in (self._out.deadline, self._in.deadline) if at is not None), default=None)

    def obey(self, frame: MoveOrder, now: float) -> None:
        """A frame of a router. Its handle is the engine's."""
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
        """Whether pages for this request are here, so that the scheduler may start it on them; `began` follows."""
        begin, actions = self._in.submit(handle, request, move, now)
        self._act(actions, now)
        if begin is None:
            log.info("a moved request is computed anew", extra={"move": move})
            return False
        self._scheduler.reservations.arrived(move, begin.num_computed)
        return True

    def began(self, move: str) -> None:
        """The scheduler took a request on these pages, or found that it cannot use them."""
        if self._scheduler.reservations.get(move) is None:
            self._carrier.forget(move)  # nothing comes any more: ranks need not remember
        else:
            self._drop(move)

    def stepped(self, step: int, wall_s: float, ended: Sequence[int], now: float) -> None:
        """A step was committed and its tokens were told; these requests ended. Offers some to others if pages run out soon."""
        self._step = step
        self._step_s += STEP_FOLLOW * (wall_s - self._step_s)
        for handle in ended:
            self._ended(handle, "it ended by itself", now)
        self._ask_rescue(now)

    def unwanted(self, handle: int, now: float) -> None:
        """Nobody wants this request here any more: another group has it, or its client left."""
        self._rescue.left(handle, now)
        self._ended(handle, "nobody wants it any more", now)

    def _ended(self, handle: int, why: str, now: float) -> None:
        if self._out.is_moving(handle):
            self._act(self._out.ended(handle, "ended", why), now)

    def turn(self, now: float) -> None:
        """Does what is due. Called between steps, before the next is planned."""
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
        ):  # asked again: what it lost stays known
            self._outgoing[asked.move] = _Outgoing(asked.handle, held.num_losses)
        self._act(self._out.ask(asked, epoch, None if held is None else self._progress(held), now), now)
        if not self._out.is_moving(asked.handle):
            self._outgoing.pop(asked.move, None)

    def _heard(self, rank: int, report: copying.Report, now: float) -> None:
        """What one rank tells."""
        match report:
            case copying.Sent():
                self._sent(rank, report, now)
            case copying.SendFailed(move, code, why):
                self._act(self._out.failed(move, code, f"rank {rank}: {why}"), now)
            case copying.Expecting(move):
                self._expecting(move, rank, now)
            case copying.Came(move, num_bytes, num_computed, num_drafted):
                if num_drafted:
                    self._scheduler.reservations.drafted(move, num_drafted)
                self._act(self._in.came(move, rank, num_bytes, num_computed, now), now)
            case copying.ComeFailed(move, code, why):
                self._act(self._in.failed(move, code, f"rank {rank}: {why}", now), now)
            case copying.Forgotten(move):
                self._forgotten(move, rank)
            case copying.Refused(why):
                self.num_refused += 1
                log.warning("turned away from the port for pages", extra={"rank": rank, "why": why})
            case _:
                assert_never(report)

    def _sent(self, rank: int, sent: copying.Sent, now: float) -> None:
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

    def _progress(self, held: Held) -> do.Progress:
        return do.Progress(held.num_tokens, held.computed, self._step_s)

    def _act(self, actions: Sequence[Action], now: float) -> None:
        """Does each, in order. What one makes known leads to further ones."""
        for action in actions:
            log.debug("move", extra={"action": type(action).__name__, "why": action.why})
            match action:
                case do.Say(frame):
                    self._tell(frame)
                case do.StartCopy():
                    self._start_copy(action, now)
                case do.StopCopy(move):
                    self._outgoing.pop(move, None)
                    self._carrier.stop(move)
                case do.Freeze(move, handle):
                    if not self._scheduler.freeze(handle):
                        self._act(self._out.failed(move, "unknown", "it does not run"), now)
                case do.Unfreeze(_, handle):
                    self._scheduler.thaw(handle)
                case do.LetGo(_, handle):
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
            # What it shares may be written by a plan in flight, so all of them come first.
            step = self._scheduler.planned_step
            self._carrier.send(asked, action.first, pages, step, action.num_computed, outgoing.drafted)

    def _reserve(self, action: do.Reserve, now: float) -> None:
        move = action.asked.move
        answer = self._scheduler.reservations.reserve(move, action.asked.request, action.num_tokens)
        if isinstance(answer, Refuse):
            self._act(self._in.refused(move, answer.code, answer.message, now), now)
            return
        key = secrets.token_bytes(KEY_BYTES)
        self._carrier.expect(move, key, answer.num_held, answer.pages[answer.num_held :], self._step)
        addresses = list(self._carrier.addresses)
        reserved = Reserved(answer.num_held * self._size, len(answer.pages) * self._size, addresses, key)
        self._opening[move] = reserved, set(range(1, self._num_ranks))
        self._expecting(move, 0, now)

    def _expecting(self, move: str, rank: int, now: float) -> None:
        """A rank lets pages of this move in. Only when all do is the source told: it would be turned away by the others."""
        reserved, left = self._opening.get(move, (None, set[int]()))
        left.discard(rank)
        if reserved is not None and not left:
            del self._opening[move]
            self._act(self._in.reserved(move, reserved, now), now)

    def _drop(self, move: str) -> None:
        """Gives reserved pages back, once all ranks have forgotten the move."""
        if self._scheduler.reservations.get(move) is not None and move not in self._closing:
            self._closing[move] = set(range(self._num_ranks))
            self._carrier.forget(move)
