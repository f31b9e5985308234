"""The server's side of a WebSocket in virtual time."""

import asyncio
from typing import Any

from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosedError

from bench.virtual.net import Socket


class VirtualWebSocket:
    """The part of `starlette.websockets.WebSocket` that links and peers use."""

    def __init__(self, socket: Socket, host: str, token: str, silence_s: float | None = None) -> None:
        """silence_s: after which the server ends the connection, as without a pong."""
        self.headers = {"authorization": f"Bearer {token}"}
        self.scope = {"server": (host, 0)}
        self._socket = socket
        self._silence_s = silence_s

    async def accept(self) -> None:
        """Does nothing."""

    async def receive(self) -> dict[str, Any]:
        """Returns the next message, or the end."""
        try:
            return {"type": "websocket.receive", "bytes": await self._next()}
        except TimeoutError:
            self._socket.close()
            return {"type": "websocket.disconnect", "code": 1011}
        except ConnectionClosedError:
            return {"type": "websocket.disconnect", "code": 1006}

    async def _next(self) -> bytes:
        if self._silence_s is None:
            return await self._socket.recv()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._silence_s
        while True:
            try:
                async with asyncio.timeout_at(end):
                    return await self._socket.recv()
            except TimeoutError:
                end = self._socket.pinged_at + self._silence_s
                if end <= loop.time():
                    raise

    async def send_bytes(self, message: bytes) -> None:
        """Sends a message. Raises WebSocketDisconnect."""
        try:
            await self._socket.send(message)
        except ConnectionClosedError:
            raise WebSocketDisconnect(1006) from None

    async def close(self, code: int, reason: str) -> None:
        """Closes the connection."""
        self._socket.close()
