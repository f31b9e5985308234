"""Responses from a cache, as tokens: the text of a hit is made as that of any other response.

A `ResponseCache` stores outputs. A stream is replayed from it, or recorded for it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.resume import Item, close
from phalanx_frontend.text.tokenizer import RecentEncodings

log = logging.getLogger(__name__)

MAX_PIECES = 8
"""Deltas of a replayed stream of usual length: each costs the encoding of a chunk."""
MAX_PIECE_TOKENS = 1024
"""Their tokens become text without an interruption, in a few milliseconds."""
CacheResult = Literal["exact", "semantic", "miss"]


class QuestionModel(Protocol):
    """Text of the model that a request asks."""

    async def pooled(self, text: str, *, is_question: bool) -> wire.Request:
        """Returns the request for the embedding of a question, or of another text. Raises ApiError."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of an output."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The last message of the user, as a request that may differ by it alone from a stored one."""

    text: str
    context: bytes  # digest of all that the prompt has besides it
    max_tokens: int  # limit that the client has set; 0 without one
    stop: tuple[str, ...]
    model: QuestionModel


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """A request whose response may be stored."""

    request: wire.Request  # the object that the backend receives
    ending: tuple[str, ...] = ()  # what decides how tokens become text and where it ends: the tokenizer, stop strings
    question: Callable[[], Question | None] = lambda: None  # null without a message that others may resemble


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedOutput:
    """The whole output of a request."""

    tokens: Sequence[int]
    finish: wire.FinishReason
    cached_tokens: int  # of the prompt, as the response reported
    seconds: float  # that the response took


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAnswer:
    """Result of a lookup."""

    result: CacheResult = "miss"
    output: CachedOutput | None = None  # of a hit
    similarity: float | None = None  # of a semantic hit
    embedded: object = None  # the cache's own: the embedding of the question, stored with the response

    @property
    def header(self) -> str:
        """Value of the response header `x-phalanx-cache`."""
        return self.result if self.similarity is None else f"{self.result}; similarity={self.similarity:.2f}"


MISS = CacheAnswer()


class ResponseCache(Protocol):
    """Stores outputs. Bound to one event loop."""

    @property
    def is_enabled(self) -> bool:
        """Whether responses are stored."""
        ...

    @property
    def encodings(self) -> RecentEncodings:
        """Token ids of the latest texts."""
        ...

    async def find(self, query: CacheQuery) -> CacheAnswer:
        """Returns the stored output, if any. Takes at most about a second, at first some more, and never fails."""
        ...

    def store(self, query: CacheQuery, output: CachedOutput, answer: CacheAnswer) -> None:
        """Stores an output after the miss `answer`, while the backend's stream of the request is open."""
        ...

    def was_sent(self, query: CacheQuery, answer: CacheAnswer) -> None:
        """Reports that the client has the whole response of a hit."""
        ...


class NoResponseCache:
    """Stores nothing."""

    is_enabled = False
    encodings = RecentEncodings()

    async def find(self, query: CacheQuery) -> CacheAnswer:
        """Returns a miss."""
        return MISS

    def store(self, query: CacheQuery, output: CachedOutput, answer: CacheAnswer) -> None:
        """Does nothing."""

    def was_sent(self, query: CacheQuery, answer: CacheAnswer) -> None:
        """Does nothing."""


NO_RESPONSE_CACHE: ResponseCache = NoResponseCache()


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The cache as one request uses it."""

    cache: ResponseCache
    query: CacheQuery

    async def find(self) -> CacheAnswer:
        """Returns the result of the lookup."""
        return await self.cache.find(self.query)


async def replay_hit(use: CacheUse, answer: CacheAnswer, output: CachedOutput, *, is_streamed: bool) -> AsyncIterator[Item]:
    """Yields the output of a hit, and reports when it was read to its end."""
    has_ended = False
    try:
        async for item in replay(output, is_streamed=is_streamed):
            has_ended = isinstance(item, Delta) and item.finish is not None
            yield item
    finally:
        if has_ended:
            use.cache.was_sent(use.query, answer)


async def replay(output: CachedOutput, *, is_streamed: bool = True) -> AsyncIterator[Item]:
    """Yields a stored output in pieces: up to `MAX_PIECES`, or one if it is not streamed; more of a long output.

    Other streams continue between the pieces of a long one.
    """
    tokens = list(output.tokens)
    size = min(max(1, -(-len(tokens) // MAX_PIECES)) if is_streamed else max(1, len(tokens)), MAX_PIECE_TOKENS)
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


async def record(
    stream: AsyncIterator[Item], use: CacheUse, answer: CacheAnswer, reply: Reply, seconds: Callable[[], float]
) -> AsyncIterator[Item]:
    """Yields `stream` and stores it if `reply` has ended by then, also at a stop string: not when the client has left."""
    started_s, tokens = seconds(), list[int]()
    try:
        async for item in stream:
            if isinstance(item, Delta):
                tokens += item.tokens
            yield item
    finally:
        try:
            if reply.finish is not None:
                output = CachedOutput(
                    tokens=tokens[: reply.completion_tokens],
                    finish=reply.finish,
                    cached_tokens=reply.cached_tokens,
                    seconds=seconds() - started_s,
                )
                use.cache.store(use.query, output, answer)
        except Exception:
            log.exception("a response was not stored", extra={"request_id": use.query.request.id})
        finally:
            await close(stream)
