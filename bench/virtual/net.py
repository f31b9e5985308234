"""Connections between processes in virtual time: ordered, with latency, until a side closes them or a process dies or hangs.

A `Tap` decides the fate of each message before it is sent; `Cuts` hold messages back.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from websockets.exceptions import ConnectionClosedError

from bench.virtual.cuts import Cuts
from bench.virtual.execution import NETWORK, current_execution
from phalanx_frontend.tls import Certificate

LATENCY_S = (0.0001, 0.002)
LATENCY_SPAN_S = LATENCY_S[1] - LATENCY_S[0]
PONG_S = 0.002
RETRY_S = 0.2
"""Between attempts to reach a peer that does not answer."""


class Process:
    """A process that can be killed or hung; a hung process neither receives nor sends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.execution = current_execution()
        self._hung_until = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether none of its callbacks runs, for a process with an `Execution`."""
        return self.execution is not None and self.execution.is_stopped

    @property
    def is_awake(self) -> bool:
        """Whether `awake` returns at once."""
        return self.is_alive and (not self._hung_until or asyncio.get_running_loop().time() >= self._hung_until)

    def hang(self, for_s: float) -> None:
        self._hung_until = asyncio.get_running_loop().time() + for_s

    async def awake(self) -> None:
        """Waits until the process runs; forever if it is dead."""
        loop = asyncio.get_running_loop()
        while loop.time() < self._hung_until:
            await asyncio.sleep(self._hung_until - loop.time() + 1e-6)
        if not self.is_alive:
            await loop.create_future()

    async def awake_or_dead(self) -> None:
        loop = asyncio.get_running_loop()
        while self.is_alive and (loop.time() < self._hung_until or self.is_stopped):
            left_s = self._hung_until - loop.time()
            await asyncio.sleep(0.1 if left_s <= 0 else min(0.1, left_s + 1e-6))


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of a message. `closed` closes its connection."""

    kind: Literal["delivered", "lost", "corrupted", "closed", "duplicated"] = "delivered"
    delay_s: float = 0.0


DELIVERED = Fate()


class Tap(Protocol):
    def fate_of_message(self, sender: Process, receiver: Process, message: bytes) -> Fate: ...


class _Pipe:
    def __init__(self, cuts: Cuts, sender: Process, receiver: Process) -> None:
        self.sender, self.receiver = sender, receiver
        self._cuts = cuts
        self._loop = asyncio.get_running_loop()
        self.is_closed = False
        self._arrived: deque[bytes] = deque()
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None
        self._last_at = 0.0
        self.pinged_at = 0.0

    def push(self, message: bytes, delay_s: float) -> None:
        self._last_at = max(self._last_at + 1e-7, self._loop.time() + delay_s)
        self._loop.call_at(self._last_at, self._deliver_message, message, context=NETWORK)

    def close(self, delay_s: float) -> None:
        """Drops what has not arrived, and ends the pipe after the delay."""
        self.is_closed = True
        asyncio.get_running_loop().call_later(delay_s, self._deliver, self._end, context=NETWORK)

    @property
    def has_ended(self) -> bool:
        """Whether the receiver can know that the pipe has ended."""
        return self._has_ended

    def _deliver_message(self, message: bytes) -> None:
        if self._cuts.is_cut(self.sender, self.receiver):
            self._deliver(lambda: self._arrive(message))
        else:
            self._arrive(message)

    def _deliver(self, action: Callable[[], None]) -> None:
        self._cuts.deliver(self.sender, self.receiver, action)

    def _arrive(self, message: bytes) -> None:
        if not self.is_closed:
            self._arrived.append(message)
            if self._reader is not None:
                self._wake()

    def _end(self) -> None:
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def recv(self) -> bytes:
        """Returns the next message. Raises ConnectionClosedError after the end."""
        while True:
            if not self.receiver.is_awake:
                await self.receiver.awake()
            if self._arrived:
                return self._arrived.popleft()
            if self._has_ended:
                raise ConnectionClosedError(None, None)
            self._reader = self._loop.create_future()
            await self._reader
            self._reader = None


