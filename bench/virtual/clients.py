"""A client of a router in virtual time: it goes on at the next router when one dies, by the stream's name or its own tokens."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, ResumableStream
from phalanx_router.backend import RouterBackend
from tests.runtime.fake_runner import next_token

PATIENCE_S = 45.0
"""After so long a stream counts as hung."""


class Client:
    """One request, of which the client wants so many tokens. `wrong` gets a sentence for each thing that must not be.

    num_resumed: how often a router found its stream.
    """

    def __init__(self, request: wire.Request, count: int, router: Callable[[], RouterBackend | None], wrong: list[str]) -> None:
        self.request = request
        self.num_resumed = 0
        self._count = count
        self._router = router
        self._wrong = wrong
        self._got: list[int] = []
        self._was_cut = False
        self._has_left = False
        self._inner: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """The client wants no more."""
        self._has_left = True
        self.cut()

    def cut(self) -> None:
        """The connection to the router ends."""
        self._was_cut = True
        if self._inner is not None:
            self._inner.cancel()

    async def run(self) -> None:
        """Returns when the client has what it wanted, or left."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not self._has_left and not await self._hear():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self._say(f"hangs after {len(self._got)} tokens")
            return
        if len(self._got) < self._count and not self._has_left:
            self._say(f"got {len(self._got)} tokens of {self._count}")

    def odd(self, salts: set[int]) -> str | None:
        """The first token that does not follow from those before it. Groups with different salts draw differently."""
        for index, token in enumerate(self._got):
            context = self.request.prompt + self._got[:index]
            if all(next_token(context, self.request.sampling.seed + salt) != token for salt in salts):
                return f"{self.request.id}: no group draws {token} at index {index}"
        return None

    async def _hear(self) -> bool:
        """Whether the end came. False when the router died, or cannot serve yet."""
        fleet = self._router()
        if fleet is None or fleet.links.assets() is None:
            return False
        task = self._inner = asyncio.create_task(self._consume(fleet))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            return False
        error = task.exception()
        code = error.code if isinstance(error, BackendError) else ""
        if code == "groups_silent" or (code == "no_group_ready" and not self._got):
            return False
        if error is not None:
            self._say(f"failed: {error!r}")
        return True

    async def _consume(self, fleet: RouterBackend) -> None:
        begun = await self._begun(fleet)
        if begun.finish is not None:
            return
        at = len(begun.request.delivered)
        stream = fleet.generate(begun.request)
        assert isinstance(stream, AsyncGenerator), "it can be closed early"
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, Delta):
                    if item.index != at:
                        self._say(f"index {item.index} after {at} tokens")
                    self._got += item.tokens[max(0, len(self._got) - at) :]
                    at += len(item.tokens)
                    if len(self._got) >= self._count:
                        return

    async def _begun(self, fleet: RouterBackend) -> ResumableStream:
        """The stream as it is to go on: as it was found, if it may be resumed; else from the tokens that are here."""
        mine = msgspec.structs.replace(self.request, delivered=list(self._got))
        if not (self._was_cut and mine.can_resume):
            return ResumableStream(mine)
        found = (await fleet.find([mine.id], mine.tenant)).get(mine.id)
        if found is None:
            return ResumableStream(mine)
        self.num_resumed += 1
        self._got += found.request.delivered[len(self._got) :]
        return found

    def _say(self, what: str) -> None:
        self._wrong.append(f"{self.request.id}: {what}")
