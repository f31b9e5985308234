"""A stream that is taken up again: its client repeats the request with `Last-Event-ID`, and gets what it has not got yet.

The request is made anew from the body and must equal the one that began; the tokens that the client has are read once more in
silence, so that detokenizer, stop strings and parsers stand where they stood. Seeds of streams follow from the stream's name,
so that a choice of which nothing is known any more is drawn again with equal tokens, as far as they are deterministic.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec

from phalanx_api import wire
from phalanx_frontend.backend import Backend, Begun, Delta, KeepAlive
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.ids import EventId, read_event_id
from phalanx_frontend.stream.reply import Reply, StreamBroken

# The streams of all choices of one answer as one stream, in the order in which their deltas come.
# A single stream is passed through. Of several each has at most one delta taken in advance, so a slow client makes the deltas
# longer and never a queue.

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


SEED_BITS = 63


def seed_of(stream: str, prompt: int) -> int:
    """The seed of a stream's prompt when its request brings none: as good as drawn, for the name has 128 random bits."""
    digest = hashlib.sha256(f"{stream}/{prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


@dataclass(frozen=True, slots=True)
class Past:
    """How many tokens of a choice a client has, and why the choice has ended, if it has."""

    have: int
    finish: wire.FinishReason | None


def read_last_event_id(text: str) -> EventId:
    """Up to where the client has which stream. Raises ApiError 404 for what is no id of ours."""
    event_id = read_event_id(text)
    if event_id is None:
        raise unknown_stream()
    return event_id


def unknown_stream() -> ApiError:
    """The same for an id that nobody knows any more and for one of another key: who has no right to it learns nothing."""
    message = "no stream of this Last-Event-ID is known: it ended too long ago, or was begun with another key"
    return ApiError(404, message, "Last-Event-ID", "unknown_stream")


async def begun_before(backend: Backend, event_id: EventId, asked: Sequence[wire.Request]) -> list[tuple[wire.Request, Past]]:
    """The requests as they go on, each with what its client has. Raises ApiError 404 or 400."""
    found = await backend.find([request.id for request in asked], asked[0].tenant)
    if not found or any(found[request.id].request.tenant != request.tenant for request in asked if request.id in found):
        raise unknown_stream()
    if len(asked) != len(event_id.indices):
        raise _differs("another number of choices")
    return [_goes_on(request, found.get(request.id), index + 1) for request, index in zip(asked, event_id.indices, strict=True)]


def _goes_on(asked: wire.Request, begun: Begun | None, have: int) -> tuple[wire.Request, Past]:
    if begun is None:
        known, finish = msgspec.structs.replace(asked, epoch=1), None
    else:
        known, finish = begun.request, begun.finish
    if msgspec.structs.replace(known, epoch=0, delivered=[], alone=False, waited_ms=0.0) != asked:
        raise _differs("other fields")
    if have > (asked.sampling.max_tokens if finish is None else len(known.delivered)):
        raise _differs("fewer tokens than the id names")
    sampling = asked.sampling
    has_details = sampling.logprobs is not None or sampling.return_gaps or (sampling.prompt_logprobs is not None and not have)
    if has_details and len(known.delivered) > have:  # no journal holds them: they are drawn again
        known, finish = msgspec.structs.replace(known, delivered=known.delivered[:have]), None
    return known, Past(have, finish)


def _differs(what: str) -> ApiError:
    return invalid(
        "Last-Event-ID", f"the stream of this Last-Event-ID had {what}: a request is resumed as it was", "resume_differs"
    )


async def go_on(
    backend: Backend, request: wire.Request, reply: Reply, skip: Callable[[str, Sequence[int]], None], past: Past
) -> AsyncIterator[Delta | KeepAlive]:
    """What the client has not got of a choice, as a backend's stream. Reply and `skip` hear in silence what it has."""
    known = request.delivered
    had = known[: past.have]
    skip(reply.go_on(had), had)
    if reply.finish is not None:
        yield Delta(reply.completion_tokens, [], reply.finish)
    elif past.finish is not None or len(known) > past.have:
        yield Delta(past.have, known[past.have :], past.finish)
    if reply.finish is not None:
        return
    stream = backend.generate(request)
    try:
        async for item in stream:
            missing = past.have - reply.completion_tokens
            if isinstance(item, Delta) and missing > 0:
                had = item.tokens[:missing]
                skip(reply.go_on(had), had)
                item = _after(item, missing, reply.finish)
                if not item.tokens and item.finish is None:
                    continue
            yield item
    finally:
        await close(stream)


def _after(delta: Delta, missing: int, finish: wire.FinishReason | None) -> Delta:
    """The delta without its first tokens; they may have ended the reply."""
    if finish is not None:
        return Delta(delta.index + missing, [], finish)
    tokens, details = delta.tokens[missing:], delta.details[missing:]
    return Delta(delta.index + missing, tokens, delta.finish, delta.cached_tokens, details, delta.prompt_details)
