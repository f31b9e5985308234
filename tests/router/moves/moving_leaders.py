"""A fake leader that takes part in moves: it prepares, freezes, and passes pages to its peers by a call."""

import asyncio
from dataclasses import dataclass

from websockets.asyncio.server import ServerConnection

from phalanx_api import moves, wire
from tests.router.fakes import FakeLeader, RunningRequest, Script

SERVED = wire.Served("model-1", "tp2 bf16 16")


@dataclass(slots=True)
class MoveScript:
    """Behaviour of a leader in moves."""

    refuse: str | None = None  # answer to every Prepare
    prepare_delay_s: float = 0.0  # before the answer to every Prepare
    ignored: tuple[type, ...] = ()  # kinds of frames
    break_copy: bool = False  # no page arrives
    fail_copy: str | None = None  # answer to every SendPrefix
    cached_tokens: int = 0  # in every Prepared
    pages_lost: int = 0  # of every prefix that it sends
    served: wire.Served = SERVED


@dataclass(slots=True, eq=False)
class FrozenRequest:
    handle: int
    entry: RunningRequest


class MovingLeader(FakeLeader):
    """A leader that moves requests to and from `peers`, which are all leaders."""

    def __init__(
        self, group: str, peers: list["MovingLeader"], script: Script | None = None, move: MoveScript | None = None
    ) -> None:
        super().__init__(group, script)
        self.move = move or MoveScript()
        self.state = wire.State(serving=True, incarnation=1, served=self.move.served)
        self.peers = peers
        peers.append(self)
        self.frames: list[wire.ToLeader] = []  # received frames of moves
        self.reserved: dict[str, ServerConnection] = {}  # by move: the router to report to
        self.arrived: dict[str, int] = {}  # by move: computed tokens
        self.frozen: dict[str, FrozenRequest] = {}  # by move

    async def obey(self, connection: ServerConnection, frame: wire.ToLeader) -> None:
        if isinstance(frame, wire.Prepare | moves.MoveOut | moves.SendPrefix | moves.Thaw | moves.Release | moves.Cancel):
            self.frames.append(frame)
            if not isinstance(frame, self.move.ignored):
                await self._obey_move(connection, frame)
            return
        if isinstance(frame, wire.Submit) and frame.move:
            assert frame.move in self.arrived, "a moved request starts after the arrival of its pages"
            self.arrived.pop(frame.move)
            self.reserved.pop(frame.move)
        await super().obey(connection, frame)

    async def _obey_move(self, connection: ServerConnection, frame: wire.ToLeader) -> None:
        match frame:
            case wire.Prepare(move):
                if self.move.refuse is not None:
                    await connection.send(wire.encode(moves.MoveFailed(move, self.move.refuse, "no")))
                    return
                self.reserved[move] = connection
                await asyncio.sleep(self.move.prepare_delay_s)
                address = moves.PageAddress("127.0.0.1", self.port)
                await connection.send(
                    wire.encode(moves.Prepared(move=move, cached_tokens=self.move.cached_tokens, addresses=[address], key=b"key"))
                )
            case moves.MoveOut(move=move, handle=handle):
                await self._send_pages(connection, move, handle, frame)
            case moves.SendPrefix():
                await self._send_prefix(connection, frame)
            case moves.Thaw(move):
                frozen = self.frozen.pop(move, None)
                if frozen is not None:
                    self.running[connection][frozen.handle] = frozen.entry
            case moves.Release(move):
                self.frozen.pop(move, None)
            case moves.Cancel(move):
                self.reserved.pop(move, None)
                self.arrived.pop(move, None)

    async def _send_pages(self, connection: ServerConnection, move: str, handle: int, order: moves.MoveOut) -> None:
        entry = self.running[connection].pop(handle, None)
        if entry is None:
            await connection.send(wire.encode(moves.MoveFailed(move, "unknown", "no such request")))
            return
        self.frozen[move] = FrozenRequest(handle, entry)
        num_computed = len(entry.submit.request.prompt) + entry.next_index - 1
        await connection.send(
            wire.encode(
                moves.Frozen(move=move, epoch=entry.submit.request.epoch, num_output=entry.next_index, num_computed=num_computed)
            )
        )
        target = next(peer for peer in self.peers if peer.port == order.prepared.addresses[0].port)
        if not self.move.break_copy and move in target.reserved:
            target.arrived[move] = num_computed
            await target.reserved[move].send(wire.encode(moves.Arrived(move, num_computed, 1000)))

    async def _send_prefix(self, connection: ServerConnection, order: moves.SendPrefix) -> None:
        if self.move.fail_copy is not None:
            await connection.send(wire.encode(moves.MoveFailed(order.move, self.move.fail_copy, "no")))
            return
        target = next(peer for peer in self.peers if peer.port == order.prepared.addresses[0].port)
        if not self.move.break_copy and order.move in target.reserved:
            num_computed = (len(order.keys) - self.move.pages_lost) * 16
            target.arrived[order.move] = num_computed
            await target.reserved[order.move].send(wire.encode(moves.Arrived(order.move, num_computed, 5000)))
