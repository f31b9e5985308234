"""Ports of this machine's loopback for servers in the cluster's network.

A socket stays in the network in which it was created: `make show` creates the listeners before it enters the cluster's network,
and passes them on by their file descriptors.
"""

import asyncio
import socket
from contextlib import suppress

_CHUNK = 1 << 16


def listen(port: int) -> socket.socket:
    """Returns a listener on loopback that child processes may inherit; on any free port if `port` is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    listener.set_inheritable(True)
    return listener


async def forward(listener: socket.socket, host: str, port: int) -> None:
    """Forwards each connection of the listener to `host`:`port` until it is cancelled, as `kubectl port-forward` does."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        for each in (writer, far_writer):
            each.close()

    async with await asyncio.start_server(connected, sock=listener) as server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()  # the other direction may continue
