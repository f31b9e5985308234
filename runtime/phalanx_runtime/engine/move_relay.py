"""Frames of moves between the links and the engine: who asked for a move hears what comes of it.

A move is known from Prepare or MoveOut until MoveFailed, or until its router decides: Submit, Cancel, Release, Thaw.
"""

from collections.abc import Callable

from phalanx_api import moves, wire

MoveOrder = wire.Prepare | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel
MoveReport = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed
Hear = Callable[[MoveReport], None]
HearRescue = Callable[[moves.AskRescue], None]


class MoveRelay:
    """Belongs to one engine client. `send` gives a frame to the engine, if there is one. Handles are the engine's."""

    def __init__(self, send: Callable[[MoveOrder], None]) -> None:
        self._send = send
        self._hears: dict[str, Hear] = {}
        self._rescues: list[HearRescue] = []

    def order(self, frame: MoveOrder, hear: Hear) -> None:
        """Gives a router's frame to the engine; `hear` is called with what the engine says of a move that this one began."""
        if isinstance(frame, wire.Prepare | moves.MoveOut):
            self._hears.setdefault(frame.move, hear)
        else:
            self.over(frame.move)
        self._send(frame)

    def over(self, move: str) -> None:
        """Nobody wants to hear of this move any more."""
        self._hears.pop(move, None)

    def leave(self, hear: Hear) -> None:
        """Whoever heard with this is gone. The moves go on until the engine ends them."""
        self._hears = {move: other for move, other in self._hears.items() if other != hear}

    def tell(self, report: MoveReport) -> None:
        """Passes on what the engine says."""
        hear = self._hears.get(report.move)
        if isinstance(report, moves.MoveFailed):
            self.over(report.move)
        if hear is not None:
            hear(report)

    def listen(self, rescue: HearRescue) -> Callable[[], None]:
        """Calls `rescue` when requests are to be preempted soon, until the function that this returns is called."""
        self._rescues.append(rescue)
        return lambda: self._rescues.remove(rescue)

    def ask(self, asked: moves.AskRescue) -> None:
        """Tells all who listen."""
        for rescue in list(self._rescues):
            rescue(asked)

    def clear(self) -> None:
        """The incarnation is over, and all moves with it."""
        self._hears.clear()
