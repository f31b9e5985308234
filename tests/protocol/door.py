"""Where programs of the version before are asked: a WebSocket server on a port of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed


@asynccontextmanager
async def heard(speak: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[int]:
    """The port. `speak` serves one connection; that the other side goes is no error."""

    async def handle(connection: ServerConnection) -> None:
        try:
            await speak(connection)
        except ConnectionClosed:
            pass  # it went

    async with serve(handle, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
        yield next(iter(server.sockets)).getsockname()[1]
