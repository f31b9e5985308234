"""Stored responses, bounded in entries, bytes and age. The least recently used is dropped first."""

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from phalanx_api import wire

ENTRY_BYTES = 768
"""Upper bound of an entry's memory in addition to its tokens, also after many changes of the dicts. Revisions are shared."""
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LruBounds:
    """Limits of a `ResponseLru`."""

    ttl_s: float
    max_entries: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The output of one request."""

    tokens: "array[int]"
    finish: wire.FinishReason
    cached_tokens: int  # of the prompt
    seconds: float  # that its computation took
    revision: str  # of the groups that computed it
    stored_at: float

    @property
    def num_bytes(self) -> int:
        """Memory of the entry."""
        return ENTRY_BYTES + TOKEN_BYTES * len(self.tokens)


class ResponseLru:
    """Responses by key. Times are those of the caller's clock, which never goes back."""

    def __init__(self, bounds: LruBounds) -> None:
        self.num_bytes = 0
        self._bounds = bounds
        self._entries: dict[bytes, StoredResponse] = {}  # the least recently used first
        self._by_age: dict[bytes, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def set_bounds(self, bounds: LruBounds, now: float) -> None:
        """Changes the limits."""
        self._bounds = bounds
        self._shrink(now)

    def expire(self, now: float) -> None:
        """Drops the responses that are too old."""
        while self._by_age and self._is_expired(self._entries[oldest := next(iter(self._by_age))], now):
            self._drop(oldest)

    def get(self, key: bytes, now: float) -> StoredResponse | None:
        """Returns a response, unless it is too old, and makes it the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._is_expired(entry, now):
            self._drop(key)
            return None
        del self._entries[key]
        self._entries[key] = entry
        return entry

    def put(self, key: bytes, entry: StoredResponse) -> None:
        """Stores a response. One that exceeds the limits by itself is dropped, others are not."""
        self._drop(key)
        if entry.num_bytes > self._bounds.max_bytes or self._bounds.max_entries < 1:
            return
        self._entries[key], self._by_age[key] = entry, None
        self.num_bytes += entry.num_bytes
        self._shrink(entry.stored_at)

    def retain(self, revisions: Collection[str]) -> None:
        """Drops the responses of other revisions."""
        for key in [key for key, entry in self._entries.items() if entry.revision not in revisions]:
            self._drop(key)

    def clear(self) -> int:
        """Drops all responses; returns their number."""
        count = len(self)
        self._entries, self._by_age, self.num_bytes = {}, {}, 0
        return count

    def _shrink(self, now: float) -> None:
        self.expire(now)
        while self.num_bytes > self._bounds.max_bytes or len(self) > self._bounds.max_entries:
            self._drop(next(iter(self._entries)))

    def _is_expired(self, entry: StoredResponse, now: float) -> bool:
        return now - entry.stored_at >= self._bounds.ttl_s

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            del self._by_age[key]
            self.num_bytes -= entry.num_bytes
