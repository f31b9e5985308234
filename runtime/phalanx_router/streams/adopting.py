"""Streams of lost routers, at the leaders where they go on: asked for by id, adopted where they stand."""

import asyncio

from phalanx_api import wire
from phalanx_router.streams.stream import Stream


class Adopting:
    """Waits for a leader's answer to one Adopt, then gives way to the stream. Implements `phalanx_router.sink.Sink`.

    `told` is what the leader said: Refused when it knows no such stream, None when it was lost before it said anything.
    `stream` takes the tokens that follow.
    """

    def __init__(self) -> None:
        self.told: asyncio.Future[wire.Adopted | wire.Refused | None] = asyncio.get_running_loop().create_future()
        self.stream: Stream | None = None

    def adopted(self, frame: wire.Adopted) -> Stream | None:
        """Who hears of the stream from now on; nobody when it does not run there."""
        if self.told.done():
            return None
        if frame.runs:
            self.stream = Stream(frame.request)
        self.told.set_result(frame)
        return self.stream

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Not before the answer."""

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """Not before the answer."""

    def cached(self, found: wire.Cached) -> None:
        """Not before the answer."""

    def finished(self, end: wire.Finished) -> None:
        """Not before the answer."""

    def refused(self, refused: wire.Refused) -> None:
        """There is no such stream."""
        if not self.told.done():
            self.told.set_result(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The leader is gone; if it has the stream, it goes on there without a router."""
        if not self.told.done():
            self.told.set_result(None)
