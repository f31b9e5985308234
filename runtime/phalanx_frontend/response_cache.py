"""Interface to a cache of responses, as tokens: the text of a hit is made as that of any other response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from phalanx_api import wire

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
