"""Streams of a request whose response may be stored: replayed from the cache, or recorded for it."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from phalanx_frontend.backend import Delta
from phalanx_frontend.response_cache import CachedOutput, CacheQuery, CacheResult, ResponseCache
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.resume import Item, close

MAX_PIECES = 16
"""Deltas of a replayed stream: each costs the encoding of a chunk."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The lookup of one request."""

    cache: ResponseCache
    query: CacheQuery
    found: CachedOutput | None

    @property
    def result(self) -> CacheResult:
        """Value of the response header."""
        return "miss" if self.found is None else "exact"


def look_up(cache: ResponseCache, query: CacheQuery) -> CacheUse:
    """Returns the lookup of a request."""
    return CacheUse(cache, query, cache.find(query))


async def replay(output: CachedOutput) -> AsyncIterator[Item]:
    """Yields a stored output in pieces, without waiting."""
    tokens = list(output.tokens)
    size = max(1, -(-len(tokens) // MAX_PIECES))
    for start in range(0, max(1, len(tokens)), size):
        is_last = start + size >= len(tokens)
        yield Delta(
            index=start,
            tokens=tokens[start : start + size],
            finish=output.finish if is_last else None,
            cached_tokens=output.cached_tokens,
        )


async def record(stream: AsyncIterator[Item], use: CacheUse, reply: Reply, seconds: Callable[[], float]) -> AsyncIterator[Item]:
    """Yields `stream` and stores it if `reply` has ended by then, also at a stop string: not when the client has left."""
    started_s, tokens = seconds(), list[int]()
    try:
        async for item in stream:
            if isinstance(item, Delta):
                tokens += item.tokens
            yield item
    finally:
        if reply.finish is not None:
            output = CachedOutput(
                tokens=tokens[: reply.completion_tokens],
                finish=reply.finish,
                cached_tokens=reply.cached_tokens,
                seconds=seconds() - started_s,
            )
            use.cache.store(use.query, output)
        await close(stream)
