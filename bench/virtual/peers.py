"""Connections between routers in virtual time. They end without a pong, as those of the `websockets` library."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from websockets.exceptions import ConnectionClosedError

from bench.virtual.net import Network, Process, Socket
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.resume.peers import QUERY_TIMEOUT_S

PING_S = 1.0


class PingedConnection:
    """Implements `phalanx_router.resume.peers.PeerConnection`."""

    def __init__(self, socket: Socket, timeout_s: float) -> None:
        self.close_code: int | None = None
        self.close_reason: str | None = None
        self._socket = socket
        self._timeout_s = timeout_s
        self._ended = asyncio.Event()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ponged_at = asyncio.get_running_loop().time()

    async def send(self, message: bytes, /) -> None:
        """Sends a message. Raises ConnectionClosedError."""
        if self.close_code is not None:
            raise ConnectionClosedError(None, None)
        await self._socket.send(message)

    async def recv(self, decode: Literal[False] = False) -> bytes:
        """Returns the next message. Raises ConnectionClosedError."""
        message = await self._arrived.get()
        if message is None:
            self._arrived.put_nowait(None)
            raise ConnectionClosedError(None, None)
        return message

    async def wait_closed(self) -> None:
        """Returns after its end."""
        await self._ended.wait()

    async def read(self) -> None:
        """Reads until the connection ends."""
        try:
            while True:
                self._arrived.put_nowait(await self._socket.recv())
        except ConnectionClosedError:
            self._end("the connection broke")

    async def ping(self) -> None:
        """Pings until the connection ends, and ends it without a pong."""
        while self.close_code is None:
            await asyncio.sleep(PING_S)
            now = asyncio.get_running_loop().time()
            if self._socket.reaches_peer():
                self._ponged_at = now
            elif now - self._ponged_at > PING_S + self._timeout_s:
                self._end("no pong arrived")

    def _end(self, why: str) -> None:
        self.close_code, self.close_reason = 1006, why
        self._ended.set()
        self._socket.close()
        self._arrived.put_nowait(None)


class DialPeerFrom:
    """Implements `phalanx_router.resume.peers.DialPeer`."""

    def __init__(self, net: Network, process: Process) -> None:
        self._net, self._process = net, process

    @asynccontextmanager
    async def __call__(self, peer: Endpoint, settings: LinkSettings, /) -> AsyncIterator[PingedConnection]:
        dial = self._net.dial_from(self._process)
        async with dial(peer.address, settings.token.current, QUERY_TIMEOUT_S, None) as socket:
            connection = PingedConnection(socket, settings.heartbeat_timeout_s)
            tasks = [asyncio.create_task(connection.read()), asyncio.create_task(connection.ping())]
            try:
                yield connection
            finally:
                for task in tasks:
                    task.cancel()