class Socket:
    """One side of a connection. Implements `phalanx_router.links.connection.Connection`."""

    def __init__(self, net: "Network", outward: _Pipe, inward: _Pipe) -> None:
        self._net = net
        self._out, self._in = outward, inward
        self._is_closed_here = False

    @property
    def processes(self) -> tuple[Process, Process]:
        return self._out.sender, self._out.receiver

    async def send(self, message: bytes, /) -> None:
        """Sends a message; waits while the own process hangs."""
        if not self._out.sender.is_awake:
            await self._out.sender.awake()
        self.push(message)

    def push(self, message: bytes) -> None:
        out = self._out
        if out.is_closed:
            if self._is_closed_here or self._in.has_ended or not self._net.cuts.is_cut(self._in.sender, self._in.receiver):
                raise ConnectionClosedError(None, None)
            return  # the end of the connection has not arrived
        if not out.sender.is_alive:
            return
        fate = self._net.tap.fate_of_message(out.sender, out.receiver, message)
        if not out.sender.is_alive or fate.kind == "lost":
            return
        if fate.kind == "closed":
            self.close()
            return
        delay_s = self._net.latency() + fate.delay_s
        out.push(message[:-1] if fate.kind == "corrupted" else message, delay_s)
        if fate.kind == "duplicated":
            out.push(message, delay_s)

    async def recv(self, decode: Literal[False] = False) -> bytes:
        return await self._in.recv()

    async def ping(self) -> Awaitable[float]:
        """Returns a pong: its value decides nothing, and draws no random number."""
        if self._out.is_closed:
            raise ConnectionClosedError(None, None)
        return _pong()

    def reaches_peer(self) -> bool:
        """Whether the peer would answer a ping now, which its program does not read. The peer knows then that this side lives."""
        out, back = self._out, self._in
        peer = out.receiver
        if out.is_closed or not peer.is_awake or peer.is_stopped or self._net.cuts.are_apart(out.sender, peer):
            return False
        out.pinged_at = asyncio.get_running_loop().time()
        return not back.is_closed

    @property
    def pinged_at(self) -> float:
        """Time of the last ping of the peer."""
        return self._in.pinged_at

    def close(self) -> None:
        self._is_closed_here = True
        for pipe in (self._out, self._in):
            if not pipe.is_closed:
                pipe.close(self._net.latency())
        self._net.sockets.pop(self, None)


async def _pong() -> float:
    return PONG_S


Serve = Callable[[Socket], Coroutine[Any, Any, None]]


class Network:
    def __init__(self, rng: random.Random, tap: Tap) -> None:
        self.tap = tap
        self.cuts = Cuts()
        self.sockets: dict[Socket, None] = {}  # in the order of their openings: faults draw for each
        self._rng = rng
        self._listening: dict[str, tuple[Process, Serve, Context]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def latency(self) -> float:
        return LATENCY_S[0] + LATENCY_SPAN_S * self._rng.random()

    def listen(self, address: str, process: Process, serve: Serve) -> None:
        self._listening[address] = (process, serve, copy_context())

    def kill(self, process: Process) -> None:
        process.is_alive = False
        self._listening = {address: entry for address, entry in self._listening.items() if entry[0] is not process}
        for socket in [socket for socket in self.sockets if process in socket.processes]:
            socket.close()

    def lose(self, process: Process) -> None:
        """Ends a process with its machine: no connection ends, and no attempt to connect is refused."""
        process.is_alive = False
        self.cuts.lose(process)

    def dial_from(self, process: Process) -> "DialFrom":
        return DialFrom(self, process)

    def serve(self, coroutine: Coroutine[Any, Any, None], context: Context) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, context=context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def find(self, address: str) -> tuple[Process, Serve, Context]:
        try:
            return self._listening[address]
        except KeyError:
            raise OSError("connection refused") from None


class DialFrom:
    """Implements `phalanx_router.links.connection.Dial`."""

    def __init__(self, net: Network, process: Process) -> None:
        self._net, self._process = net, process

    @asynccontextmanager
    async def __call__(
        self, address: str, token: str, timeout_s: float, certificate: Certificate | None, /
    ) -> AsyncIterator[Socket]:
        net = self._net
        await asyncio.sleep(net.latency())
        async with asyncio.timeout(timeout_s):
            peer, serve, context = net.find(address)
            await peer.awake()
            while peer.is_stopped or net.cuts.are_apart(self._process, peer):
                await asyncio.sleep(RETRY_S)
                peer, serve, context = net.find(address)
        to_peer, from_peer = _Pipe(net.cuts, self._process, peer), _Pipe(net.cuts, peer, self._process)
        own, peer_side = Socket(net, to_peer, from_peer), Socket(net, from_peer, to_peer)
        net.sockets[own] = None
        net.serve(serve(peer_side), context)
        try:
            yield own
        finally:
            own.close()
