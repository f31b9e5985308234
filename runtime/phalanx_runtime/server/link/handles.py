"""Moves as one link carries them: handles and addresses are put into the words of the other side."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from phalanx_api import moves, wire
from phalanx_runtime.engine.move_relay import MoveOrder, MoveRelay, MoveReport


@dataclass(slots=True, eq=False)
class LinkMoves:
    """`handles` are the engine's, by the router's; `host` is where the router reached the leader, for ranks in its pod."""

    relay: MoveRelay
    state: Callable[[], wire.State]
    send: Callable[[wire.FromLeader], None]
    handles: Mapping[int, int]
    names: Mapping[int, int]
    """The router's handles, by the engine's."""
    host: str

    def open(self) -> Callable[[], None]:
        """Hears of the engine until the function that this returns is called."""
        stop = self.relay.listen(self._rescue)

        def close() -> None:
            stop()
            self.relay.leave(self._told)

        return close

    def obey(self, frame: MoveOrder) -> None:
        """Passes a router's frame on, or answers it where the engine need not be asked."""
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


# Which Submits of a router a report of the engine has seen, when router and engine count requests by handles of their own.


class SeenHandles:
    """The Submits of one link that no report has seen yet, in their order."""

    __slots__ = ("_highest", "_unseen")

    def __init__(self) -> None:
        self._highest = 0
        self._unseen: deque[tuple[int, int]] = deque()
        """The engine's handle, or that of the Submit before when the engine never got one, and the router's."""

    def submitted(self, handle: int, engine_handle: int | None) -> None:
        """A Submit of the router went to the engine, or was refused before."""
        if engine_handle is None:
            engine_handle = self._unseen[-1][0] if self._unseen else 0
        self._unseen.append((engine_handle, handle))

    def lost(self) -> None:
        """The incarnation ended with all that was submitted."""
        while self._unseen:
            self._highest = max(self._highest, self._unseen.popleft()[1])

    def highest(self, last_handle: int) -> int:
        """The router's highest handle that a report has seen which has seen the engine's handles up to this one; 0 for none."""
        while self._unseen and self._unseen[0][0] <= last_handle:
            self._highest = max(self._highest, self._unseen.popleft()[1])
        return self._highest
