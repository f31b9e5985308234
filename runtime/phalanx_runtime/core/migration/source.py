"""State machine of a request that leaves its leader: rounds of copies, the freeze, and the end of the move.

    COPYING    full pages are copied in rounds while the request computes
    STOPPING   no new step has the request; a running one may
    FROZEN     its last pages are being copied or have arrived

    start -> COPYING -> STOPPING -> FROZEN -> Release: it ends here        Thaw, a failure, the lease: it continues here

A round copies the pages that became full during the previous one, until little is left, or as much as before. Continuing is
always safe: the router delivers only tokens of its journal's epoch.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from phalanx_api import moves
from phalanx_runtime.core.migration.records import (
    DEFAULT_LIMITS,
    Freeze,
    MoveLimits,
    ReleaseMoved,
    RequestProgress,
    SendFrame,
    SourceAction,
    StartCopy,
    StopCopy,
    Unfreeze,
)


class SourceState(Enum):
    """State of one move."""

    COPYING = "copying"
    STOPPING = "stopping"
    FROZEN = "frozen"


@dataclass(slots=True, kw_only=True)
class _SourceMove:
    """One move. Pages [0, sent) are at the target, [sent, end) are being copied."""

    order: moves.MoveOut
    sent: int
    state: SourceState = SourceState.COPYING
    end: int = 0
    num_rounds: int = 0
    copy_started_s: float = 0.0
    left_before: int | None = None
    """Pages left at the start of the last round."""
    pages_per_s: float | None = None
    """Measured rate, after the first copy."""
    deadline: float = 0.0


class SourceMoves:
    """All moves out of one leader, at most one per request."""

    def __init__(self, page_size: int, limits: MoveLimits = DEFAULT_LIMITS) -> None:
        self._page_size = page_size
        self._limits = limits
        self._moves: dict[str, _SourceMove] = {}
        self._move_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def deadline(self) -> float | None:
        """Time of the next `tick`, if there are moves."""
        return min((outgoing.deadline for outgoing in self._moves.values()), default=None)

    @property
    def handles(self) -> Collection[int]:
        """The requests that are leaving."""
        return self._move_of.keys()

    def is_moving(self, handle: int) -> bool:
        """Returns whether this request is leaving."""
        return handle in self._move_of

    def move_of(self, handle: int) -> str | None:
        """Returns the move of this request, if it is leaving."""
        return self._move_of.get(handle)

    def start(self, order: moves.MoveOut, epoch: int | None, progress: RequestProgress | None, now: float) -> list[SourceAction]:
        """Starts a move. `epoch` and `progress` describe the request, if it exists."""
        if order.move in self._moves:
            return []
        if progress is None or epoch != order.epoch:
            why = f"no request with handle {order.handle} in epoch {order.epoch}"
            return [SendFrame(moves.MoveFailed(order.move, "unknown", why), why)]
        actions: list[SourceAction] = []
        previous = self._move_of.get(order.handle)
        if previous is not None:
            actions += self._cancel(previous, "replaced", f"{order.move} replaces it")
        outgoing = _SourceMove(order=order, sent=order.prepared.cached_tokens // self._page_size)
        self._moves[order.move] = outgoing
        self._move_of[order.handle] = order.move
        return actions + self._next(outgoing, progress, now)

    def copied(self, move: str, end: int, progress: RequestProgress, now: float) -> list[SourceAction]:
        """Records that every rank of the target has the pages before `end`."""
        outgoing = self._moves.get(move)
        if outgoing is None or end <= outgoing.sent:
            return []
        if now > outgoing.copy_started_s:
            outgoing.pages_per_s = (end - outgoing.sent) / (now - outgoing.copy_started_s)
        outgoing.sent, outgoing.copy_started_s = end, now
        if outgoing.state is not SourceState.COPYING:
            return []
        outgoing.deadline = now + self._limits.stall_s
        return [] if end < outgoing.end else self._next(outgoing, progress, now)

    def stopped(self, move: str, num_output: int, progress: RequestProgress, now: float) -> list[SourceAction]:
        """Records that no step has the request, and that all its tokens were sent."""
        outgoing = self._moves.get(move)
        if outgoing is None or outgoing.state is not SourceState.STOPPING:
            return []
        capacity = outgoing.order.prepared.capacity_tokens
        num_computed = min(progress.num_computed, capacity) if capacity else progress.num_computed
        end = max(outgoing.sent, -(-num_computed // self._page_size))
        tail_s = self._tail_s(outgoing, end - outgoing.sent)
        outgoing.state, outgoing.end, outgoing.copy_started_s = SourceState.FROZEN, end, now
        outgoing.deadline = now + self._limits.frozen_s + outgoing.order.answer_s + 2 * tail_s
        order, why = outgoing.order, f"frozen with {num_output} output tokens"
        frozen = moves.Frozen(move=move, epoch=order.epoch, num_output=num_output, num_computed=num_computed, tail_s=tail_s)
        return [SendFrame(frozen, why), StartCopy(order=order, first=outgoing.sent, end=end, num_computed=num_computed, why=why)]

    def failed(self, move: str, code: str, why: str) -> list[SourceAction]:
        """Records that the copy failed."""
        return self._cancel(move, code, why) if move in self._moves else []

    def thaw(self, move: str) -> list[SourceAction]:
        """Ends the move; the request continues."""
        outgoing = self._remove(move)
        return [] if outgoing is None else self._continue(outgoing, "the router cancelled the move")

    def release(self, move: str) -> list[SourceAction]:
        """Ends the request here."""
        outgoing = self._remove(move)
        if outgoing is None:
            return []
        why = "it runs at the target"
        return [StopCopy(move, why), ReleaseMoved(move, outgoing.order.handle, why)]

    def ended(self, handle: int, code: str, why: str) -> list[SourceAction]:
        """Ends the move of a request that finished, was aborted or lost its pages."""
        move = self._move_of.get(handle)
        if move is None:
            return []
        self._remove(move)
        return [StopCopy(move, why), SendFrame(moves.MoveFailed(move, code, why), why)]

    def tick(self, now: float) -> list[SourceAction]:
        """Ends overdue moves."""
        late = {move: _overdue_reason(outgoing) for move, outgoing in self._moves.items() if outgoing.deadline <= now}
        return [action for move, why in late.items() for action in self._cancel(move, "lease", why)]

    def _next(self, outgoing: _SourceMove, progress: RequestProgress, now: float) -> list[SourceAction]:
        """Starts the next round or the freeze, or cancels the move."""
        limits, order = self._limits, outgoing.order
        num_full = progress.num_computed // self._page_size
        left = max(0, -(-progress.num_computed // self._page_size) - outgoing.sent)
        tail_s = self._tail_s(outgoing, left)
        capacity = order.prepared.capacity_tokens
        if order.mode == "stop":
            return self._freeze(outgoing, now, "the mode of the move is stop")
        if left <= limits.tail_pages:
            return self._freeze(outgoing, now, f"{left} pages are left")
        if outgoing.pages_per_s is not None and tail_s <= progress.step_s:
            return self._freeze(outgoing, now, f"{left} pages take less than a step")
        if capacity and progress.num_tokens + limits.growth_tokens // 2 > capacity:
            return self._freeze(outgoing, now, "the reserved pages at the target are nearly full")
        grows = outgoing.left_before is not None and left >= outgoing.left_before
        if outgoing.num_rounds >= limits.max_rounds or grows:
            why = f"{left} pages are left after {outgoing.num_rounds} rounds"
            if tail_s <= limits.max_tail_s:
                return self._freeze(outgoing, now, why)
            return self._cancel(order.move, "not_converging", why)
        outgoing.num_rounds += 1
        outgoing.left_before, outgoing.end, outgoing.copy_started_s = left, num_full, now
        outgoing.deadline = now + limits.stall_s
        why = f"round {outgoing.num_rounds}: {num_full - outgoing.sent} full pages"
        return [StartCopy(order=order, first=outgoing.sent, end=num_full, num_computed=None, why=why)]

    def _freeze(self, outgoing: _SourceMove, now: float, why: str) -> list[SourceAction]:
        outgoing.state = SourceState.STOPPING
        outgoing.deadline = now + self._limits.stall_s
        return [Freeze(outgoing.order.move, outgoing.order.handle, why)]

    def _tail_s(self, outgoing: _SourceMove, pages: int) -> float:
        """Returns the time of the last copy, states included."""
        return (pages + self._limits.state_pages) / (outgoing.pages_per_s or self._limits.initial_pages_per_s)

    def _cancel(self, move: str, code: str, why: str) -> list[SourceAction]:
        outgoing = self._remove(move)
        assert outgoing is not None, "the caller checked that the move exists"
        return [*self._continue(outgoing, why), SendFrame(moves.MoveFailed(move, code, why), why)]

    def _continue(self, outgoing: _SourceMove, why: str) -> list[SourceAction]:
        order = outgoing.order
        actions: list[SourceAction] = [StopCopy(order.move, why)]
        if outgoing.state is not SourceState.COPYING:
            actions.append(Unfreeze(order.move, order.handle, why))
        return actions

    def _remove(self, move: str) -> _SourceMove | None:
        outgoing = self._moves.pop(move, None)
        if outgoing is not None:
            del self._move_of[outgoing.order.handle]
        return outgoing


def _overdue_reason(outgoing: _SourceMove) -> str:
    if outgoing.state is SourceState.FROZEN:
        return "neither Thaw nor Release arrived in time"
    return "the copy makes no progress" if outgoing.state is SourceState.COPYING else "a running step keeps the request too long"
