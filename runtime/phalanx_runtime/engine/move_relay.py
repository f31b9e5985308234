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
    """Belongs to one engine client. `send` gives a frame to the engine, if there is one. Handles are the engine's.

    `let_go` ends a request that runs elsewhere now, whatever the engine made of its move.
    """

    def __init__(self, send: Callable[[MoveOrder], None], let_go: Callable[[int], None]) -> None:
        self._send = send
        self._let_go = let_go
        self._leaving: dict[str, int] = {}
        """The request of each move out."""
        self._hears: dict[str, Hear] = {}
        self._rescues: list[HearRescue] = []

    def order(self, frame: MoveOrder, hear: Hear) -> None:
        """Gives a router's frame to the engine; `hear` is called with what the engine says of a move that this one began."""
        if isinstance(frame, wire.Prepare | moves.MoveOut):
            self._hears.setdefault(frame.move, hear)
        if isinstance(frame, moves.MoveOut):
            self._leaving[frame.move] = frame.handle
        self._send(frame)
        if isinstance(frame, moves.Release) and frame.move in self._leaving:
            self._let_go(self._leaving[frame.move])
        if isinstance(frame, moves.Thaw | moves.Release | moves.Cancel):
            self.over(frame.move)

    def stay(self, handle: int) -> None:
        """This request is another router's now: whoever moves it does so no more, and a Release that comes late ends nothing."""
        for move in [move for move, leaving in self._leaving.items() if leaving == handle]:
            self._send(moves.Thaw(move))
            self.over(move)

    def over(self, move: str) -> None:
        """Nobody wants to hear of this move any more."""
        self._hears.pop(move, None)
        self._leaving.pop(move, None)

    def leave(self, hear: Hear) -> None:
        """Whoever heard with this is gone. The moves go on until the engine ends them."""
        for move in [move for move, other in self._hears.items() if other == hear]:
            self.over(move)

    def tell(self, report: MoveReport) -> None:
        """Passes on what the engine says."""
        hear = self._hears.get(report.move)
        if isinstance(report, moves.MoveFailed):
            self._hears.pop(report.move, None)  # its Release may be on the way: it is committed, and the request is to end here
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
        self._leaving.clear()
