"""Handles of one link: routers and the engine number requests independently."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx_api import moves, wire
from phalanx_runtime.engine.move_relay import MoveOrder, MoveRelay, MoveReport


class HandleMap:
    """The open requests, by router handle and by engine handle."""

    def __init__(self) -> None:
        self.to_router: dict[int, int] = {}
        self.to_engine: dict[int, int] = {}

    def add(self, router_handle: int, engine_handle: int) -> None:
        """Adds a request."""
        self.to_router[engine_handle] = router_handle
        self.to_engine[router_handle] = engine_handle

    def remove(self, engine_handle: int) -> int:
        """Removes a request; returns its router handle."""
        handle = self.to_router.pop(engine_handle)
        del self.to_engine[handle]
        return handle

    def remove_from_router(self, router_handles: list[int]) -> list[int]:
        """Removes known requests; returns their engine handles."""
        engine_handles = [self.to_engine.pop(handle) for handle in router_handles if handle in self.to_engine]
        for handle in engine_handles:
            del self.to_router[handle]
        return engine_handles

    def clear(self) -> None:
        """Removes all requests."""
        self.to_router.clear()
        self.to_engine.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class LinkMoves:
    """Moves on one link."""

    relay: MoveRelay
    state: Callable[[], wire.State]
    send: Callable[[wire.FromLeader], None]
    handles: HandleMap
    host: str
    """Address of the leader's pod."""

    def open(self) -> Callable[[], None]:
        """Subscribes to rescues. Returns a function that detaches this link."""
        unsubscribe = self.relay.subscribe_rescues(self._send_rescue)

        def close() -> None:
            unsubscribe()
            self.relay.unregister_handler(self._send_report)

        return close

    def handle(self, order: MoveOrder) -> None:
        """Executes or rejects a router's order."""
        if isinstance(order, wire.Prepare) and not self.state().serving:
            self.send(moves.MoveFailed(order.move, "no_room", f"the group takes no requests: {self.state().reason}"))
        elif isinstance(order, moves.MoveOut):
            handle = self.handles.to_engine.get(order.handle)
            if handle is None:
                self.send(moves.MoveFailed(order.move, "unknown", f"no request runs under handle {order.handle}"))
            else:
                self.relay.order(msgspec.structs.replace(order, handle=handle), self._send_report)
        else:
            self.relay.order(order, self._send_report)

    def _send_report(self, report: MoveReport) -> None:
        if isinstance(report, moves.Prepared):
            addresses = [address if address.host else moves.PageAddress(self.host, address.port) for address in report.addresses]
            report = msgspec.structs.replace(report, addresses=addresses)
        self.send(report)

    def _send_rescue(self, rescue: moves.RescueRequest) -> None:
        to_router = self.handles.to_router
        handles = [to_router[handle] for handle in rescue.handles if handle in to_router]
        if handles:
            self.send(moves.RescueRequest(handles, rescue.within_s))


class AcknowledgedHandles:
    """Submits that no load report covers yet."""

    __slots__ = ("_highest", "_pending")

    def __init__(self) -> None:
        self._highest = 0
        self._pending: deque[tuple[int, int]] = deque()
        """Engine and router handles; a refused Submit has the previous engine handle."""

    def submitted(self, handle: int, engine_handle: int | None) -> None:
        """Records a Submit; without engine handle if refused."""
        if engine_handle is None:
            engine_handle = self._pending[-1][0] if self._pending else 0
        self._pending.append((engine_handle, handle))

    def acknowledge_all(self) -> None:
        """Acknowledges all Submits."""
        while self._pending:
            self._highest = max(self._highest, self._pending.popleft()[1])

    def highest(self, last_handle: int) -> int:
        """Highest router handle that a load report with this last engine handle covers, or 0."""
        while self._pending and self._pending[0][0] <= last_handle:
            self._highest = max(self._highest, self._pending.popleft()[1])
        return self._highest
