"""A leader of the version before, which says what that version was recorded to say.

But for the hash of the assets: the recorded one is a mere word, and routers take no assets that differ from their hash.
"""

import asyncio
import json
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from websockets.asyncio.server import ServerConnection

from phalanx_api import wire
from phalanx_api.wire.versions import CLOSE_WRONG_VERSION, LINK
from phalanx_router.links.endpoints import Endpoint
from tests.protocol.door import heard

RECORDED = json.loads(pathlib.Path(__file__).with_name("version_1.json").read_text())
BEAT_S = 0.05


def recorded(part: str, name: str) -> bytes:
    """The bytes of a frame as the version before wrote it."""
    return bytes.fromhex(RECORDED["frames"][part][name])


def _hashed() -> dict[str, bytes]:
    """The recorded welcome and assets with the hash that is true of these assets."""
    welcome, assets = (msgspec.msgpack.decode(recorded("from_leader", name)) for name in ("welcome", "assets"))
    assert welcome[-1] == assets[1]
    welcome[-1] = assets[1] = wire.make_assets(*assets[2:]).content_hash
    return {"welcome": msgspec.msgpack.encode(welcome), "assets": msgspec.msgpack.encode(assets)}


HASHED = _hashed()
KNOWN = {msgspec.msgpack.decode(recorded("to_leader", name))[0] for name in RECORDED["frames"]["to_leader"]}
"""The kinds of frames that it understands."""


class OldLeader:
    """It speaks its own version only, and repeats its state, so that the link does not fall silent.

    `offered`: the versions that routers said Hello with. `heard`: their other frames, in order.
    """

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.heard: list[list[Any]] = []
        self._connection: ServerConnection | None = None

    @property
    def handles(self) -> list[int]:
        """Of the requests that were submitted."""
        return [frame[1] for frame in self.heard if frame[0] == "submit"]

    async def say(self, name: str) -> None:
        """Sends a recorded frame."""
        assert self._connection is not None
        await self._connection.send(HASHED.get(name) or recorded("from_leader", name))

    async def serve(self, connection: ServerConnection) -> None:
        """One connection of a router."""
        _, version, *_ = msgspec.msgpack.decode(await connection.recv(decode=False))
        self.offered.append(version)
        if version != LINK.oldest:
            await connection.close(CLOSE_WRONG_VERSION, f"this leader speaks link version {LINK.oldest}")
            return
        self._connection = connection
        await self.say("welcome")
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                frame = msgspec.msgpack.decode(await connection.recv(decode=False))
                self.heard.append(frame)
                if answer := {"fetch": "assets", "send_pages": "page_changes"}.get(frame[0]):
                    await self.say(answer)
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await self.say("state")
            await asyncio.sleep(BEAT_S)


@asynccontextmanager
async def running_old_leader() -> AsyncIterator[tuple[OldLeader, Endpoint]]:
    """The leader, and where it listens."""
    leader = OldLeader()

    async with heard(leader.serve) as port:
        yield leader, Endpoint("group-a", f"127.0.0.1:{port}", "group-a")
