"""Resumption of a stream: the client repeats its request with `Last-Event-ID` and receives the rest.

Delivered tokens are fed again without output, which restores detokenizer, stop strings and parsers. Seeds derive from the stream
name, so a lost choice is sampled again with the same tokens.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec

from phalanx_api import wire
from phalanx_frontend.backend import Backend, Delta, KeepAlive, ResumableStream
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.ids import EventId, parse_event_id
from phalanx_frontend.stream.reply import Reply, StreamBroken
from phalanx_frontend.tracing.tracer import RequestTrace

Item = Delta | KeepAlive


class SiblingStreams:
    """Merges streams into (position, item). Raises the first failure.

    Of several streams at most one delta each is taken in advance, so a slow client never builds a queue.
    """

    def __init__(self, streams: Sequence[AsyncIterator[Item]]) -> None:
        self._streams = streams
        self._only = streams[0] if len(streams) == 1 else None
        self._tasks: dict[asyncio.Future[Item], int] = {}
        self._ready: deque[asyncio.Future[Item]] = deque()
        self._idle = list(range(len(streams)))
        self._ended: set[int] = set()

    def __aiter__(self) -> "SiblingStreams":
        return self

    async def __anext__(self) -> tuple[int, Item]:
        """Returns the next item of any stream."""
        if len(self._ended) == len(self._streams):
            raise StopAsyncIteration
        try:
            return await self._next_of_several() if self._only is None else (0, await self._only.__anext__())
        except StopAsyncIteration as error:
            raise StreamBroken("the backend's stream ended without a reason") from error

    async def end(self, index: int) -> None:
        """Ends one stream and aborts its request."""
        self._ended.add(index)
        await close(self._streams[index])

    async def close(self) -> None:
        """Ends all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = {}
        for index in range(len(self._streams)):
            await self.end(index)

    async def _next_of_several(self) -> tuple[int, Item]:
        for index in self._idle:
            if index not in self._ended:
                self._tasks[asyncio.ensure_future(_next_item(self._streams[index]))] = index
        self._idle = []
        if not self._ready:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._ready.extend(sorted(done, key=lambda task: self._tasks[task]))
        task = self._ready.popleft()
        index = self._tasks.pop(task)
        self._idle.append(index)
        return index, task.result()


async def _next_item(stream: AsyncIterator[Item]) -> Item:
    return await anext(stream)


async def close(stream: AsyncIterator[Item]) -> None:
    """Ends a stream and aborts its request."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()


SEED_BITS = 63
IDS_AT_ONCE = 16
"""Choices that are looked up together until one is known: a look-up sends one message per choice to every group."""


def stream_seed(stream: str, prompt: int) -> int:
    """Returns the default seed of a prompt."""
    digest = hashlib.sha256(f"{stream}/{prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Position of a client in one choice."""

    num_delivered: int  # tokens that the client has
    finish: wire.FinishReason | None  # if the choice ended


def parse_last_event_id(text: str) -> EventId:
    """Parses a Last-Event-ID. Raises ApiError 404."""
    event_id = parse_event_id(text)
    if event_id is None:
        raise unknown_stream()
    return event_id


def unknown_stream() -> ApiError:
    """Returns a 404, equal for unknown streams and those of other tenants."""
    message = "unknown Last-Event-ID: its stream ended too long ago or belongs to another key; repeat the request without it"
    return ApiError(404, message, "Last-Event-ID", "unknown_stream")


async def find_resumable(
    backend: Backend, event_id: EventId, requested: Sequence[wire.Request], trace: RequestTrace | None
) -> list[tuple[wire.Request, ResumePoint]]:
    """Returns the requests to continue, and lets `trace` continue theirs. Raises ApiError 404 or 400."""
    if len(requested) != len(event_id.indices):
        raise _differs("another number of choices")
    found = await _find(backend, [request.id for request in requested], requested[0].tenant)
    if not found or any(found[request.id].request.tenant != request.tenant for request in requested if request.id in found):
        raise unknown_stream()
    requested = [_with_adapter(request, next(iter(found.values())).request.adapter) for request in requested]
    resumed = [
        _continued(request, found.get(request.id), index + 1) for request, index in zip(requested, event_id.indices, strict=True)
    ]
    known = next((stream for stream in found.values() if stream.request.trace is not None), None)
    if trace is not None and known is not None and known.request.trace is not None:
        trace.resume(known.request.trace, known.has_lost_router)
    return resumed


