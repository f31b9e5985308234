"""The streams of all choices of one answer as one stream, in the order in which their deltas come.

A single stream is passed through. Of several each has at most one delta taken in advance, so a slow client makes the deltas
longer and never a queue.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from phalanx_frontend.backend import Delta, KeepAlive
from phalanx_frontend.stream.reply import StreamBroken

Item = Delta | KeepAlive


class Siblings:
    """Streams that live and end together, as an iterator of items with their stream's position. The first failure is raised.

    `end` ends one stream, `close` all of them, which aborts their requests. The iterator ends when every stream was ended; one
    that has no more items before that raises StreamBroken.
    """

    def __init__(self, streams: Sequence[AsyncIterator[Item]]) -> None:
        self._streams = streams
        self._only = streams[0] if len(streams) == 1 else None
        self._taking: dict[asyncio.Future[Item], int] = {}
        self._ready: deque[asyncio.Future[Item]] = deque()
        self._idle = list(range(len(streams)))
        self._ended: set[int] = set()

    def __aiter__(self) -> "Siblings":
        return self

    async def __anext__(self) -> tuple[int, Item]:
        """The next item of any stream."""
        if len(self._ended) == len(self._streams):
            raise StopAsyncIteration
        try:
            return await self._next_of_several() if self._only is None else (0, await self._only.__anext__())
        except StopAsyncIteration as error:
            raise StreamBroken("the backend's stream ended without a reason") from error

    async def end(self, index: int) -> None:
        """Ends the stream that the last item came from, after its last item or early."""
        self._ended.add(index)
        await close(self._streams[index])

    async def close(self) -> None:
        """Ends every stream. Those that ended already stay so."""
        for taken in self._taking:
            taken.cancel()
        await asyncio.gather(*self._taking, return_exceptions=True)
        self._taking = {}
        for index in range(len(self._streams)):
            await self.end(index)

    async def _next_of_several(self) -> tuple[int, Item]:
        for index in self._idle:
            if index not in self._ended:
                self._taking[asyncio.ensure_future(_take(self._streams[index]))] = index
        self._idle = []
        if not self._ready:
            done, _ = await asyncio.wait(self._taking, return_when=asyncio.FIRST_COMPLETED)
            self._ready.extend(sorted(done, key=lambda taken: self._taking[taken]))
        taken = self._ready.popleft()
        index = self._taking.pop(taken)
        self._idle.append(index)
        return index, taken.result()


async def _take(stream: AsyncIterator[Item]) -> Item:
    return await anext(stream)


async def close(stream: AsyncIterator[Item]) -> None:
    """Ends a stream early, which aborts its request. A stream that ended already stays so."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
