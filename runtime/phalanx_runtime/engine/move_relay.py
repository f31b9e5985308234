"""Relay of move frames between links and engine.

A move is registered from Prepare, MoveOut or SendPrefix until MoveFailed, or until its router sends Submit, Cancel, Release or
Thaw.
"""

from collections import Counter
from collections.abc import Callable

from phalanx_api import moves, wire

MoveOrder = wire.Prepare | moves.MoveOut | moves.SendPrefix | moves.Thaw | moves.Release | moves.Cancel
MoveReport = moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed
ReportHandler = Callable[[MoveReport], None]
RescueHandler = Callable[[moves.RescueRequest], None]


class MoveRelay:
    """Passes each report to the link that ordered the move."""

    def __init__(self, send: Callable[[MoveOrder], None], end_request: Callable[[int], None]) -> None:
        """`end_request` is called when another group runs the request."""
        self._send = send
        self._end_request = end_request
        self._outgoing: dict[str, tuple[int, ReportHandler]] = {}
        """Request of each outgoing move, and its link."""
        self._incoming: dict[str, wire.Adapter] = {}
        """Adapter of each incoming move that has one."""
        self._handlers: dict[str, ReportHandler] = {}
        self._rescue_handlers: list[RescueHandler] = []

    @property
    def adapters(self) -> Counter[wire.Adapter]:
        """Number of incoming moves of each adapter."""
        return Counter(self._incoming.values())

    def order(self, frame: MoveOrder, on_report: ReportHandler) -> None:
        """Sends a router's order; registers a started move."""
        if isinstance(frame, wire.Prepare | moves.MoveOut | moves.SendPrefix):
            self._handlers.setdefault(frame.move, on_report)
        if isinstance(frame, moves.MoveOut):
            self._outgoing[frame.move] = frame.handle, on_report
        if isinstance(frame, wire.Prepare) and frame.request.adapter is not None:
            self._incoming[frame.move] = frame.request.adapter
        self._send(frame)
        if isinstance(frame, moves.Release) and frame.move in self._outgoing:
            self._end_request(self._outgoing[frame.move][0])
        if isinstance(frame, moves.Thaw | moves.Release | moves.Cancel):
            self.unregister(frame.move)

    def cancel_outgoing(self, handle: int) -> None:
        """Cancels the moves of an adopted request; a late Release does not end it."""
        for move in [move for move, (outgoing, _) in self._outgoing.items() if outgoing == handle]:
            self._send(moves.Thaw(move))
            self.unregister(move)

    def unregister(self, move: str) -> None:
        """Drops a move."""
        for moving in (self._handlers, self._outgoing, self._incoming):
            moving.pop(move, None)

    def unregister_handler(self, on_report: ReportHandler) -> None:
        """Drops the moves of a link; the engine continues them."""
        handlers = {move: handler for move, (_, handler) in self._outgoing.items()} | self._handlers  # the first may have failed
        for move in [move for move, handler in handlers.items() if handler == on_report]:
            self.unregister(move)

    def deliver(self, report: MoveReport) -> None:
        """Passes a report to its link."""
        handler = self._handlers.get(report.move)
        if isinstance(report, moves.MoveFailed):
            # `_outgoing` stays: a Release in flight ends the request.
            self._handlers.pop(report.move, None)
            self._incoming.pop(report.move, None)
        if handler is not None:
            handler(report)

    def subscribe_rescues(self, on_rescue: RescueHandler) -> Callable[[], None]:
        """Returns a function that ends the subscription."""
        self._rescue_handlers.append(on_rescue)
        return lambda: self._rescue_handlers.remove(on_rescue)

    def deliver_rescue(self, rescue: moves.RescueRequest) -> None:
        """Passes a rescue request to all links."""
        for handler in list(self._rescue_handlers):
            handler(rescue)

    def clear(self) -> None:
        """Drops all moves."""
        for moving in (self._handlers, self._outgoing, self._incoming):
            moving.clear()