async def _find(backend: Backend, ids: Sequence[str], tenant: str) -> dict[str, ResumableStream]:
    """Returns the known streams. Looks up `IDS_AT_ONCE` at a time until one is found: invented ids must not flood groups."""
    found: dict[str, ResumableStream] = {}
    start = 0
    while start < len(ids):
        end = len(ids) if found else start + IDS_AT_ONCE
        found |= await backend.find(ids[start:end], tenant)
        start = end
    return found


def _with_adapter(requested: wire.Request, adapter: wire.Adapter | None) -> wire.Request:
    """Returns the request with the adapter of its stream, whose content groups may have replaced since, or unloaded."""
    if (requested.adapter and requested.adapter.name) != (adapter and adapter.name):
        raise _differs("another model")
    return msgspec.structs.replace(requested, adapter=adapter)


def _continued(
    requested: wire.Request, resumable: ResumableStream | None, num_delivered: int
) -> tuple[wire.Request, ResumePoint]:
    if resumable is None:
        known, finish = msgspec.structs.replace(requested, epoch=1), None
    else:
        known, finish = resumable.request.with_pixels_of(requested), resumable.finish
    if msgspec.structs.replace(known, epoch=0, delivered=[], alone=False, waited_ms=0.0, trace=requested.trace) != requested:
        raise _differs("other fields")
    if num_delivered > (requested.sampling.max_tokens if finish is None else len(known.delivered)):
        raise _differs("fewer tokens than the id names")
    sampling = requested.sampling
    has_details = (
        sampling.logprobs is not None or sampling.return_gaps or (sampling.prompt_logprobs is not None and not num_delivered)
    )
    if has_details and len(known.delivered) > num_delivered:  # journals lack logprobs
        known, finish = msgspec.structs.replace(known, delivered=known.delivered[:num_delivered]), None
    return known, ResumePoint(num_delivered, finish)


def _differs(what: str) -> ApiError:
    return invalid("Last-Event-ID", f"the stream of this Last-Event-ID had {what}; repeat the original request", "resume_differs")


async def resume_answer(
    backend: Backend, request: wire.Request, reply: Reply, skip: Callable[[str, Sequence[int]], None], resume_point: ResumePoint
) -> AsyncIterator[Delta | KeepAlive]:
    """Yields what the client lacks; feeds the rest to `reply` and `skip`."""
    known = request.delivered
    skipped = known[: resume_point.num_delivered]
    skip(reply.skip_delivered(skipped), skipped)
    if reply.finish is not None:
        yield Delta(index=reply.completion_tokens, tokens=[], finish=reply.finish)
    elif resume_point.finish is not None or len(known) > resume_point.num_delivered:
        yield Delta(index=resume_point.num_delivered, tokens=known[resume_point.num_delivered :], finish=resume_point.finish)
    if reply.finish is not None:
        return
    stream = backend.generate(request)
    try:
        async for item in stream:
            missing = resume_point.num_delivered - reply.completion_tokens
            if isinstance(item, Delta) and missing > 0:
                skipped = item.tokens[:missing]
                skip(reply.skip_delivered(skipped), skipped)
                item = _after(item, missing, reply.finish)
                if not item.tokens and item.finish is None:
                    continue
            yield item
    finally:
        await close(stream)


def _after(delta: Delta, missing: int, finish: wire.FinishReason | None) -> Delta:
    """Returns the delta without its first `missing` tokens."""
    if finish is not None:
        return Delta(index=delta.index + missing, tokens=[], finish=finish)
    tokens, details = delta.tokens[missing:], delta.details[missing:]
    return Delta(
        index=delta.index + missing,
        tokens=tokens,
        finish=delta.finish,
        cached_tokens=delta.cached_tokens,
        details=details,
        prompt_details=delta.prompt_details,
    )
