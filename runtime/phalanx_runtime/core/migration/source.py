"""State machine of a request that leaves its leader: rounds of copies, the freeze, and the end of the move.

    COPYING    full pages are copied while the request computes, round by round
    STOPPING   no new step has it; a running one may
    FROZEN     it computes nothing, its last pages are being copied or have arrived; Thaw, Release or the lease decides

    ask -> COPYING -> STOPPING -> FROZEN -> Release: it ends here        Thaw, a failure, the lease: it continues here

A round copies the pages that became full during the round before. Rounds end when little is left, or as much as before. To
continue is always safe: the router delivers a token only in the epoch of its journal.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from phalanx_api import moves
from phalanx_runtime.core.migration.records import (
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
    """One move. Pages [0, sent) are at the target; [sent, end) are being copied."""

    asked: moves.MoveOut
    sent: int
    state: SourceState = SourceState.COPYING
    end: int = 0
    rounds: int = 0
    began: float = 0.0
    left_before: int | None = None
    pages_per_s: float | None = None
    """Measured rate, after the first copy."""
    deadline: float = 0.0


class SourceMoves:
    """All moves out of one leader, at most one per request."""

    def __init__(self, page_size: int, limits: MoveLimits | None = None) -> None:
        self._size = page_size
        self._limits = limits or MoveLimits()
        self._moves: dict[str, _SourceMove] = {}
        self._of: dict[int, str] = {}
        """The move of a request, by handle."""

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def deadline(self) -> float | None:
        """The latest time of the next `tick`, if there are moves."""
        return min((out.deadline for out in self._moves.values()), default=None)

    @property
    def handles(self) -> Collection[int]:
        """The requests that are leaving."""
        return self._of.keys()

    def is_moving(self, handle: int) -> bool:
        """Returns whether this request is leaving."""
        return handle in self._of

    def move_of(self, handle: int) -> str | None:
        """Returns the move of this request, if it is leaving."""
        return self._of.get(handle)

    def ask(self, asked: moves.MoveOut, epoch: int | None, at: RequestProgress | None, now: float) -> list[SourceAction]:
        """Starts a move for a router. `epoch` and `at` describe the request with that handle, if it exists."""
        if asked.move in self._moves:
            return []
        if at is None or epoch != asked.epoch:
            why = f"no request with handle {asked.handle} in epoch {asked.epoch}"
            return [SendFrame(moves.MoveFailed(asked.move, "unknown", why), why)]
        actions: list[SourceAction] = []
        before = self._of.get(asked.handle)
        if before is not None:
            actions += self._give_up(before, "replaced", f"{asked.move} takes its place")
        out = self._moves[asked.move] = _SourceMove(asked=asked, sent=asked.prepared.held_tokens // self._size)
        self._of[asked.handle] = asked.move
        return actions + self._next(out, at, now)

    def copied(self, move: str, end: int, at: RequestProgress, now: float) -> list[SourceAction]:
        """Records that every rank of the target has the pages before `end`; a part of the copy may be left."""
        out = self._moves.get(move)
        if out is None or end <= out.sent:
            return []
        if now > out.began:
            out.pages_per_s = (end - out.sent) / (now - out.began)
        out.sent, out.began = end, now
        if out.state is not SourceState.COPYING:
            return []
        out.deadline = now + self._limits.stall_s
        return [] if end < out.end else self._next(out, at, now)

    def stopped(self, move: str, num_output: int, at: RequestProgress, now: float) -> list[SourceAction]:
        """Records that no step has the request to freeze, and that all its tokens were sent."""
        out = self._moves.get(move)
        if out is None or out.state is not SourceState.STOPPING:
            return []
        room = out.asked.prepared.room_tokens
        num_computed = min(at.num_computed, room) if room else at.num_computed
        end = max(out.sent, -(-num_computed // self._size))
        tail_s = self._time(out, end - out.sent)
        out.state, out.end, out.began = SourceState.FROZEN, end, now
        out.deadline = now + self._limits.frozen_s + 2 * tail_s
        frozen = moves.Frozen(move=move, epoch=out.asked.epoch, num_output=num_output, num_computed=num_computed, tail_s=tail_s)
        why = f"frozen with {num_output} output tokens"
        return [SendFrame(frozen, why), StartCopy(asked=out.asked, first=out.sent, end=end, num_computed=num_computed, why=why)]

    def failed(self, move: str, code: str, why: str) -> list[SourceAction]:
        """Records that the copy failed."""
        return self._give_up(move, code, why) if move in self._moves else []

    def thaw(self, move: str) -> list[SourceAction]:
        """Ends the move for the router; the request continues."""
        out = self._forget(move)
        return [] if out is None else self._go_on(out, "the router gave the move up")

    def release(self, move: str) -> list[SourceAction]:
        """Ends the request here: it runs at the target."""
        out = self._forget(move)
        if out is None:
            return []
        why = "it runs elsewhere"
        return [StopCopy(move, why), ReleaseMoved(move, out.asked.handle, why)]

    def ended(self, handle: int, code: str, why: str) -> list[SourceAction]:
        """Ends the move of a request that ended, was aborted or lost its pages."""
        move = self._of.get(handle)
        if move is None:
            return []
        self._forget(move)
        return [StopCopy(move, why), SendFrame(moves.MoveFailed(move, code, why), why)]

    def tick(self, now: float) -> list[SourceAction]:
        """Ends overdue moves."""
        late = [move for move, out in self._moves.items() if out.deadline <= now]
        return [action for move in late for action in self._give_up(move, "lease", self._late(self._moves[move]))]

    def _next(self, out: _SourceMove, at: RequestProgress, now: float) -> list[SourceAction]:
        """Starts the next round or the freeze, or ends a copy that does not converge."""
        limits = self._limits
        full = at.num_computed // self._size
        left = max(0, -(-at.num_computed // self._size) - out.sent)
        rest_s = self._time(out, left)
        room = out.asked.prepared.room_tokens
        if out.asked.mode == "stop":
            return self._freeze(out, now, "the move is asked to stop it")
        if left <= limits.tail_pages:
            return self._freeze(out, now, f"{left} pages are left")
        if out.pages_per_s is not None and rest_s <= at.step_s:
            return self._freeze(out, now, f"{left} pages take less than a step")
        if room and at.num_tokens + limits.growth_tokens // 2 > room:
            return self._freeze(out, now, "the room at the target is nearly full")
        grows = out.left_before is not None and left >= out.left_before
        if out.rounds >= limits.max_rounds or grows:
            if rest_s <= limits.longest_tail_s:
                return self._freeze(out, now, f"{left} pages are left after {out.rounds} rounds")
            return self._give_up(out.asked.move, "not_converging", f"{left} pages are left after {out.rounds} rounds")
        out.rounds += 1
        out.left_before, out.end, out.began = left, full, now
        out.deadline = now + limits.stall_s
        return [
            StartCopy(
                asked=out.asked,
                first=out.sent,
                end=full,
                num_computed=None,
                why=f"round {out.rounds}: {full - out.sent} full pages",
            )
        ]

    def _freeze(self, out: _SourceMove, now: float, why: str) -> list[SourceAction]:
        out.state = SourceState.STOPPING
        out.deadline = now + self._limits.stall_s
        return [Freeze(out.asked.move, out.asked.handle, why)]

    def _time(self, out: _SourceMove, pages: int) -> float:
        """Returns the time to copy this number of pages."""
        return pages / (out.pages_per_s or self._limits.slow_pages_per_s)

    def _late(self, out: _SourceMove) -> str:
        if out.state is SourceState.FROZEN:
            return "neither Thaw nor Release came in time"
        return "the copy does not get on" if out.state is SourceState.COPYING else "the request does not leave its step"

    def _give_up(self, move: str, code: str, why: str) -> list[SourceAction]:
        out = self._forget(move)
        assert out is not None, "the caller looked"
        return [*self._go_on(out, why), SendFrame(moves.MoveFailed(move, code, why), why)]

    def _go_on(self, out: _SourceMove, why: str) -> list[SourceAction]:
        """Returns the actions that let the request continue."""
        actions: list[SourceAction] = [StopCopy(out.asked.move, why)]
        if out.state is not SourceState.COPYING:
            actions.append(Unfreeze(out.asked.move, out.asked.handle, why))
        return actions

    def _forget(self, move: str) -> _SourceMove | None:
        out = self._moves.pop(move, None)
        if out is not None:
            del self._of[out.asked.handle]
        return out
