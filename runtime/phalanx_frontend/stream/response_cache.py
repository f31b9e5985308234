"""Responses from a cache, as tokens: the text of a hit is made as that of any other response.

A `ResponseCache` stores outputs. A stream is replayed from it, or recorded for it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.resume import Item, close

MAX_PIECES = 16
"""Deltas of a replayed stream of usual length: each costs the encoding of a chunk."""
MAX_PIECE_TOKENS = 1024
"""Their tokens become text without an interruption, in a few milliseconds."""
CacheResult = Literal["exact", "miss"]
"""Values of the response header `x-phalanx-cache`."""


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """A request whose response may be stored."""

    request: wire.Request  # the object that the backend receives
    ending: tuple[str, ...] = ()  # stop strings and what else decides where the text ends; empty without stop strings


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedOutput:
    """The whole output of a request."""

    tokens: Sequence[int]
    finish: wire.FinishReason
    cached_tokens: int  # of the prompt, as the response reported
    seconds: float  # that the response took


class ResponseCache(Protocol):
    """Stores outputs. Bound to one event loop."""

    @property
    def is_enabled(self) -> bool:
        """Whether responses are stored."""
        ...

    def find(self, query: CacheQuery) -> CachedOutput | None:
        """Returns the stored output, if any."""
        ...

    def store(self, query: CacheQuery, output: CachedOutput) -> None:
        """Stores an output, while the backend's stream of the request is open."""
        ...


class NoResponseCache:
    """Stores nothing."""

    is_enabled = False

    def find(self, query: CacheQuery) -> CachedOutput | None:
        """Returns nothing."""
        return None

    def store(self, query: CacheQuery, output: CachedOutput) -> None:
        """Does nothing."""


NO_RESPONSE_CACHE: ResponseCache = NoResponseCache()


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
    """Yields a stored output in pieces. Other streams continue between those of a long one."""
    tokens = list(output.tokens)
    size = min(max(1, -(-len(tokens) // MAX_PIECES)), MAX_PIECE_TOKENS)
    for start in range(0, max(1, len(tokens)), size):
        if start and len(tokens) > MAX_PIECE_TOKENS:
            await asyncio.sleep(0)
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
