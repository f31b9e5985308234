"""Relay of move frames between links and engine: each report goes to the link that ordered the move.

A move is registered from Prepare or MoveOut until MoveFailed, or until its router sends Submit, Cancel, Release or Thaw.
"""

from collections.abc import Callable

from phalanx_api import moves, wire

MoveOrder = wire.Prepare | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel
MoveReport = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed
Hear = Callable[[MoveReport], None]
HearRescue = Callable[[moves.AskRescue], None]


class MoveRelay:
    """Relay of one engine client. `send` passes a frame to the engine, if there is one. Handles are the engine's.

    let_go: ends a request that now runs in another group, whatever the state of its move.
    """

    def __init__(self, send: Callable[[MoveOrder], None], let_go: Callable[[int], None]) -> None:
        self._send = send
        self._let_go = let_go
        self._leaving: dict[str, int] = {}
        """Request of each outgoing move."""
        self._hears: dict[str, Hear] = {}
        self._rescues: list[HearRescue] = []

    def order(self, frame: MoveOrder, hear: Hear) -> None:
        """Sends a router's frame to the engine; `hear` receives the reports of a move that the frame starts."""
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
        """Cancels the moves of a request that another router has adopted; a late Release does not end the request."""
        for move in [move for move, leaving in self._leaving.items() if leaving == handle]:
            self._send(moves.Thaw(move))
            self.over(move)

    def over(self, move: str) -> None:
        """Unregisters a move."""
        self._hears.pop(move, None)
        self._leaving.pop(move, None)

    def leave(self, hear: Hear) -> None:
        """Unregisters a listener. Its moves continue until the engine ends them."""
        for move in [move for move, other in self._hears.items() if other == hear]:
            self.over(move)

    def tell(self, report: MoveReport) -> None:
        """Passes a report to its listener."""
        hear = self._hears.get(report.move)
        if isinstance(report, moves.MoveFailed):
            self._hears.pop(report.move, None)  # a Release may be in flight: the move is committed and ends the request here
        if hear is not None:
            hear(report)

    def listen(self, rescue: HearRescue) -> Callable[[], None]:
        """Calls `rescue` before imminent preemptions. Returns a function that ends the subscription."""
        self._rescues.append(rescue)
        return lambda: self._rescues.remove(rescue)

    def ask(self, asked: moves.AskRescue) -> None:
        """Passes a rescue request to all listeners."""
        for rescue in list(self._rescues):
            rescue(asked)

    def clear(self) -> None:
        """Drops all moves of an ended incarnation."""
        self._hears.clear()
        self._leaving.clear()
