"""Handles of one link: translation of move frames, and acknowledgement of Submits in load reports."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from phalanx_api import moves, wire
from phalanx_runtime.engine.move_relay import MoveOrder, MoveRelay, MoveReport


@dataclass(slots=True, eq=False, kw_only=True)
class LinkMoves:
    """Moves on one link. `handles`: engine handles by router handle; `host`: leader address, used for ranks in its pod."""

    relay: MoveRelay
    state: Callable[[], wire.State]
    send: Callable[[wire.FromLeader], None]
    handles: Mapping[int, int]
    names: Mapping[int, int]
    """Router handles by engine handle."""
    host: str

    def open(self) -> Callable[[], None]:
        """Subscribes to rescues. Returns a function that unsubscribes and detaches this link from its moves."""
        stop = self.relay.listen(self._rescue)

        def close() -> None:
            stop()
            self.relay.leave(self._told)

        return close

    def obey(self, frame: MoveOrder) -> None:
        """Passes a router's frame to the engine, or rejects it if the group or the request is not available."""
        if isinstance(frame, wire.Prepare) and not self.state().serving:
            self.send(moves.MoveFailed(frame.move, "no_room", f"the group takes no requests: {self.state().reason}"))
        elif isinstance(frame, moves.MoveOut):
            handle = self.handles.get(frame.handle)
            if handle is None:
                self.send(moves.MoveFailed(frame.move, "unknown", f"no request runs under handle {frame.handle}"))
            else:
                self.relay.order(msgspec.structs.replace(frame, handle=handle), self._told)
        else:
            self.relay.order(frame, self._told)

    def _told(self, report: MoveReport) -> None:
        if isinstance(report, moves.Prepared):
            addresses = [address if address.host else moves.PageAddress(self.host, address.port) for address in report.addresses]
            report = msgspec.structs.replace(report, addresses=addresses)
        self.send(report)

    def _rescue(self, asked: moves.AskRescue) -> None:
        mine = [self.names[handle] for handle in asked.handles if handle in self.names]
        if mine:
            self.send(moves.AskRescue(mine, asked.within_s))


# Routers and the engine number requests independently; a load report acknowledges router handles.


class AcknowledgedHandles:
    """The Submits of one link that no load report covers yet, in order."""

    __slots__ = ("_highest", "_unseen")

    def __init__(self) -> None:
        self._highest = 0
        self._unseen: deque[tuple[int, int]] = deque()
        """Pairs of engine handle and router handle. A refused Submit has the engine handle of the one before it."""

    def submitted(self, handle: int, engine_handle: int | None) -> None:
        """Records a Submit; `engine_handle` is None if it was refused before it reached the engine."""
        if engine_handle is None:
            engine_handle = self._unseen[-1][0] if self._unseen else 0
        self._unseen.append((engine_handle, handle))

    def lost(self) -> None:
        """Acknowledges all Submits of an ended incarnation."""
        while self._unseen:
            self._highest = max(self._highest, self._unseen.popleft()[1])

    def highest(self, last_handle: int) -> int:
        """Highest router handle covered by a load report whose last engine handle is `last_handle`; 0 if there is no such
        handle."""
        while self._unseen and self._unseen[0][0] <= last_handle:
            self._highest = max(self._highest, self._unseen.popleft()[1])
        return self._highest
