"""A router of the version before, as others know it: it keeps what they say, and tells the stream that was recorded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection

from phalanx_router.links.endpoints import Endpoint
from tests.protocol.door import heard
from tests.protocol.earlier import peer_reader, record
from tests.protocol.old_leader import recorded


class OldPeer:
    """`heard`: the frames of each connection, in order, as its own records have them."""

    def __init__(self) -> None:
        self.heard: list[list[Any]] = []
        self._read = peer_reader()

    def of(self, name: str) -> list[Any]:
        """What was heard of one kind, on all connections."""
        return [frame for frames in self.heard for frame in frames if isinstance(frame, record(name))]

    async def serve(self, connection: ServerConnection) -> None:
        """One connection of a router."""
        frames: list[Any] = []
        self.heard.append(frames)
        while True:
            frames.append(self._read(await connection.recv(decode=False)))
            if isinstance(frames[-1], record("Wanted")):
                await connection.send(recorded("peer", "told"))


@asynccontextmanager
async def running_old_peer() -> AsyncIterator[tuple[OldPeer, Endpoint]]:
    """The router, and where it listens."""
    peer = OldPeer()

    async with heard(peer.serve) as port:
        yield peer, Endpoint("router-1", f"127.0.0.1:{port}", "router-1")
