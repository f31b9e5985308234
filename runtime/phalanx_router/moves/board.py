"""Registry of all moves of one router: finds the move of a frame or event. Each stream has at most one open move.

An ended move is remembered for `linger_s` to answer late frames: Thaw or Cancel if it was given up, Release if it was committed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx_api import moves, wire
from phalanx_router.moves.machine import Move
from phalanx_router.moves.records import Action, MoveRequest, MoveSettings, StreamPosition

Frame = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed


@dataclass(frozen=True, slots=True)
class MoveStep:
    """One action to execute for a move."""

    proposal: MoveRequest
    action: Action


class MoveBoard:
    """Moves by name. `make` creates the state machine of a move; tests replace it."""

    def __init__(self, settings: MoveSettings | None = None, make: Callable[[MoveRequest, MoveSettings], Move] = Move) -> None:
        self.settings = settings or MoveSettings()
        self._make = make
        self._moves: dict[str, Move] = {}

    def open(self) -> list[MoveRequest]:
        """Returns the moves that have not ended."""
        return [move.proposal for move in self._moves.values() if not move.is_over]

    def is_committed(self, name: str) -> bool:
        """Whether the move is committed: the target has the stream."""
        return name in self._moves and self._moves[name].is_committed

    def num_out(self, key: str) -> int:
        """Returns the number of open moves out of this group."""
        return sum(proposal.at.key == key for proposal in self.open())

    def num_in(self, key: str) -> int:
        """Returns the number of open moves into this group."""
        return sum(proposal.target == key for proposal in self.open())

    @property
    def deadline(self) -> float | None:
        """Time of the next necessary `tick`."""
        return min((move.deadline for move in self._moves.values() if move.deadline is not None), default=None)

    def start(self, proposal: MoveRequest, request: wire.Request, now: float) -> list[MoveStep]:
        """Starts a move. Its name must be new and its stream must have no open move."""
        assert proposal.move not in self._moves, f"{proposal.move} is in use"
        move = self._moves[proposal.move] = self._make(proposal, self.settings)
        return _todo(move, move.start(request, now))

    def take(self, key: str, frame: Frame, at: StreamPosition | None, now: float) -> list[MoveStep]:
        """Handles a frame from the leader on link `key`. `at`: current location of the stream; `None` if it has ended."""
        move = self._moves.get(frame.move)
        if move is None:
            return []
        is_source, is_target = key == move.proposal.at.key, key == move.proposal.target
        match frame:
            case moves.Prepared() if is_target:
                return _todo(move, move.prepared(frame, at, now))
            case moves.Arrived() if is_target:
                return _todo(move, move.arrived(frame, at, now))
            case moves.Frozen() if is_source:
                return _todo(move, move.frozen(frame, at, now))
            case moves.MoveFailed() if is_target:
                return _todo(move, move.refused_by_target(frame.code, frame.why, now))
            case moves.MoveFailed() if is_source:
                return _todo(move, move.refused_by_source(frame.code, frame.why, now))
            case _:
                return []  # not a frame that this leader may send about this move

    def warmed(self, name: str, why: str, at: StreamPosition | None, now: float) -> list[MoveStep]:
        """Handles the end of the target's prefix computation."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.warmed(why, at, now))

    def refused(self, name: str, code: str, why: str, now: float) -> list[MoveStep]:
        """Handles the target's refusal to compute the prefix."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.refused_by_target(code, why, now))

    def submitted(self, name: str, handle: int) -> None:
        """Records the handle of the committed stream at the target."""
        self._moves[name].submitted(handle)

    def first_token(self, name: str, now: float) -> list[MoveStep]:
        """Handles the delivery of the target's first token."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.first_token(now))

    def reported(self, key: str, last_handle: int, now: float) -> None:
        """Handles a load report of the group `key`."""
        for move in self._moves.values():
            if move.is_committed and move.proposal.target == key:
                move.reported(last_handle, now)

    def link_lost(self, key: str, why: str, now: float) -> list[MoveStep]:
        """Handles the loss of a link or of the incarnation at its other end."""
        todo: list[MoveStep] = []
        for move in self._moves.values():
            if move.proposal.target == key:
                todo += _todo(move, move.target_lost(why, now))
            elif move.proposal.at.key == key:
                todo += _todo(move, move.source_lost(why, now))
        return todo

    def target_lost(self, move: str, why: str, now: float) -> list[MoveStep]:
        """Handles a target that accepts no more requests; moves out of that group continue."""
        one = self._moves.get(move)
        return [] if one is None else _todo(one, one.target_lost(why, now))

    def stream_over(self, name: str, why: str, now: float) -> list[MoveStep]:
        """Handles a stream that ended or left its group for another reason."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.stream_over(why, now))

    def tick(self, now: float) -> list[MoveStep]:
        """Handles expired deadlines and removes ended moves after `linger_s`."""
        due = [move for move in self._moves.values() if move.deadline is not None and move.deadline <= now]
        todo: list[MoveStep] = []
        for move in due:
            if move.is_over:
                del self._moves[move.proposal.move]
            else:
                todo += _todo(move, move.tick(now))
        return todo


def _todo(move: Move, actions: Iterable[Action]) -> list[MoveStep]:
    return [MoveStep(move.proposal, action) for action in actions]
