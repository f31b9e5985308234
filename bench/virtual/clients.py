"""A client of a router in virtual time. When its router fails, it reconnects to another one and resumes its stream."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, ResumableStream
from phalanx_router.backend import RouterBackend
from tests.runtime.fake_runner import next_token

HANG_S = 45.0
"""Seconds after which a stream counts as hung."""


class Client:
    """Reads `count` tokens of one request; adds a sentence to `violations` for each error."""

    def __init__(
        self, request: wire.Request, count: int, router: Callable[[], RouterBackend | None], violations: list[str]
    ) -> None:
        self.request = request
        self.num_resumed = 0  # streams that a router found
        self._count = count
        self._router = router
        self._violations = violations
        self._tokens: list[int] = []
        self._was_cut = False
        self._has_disconnected = False
        self._inner: asyncio.Task[None] | None = None

    def disconnect(self) -> None:
        self._has_disconnected = True
        self.cut()

    def cut(self) -> None:
        self._was_cut = True
        if self._inner is not None:
            self._inner.cancel()

    async def run(self) -> None:
        """Reads until all tokens arrived, or the client disconnected."""
        try:
            async with asyncio.timeout(HANG_S):
                while not self._has_disconnected and not await self._read():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self._record(f"hung after {len(self._tokens)} tokens")
            return
        if len(self._tokens) < self._count and not self._has_disconnected:
            self._record(f"got {len(self._tokens)} tokens of {self._count}")

    def wrong_token(self, salts: set[int]) -> str | None:
        """Returns the first token that does not follow from its context. Groups with different salts sample differently."""
        for index, token in enumerate(self._tokens):
            context = self.request.prompt + self._tokens[:index]
            if all(next_token(context, self.request.sampling.seed + salt) != token for salt in salts):
                return f"{self.request.id}: no group samples {token} at index {index}"
        return None

    async def _read(self) -> bool:
        """Reads from the current router; returns whether the stream ended, false if the router died or cannot serve yet."""
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
        if code == "groups_silent" or (code == "no_group_ready" and not self._tokens):
            return False
        if error is not None:
            self._record(f"failed: {error!r}")
        return True

    async def _consume(self, fleet: RouterBackend) -> None:
        resumed = await self._resumable(fleet)
        if resumed.finish is not None:
            return
        index = len(resumed.request.delivered)
        stream = fleet.generate(resumed.request)
        assert isinstance(stream, AsyncGenerator), "it can be closed early"
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, Delta):
                    if item.index != index:
                        self._record(f"index {item.index} after {index} tokens")
                    self._tokens += item.tokens[max(0, len(self._tokens) - index) :]
                    index += len(item.tokens)
                    if len(self._tokens) >= self._count:
                        return

    async def _resumable(self, fleet: RouterBackend) -> ResumableStream:
        """Returns the stream to continue: the router's, if it is resumable and found, otherwise a replay."""
        request = msgspec.structs.replace(self.request, delivered=list(self._tokens))
        if not (self._was_cut and request.can_resume):
            return ResumableStream(request)
        found = (await fleet.find([request.id], request.tenant)).get(request.id)
        if found is None:
            return ResumableStream(request)
        self.num_resumed += 1
        self._tokens += found.request.delivered[len(self._tokens) :]
        return found

    def _record(self, error: str) -> None:
        self._violations.append(f"{self.request.id}: {error}")
