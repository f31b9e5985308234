"""Registry of all moves of one router, at most one open move per stream.

An ended move is remembered for `linger_s` to answer late frames: Thaw or Cancel if it was given up, Release if it was committed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx_api import moves, wire
from phalanx_router.moves.machine import Move
from phalanx_router.moves.records import DEFAULT_MOVE_SETTINGS, Action, MoveRequest, MoveSettings, StreamPosition

Frame = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed


@dataclass(frozen=True, slots=True)
class MoveStep:
    """One action to execute for a move."""

    request: MoveRequest
    action: Action


class MoveBoard:
    """Moves by id."""

    def __init__(
        self,
        settings: MoveSettings = DEFAULT_MOVE_SETTINGS,
        make: Callable[[MoveRequest, MoveSettings], Move] = Move,
    ) -> None:
        self.settings = settings
        self._make = make
        self._moves: dict[str, Move] = {}

    def open(self) -> list[MoveRequest]:
        """Moves that have not ended."""
        return [move.request for move in self._moves.values() if not move.is_over]

    def is_committed(self, name: str) -> bool:
        """Whether the target has the stream."""
        return name in self._moves and self._moves[name].is_committed

    @property
    def deadline(self) -> float | None:
        """Time of the next `tick`."""
        return min((move.deadline for move in self._moves.values() if move.deadline is not None), default=None)

    def start(self, request: MoveRequest, replay: wire.Request, now: float) -> list[MoveStep]:
        """Starts a move with a new id."""
        assert request.move not in self._moves, f"{request.move} is in use"
        move = self._moves[request.move] = self._make(request, self.settings)
        return _steps(move, move.start(replay, now))

    def receive(self, key: str, frame: Frame, position: StreamPosition | None, now: float) -> list[MoveStep]:
        """Handles a frame from the leader on link `key`."""
        move = self._moves.get(frame.move)
        if move is None:
            return []
        is_source, is_target = key == move.request.position.key, key == move.request.target
        match frame:
            case moves.Prepared() if is_target:
                return _steps(move, move.prepared(frame, position, now))
            case moves.Arrived() if is_target:
                return _steps(move, move.arrived(frame, position, now))
            case moves.Frozen() if is_source:
                return _steps(move, move.frozen(frame, position, now))
            case moves.MoveFailed() if is_target:
                return _steps(move, move.refused_by_target(frame.code, frame.why, now))
            case moves.MoveFailed() if is_source:
                return _steps(move, move.refused_by_source(frame.code, frame.why, now))
            case _:
                return []  # this leader may not send this frame

    def warmed(self, name: str, why: str, position: StreamPosition | None, now: float) -> list[MoveStep]:
        """See `Move.warmed`."""
        move = self._moves.get(name)
        return [] if move is None else _steps(move, move.warmed(why, position, now))

    def refused(self, name: str, code: str, why: str, now: float) -> list[MoveStep]:
        """See `Move.refused_by_target`."""
        move = self._moves.get(name)
        return [] if move is None else _steps(move, move.refused_by_target(code, why, now))

    def submitted(self, name: str, handle: int) -> None:
        """See `Move.submitted`."""
        self._moves[name].submitted(handle)

    def first_token(self, name: str, now: float) -> list[MoveStep]:
        """See `Move.first_token`."""
        move = self._moves.get(name)
        return [] if move is None else _steps(move, move.first_token(now))

    def load_reported(self, key: str, last_handle: int) -> None:
        """Handles a load report of group `key`."""
        for move in self._moves.values():
            if move.is_committed and move.request.target == key:
                move.load_reported(last_handle)

    def link_lost(self, key: str, why: str, now: float) -> list[MoveStep]:
        """Handles the loss of a link or incarnation."""
        steps: list[MoveStep] = []
        for move in self._moves.values():
            if move.request.target == key:
                steps += _steps(move, move.target_lost(why, now))
            elif move.request.position.key == key:
                steps += _steps(move, move.source_lost(why, now))
        return steps

    def target_lost(self, name: str, why: str, now: float) -> list[MoveStep]:
        """Handles a target that accepts no more requests."""
        move = self._moves.get(name)
        return [] if move is None else _steps(move, move.target_lost(why, now))

    def stream_ended(self, name: str, why: str, now: float) -> list[MoveStep]:
        """See `Move.stream_ended`."""
        move = self._moves.get(name)
        return [] if move is None else _steps(move, move.stream_ended(why, now))

    def tick(self, now: float) -> list[MoveStep]:
        """Handles expired deadlines and forgets ended moves."""
        due = [move for move in self._moves.values() if move.deadline is not None and move.deadline <= now]
        steps: list[MoveStep] = []
        for move in due:
            if move.is_over:
                del self._moves[move.request.move]
            else:
                steps += _steps(move, move.tick(now))
        return steps


def _steps(move: Move, actions: Iterable[Action]) -> list[MoveStep]:
    return [MoveStep(move.request, action) for action in actions]
