"""All moves of one router: frames and events find their move by name, by link, or by stream; each stream has at most one.

Actions come back with the move that they are of, for whoever carries them out. A move that is over is known for a while, so that
who says something about it late gets the right answer: Thaw or Cancel when it was given up, Release when it was committed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx_api import moves, wire
from phalanx_router.moves.machine import Move
from phalanx_router.moves.records import Action, MoveSettings, Proposal, StreamAt

Frame = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed


@dataclass(frozen=True, slots=True)
class Todo:
    """What is to be done for one move."""

    proposal: Proposal
    action: Action


class Board:
    """Moves by name. `make` gives the machine of one; tests give worse ones."""

    def __init__(self, settings: MoveSettings | None = None, make: Callable[[Proposal, MoveSettings], Move] = Move) -> None:
        self.settings = settings or MoveSettings()
        self._make = make
        self._moves: dict[str, Move] = {}

    def open(self) -> list[Proposal]:
        """The moves that are not over."""
        return [move.proposal for move in self._moves.values() if not move.is_over]

    def is_committed(self, name: str) -> bool:
        """Whether the target of this move has the stream."""
        return name in self._moves and self._moves[name].is_committed

    def num_out(self, key: str) -> int:
        """How many streams are on their way out of this group."""
        return sum(proposal.at.key == key for proposal in self.open())

    def num_in(self, key: str) -> int:
        """How many streams are on their way into this group."""
        return sum(proposal.target == key for proposal in self.open())

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do at the latest."""
        return min((move.deadline for move in self._moves.values() if move.deadline is not None), default=None)

    def start(self, proposal: Proposal, request: wire.Request, now: float) -> list[Todo]:
        """Begins a move. Its name is new, and no other move of its stream is open: the caller looked."""
        assert proposal.move not in self._moves, f"{proposal.move} is in use"
        move = self._moves[proposal.move] = self._make(proposal, self.settings)
        return _todo(move, move.start(request, now))

    def take(self, key: str, frame: Frame, at: StreamAt | None, now: float) -> list[Todo]:
        """A frame of the leader with this link. `at`: where the stream of that move is now; None when it is nowhere."""
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
                return []  # a leader that speaks of another's move changes nothing

    def warmed(self, name: str, why: str, at: StreamAt | None, now: float) -> list[Todo]:
        """The target has computed ahead, or does not."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.warmed(why, at, now))

    def refused(self, name: str, code: str, why: str, now: float) -> list[Todo]:
        """The target does not compute ahead: it has no room."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.refused_by_target(code, why, now))

    def submitted(self, name: str, handle: int) -> None:
        """The commit was carried out; the target knows the stream by this handle."""
        self._moves[name].submitted(handle)

    def first_token(self, name: str, now: float) -> list[Todo]:
        """The target's first token was delivered."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.first_token(now))

    def reported(self, key: str, last_handle: int, now: float) -> None:
        """A load report of this group."""
        for move in self._moves.values():
            if move.is_committed and move.proposal.target == key:
                move.reported(last_handle, now)

    def link_lost(self, key: str, why: str, now: float) -> list[Todo]:
        """The link, or the incarnation behind it, is gone."""
        todo: list[Todo] = []
        for move in self._moves.values():
            if move.proposal.target == key:
                todo += _todo(move, move.target_lost(why, now))
            elif move.proposal.at.key == key:
                todo += _todo(move, move.source_lost(why, now))
        return todo

    def target_lost(self, move: str, why: str, now: float) -> list[Todo]:
        """The target of this one move takes no requests any more; moves away from it go on."""
        one = self._moves.get(move)
        return [] if one is None else _todo(one, one.target_lost(why, now))

    def stream_over(self, name: str, why: str, now: float) -> list[Todo]:
        """The stream of this move ended, or left its group otherwise."""
        move = self._moves.get(name)
        return [] if move is None else _todo(move, move.stream_over(why, now))

    def tick(self, now: float) -> list[Todo]:
        """What is due; forgets moves that have long been over."""
        due = [move for move in self._moves.values() if move.deadline is not None and move.deadline <= now]
        todo: list[Todo] = []
        for move in due:
            if move.is_over:
                del self._moves[move.proposal.move]
            else:
                todo += _todo(move, move.tick(now))
        return todo


def _todo(move: Move, actions: Iterable[Action]) -> list[Todo]:
    return [Todo(move.proposal, action) for action in actions]
