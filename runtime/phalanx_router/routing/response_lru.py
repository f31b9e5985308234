"""Stored responses, bounded in entries, bytes and age. The least recently used is dropped first.

A response may have the question that it answers: its text, and its vector in an index.
"""

import sys
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_router.routing.semantic import Candidate
from phalanx_router.routing.vector_index import CONVERSATION_BYTES, VECTOR_BYTES, VectorIndex

ENTRY_BYTES = 768
"""Upper bound of an entry's memory in addition to its tokens, also after many changes of the dicts. Revisions are shared."""
TOKEN_TYPE, TOKEN_BYTES = "I", 4
QUESTION_BYTES = 256
"""Upper bound of a question's memory in addition to its text and vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LruBounds:
    """Limits of a `ResponseLru`."""

    ttl_s: float
    max_entries: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class StoredQuestion:
    """The last message of a request."""

    conversation: bytes  # `equality.conversation_key`
    text: str

    @property
    def num_bytes(self) -> int:
        """Memory of the question, without its vector."""
        return QUESTION_BYTES + sys.getsizeof(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The output of one request."""

    tokens: "array[int]"
    finish: wire.FinishReason
    cached_tokens: int  # of the prompt
    seconds: float  # that its computation took
    revision: str  # of the groups that computed it
    stored_at: float
    question: StoredQuestion | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the entry, without its vector."""
        question = 0 if self.question is None else self.question.num_bytes
        return ENTRY_BYTES + TOKEN_BYTES * len(self.tokens) + question


class ResponseLru:
    """Responses by key. Times are those of the caller's clock, which never goes back."""

    def __init__(self, bounds: LruBounds) -> None:
        self.index = VectorIndex()
        self._bounds = bounds
        self._entry_bytes = 0
        self._entries: dict[bytes, StoredResponse] = {}  # the least recently used first
        self._by_age: dict[bytes, None] = {}  # the oldest first

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, vectors included."""
        return self._entry_bytes + self.index.num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

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
        entry = self._current(key, now)
        if entry is not None:
            del self._entries[key]
            self._entries[key] = entry
        return entry

    def nearest(self, conversation: bytes, vector: bytes, count: int, now: float) -> list[Candidate]:
        """Returns the responses to the most similar questions of a conversation, at most `count`."""
        self.expire(now)
        found = [(key, self._current(key, now), similarity) for key, similarity in self.index.search(conversation, vector, count)]
        return [
            Candidate(
                key=key,
                similarity=similarity,
                question=entry.question.text,
                output_tokens=len(entry.tokens),
                is_cut=entry.finish == "length",
            )
            for key, entry, similarity in found
            if entry is not None and entry.question is not None
        ]

    def put(self, key: bytes, entry: StoredResponse, vector: bytes = b"") -> None:
        """Stores a response; `vector`: of its question. One that exceeds the limits by itself is dropped, others are not."""
        self._drop(key)
        size = entry.num_bytes
        if entry.question is not None:
            assert self.index.can_add(entry.question.conversation, vector), "vectors of a conversation have one size"
            size += CONVERSATION_BYTES + VECTOR_BYTES + len(vector)
        if size > self._bounds.max_bytes or self._bounds.max_entries < 1:
            return
        self._entries[key], self._by_age[key] = entry, None
        self._entry_bytes += entry.num_bytes
        if entry.question is not None:
            self.index.add(entry.question.conversation, key, vector)
        self._shrink(entry.stored_at)

    def retain(self, revisions: Collection[str]) -> None:
        """Drops the responses of other revisions."""
        for key in [key for key, entry in self._entries.items() if entry.revision not in revisions]:
            self._drop(key)

    def clear(self) -> int:
        """Drops all responses; returns their number."""
        count = len(self)
        self._entries, self._by_age, self._entry_bytes = {}, {}, 0
        self.index.clear()
        return count

    def _current(self, key: bytes, now: float) -> StoredResponse | None:
        """The response, unless it is too old: one of another router may have been stored after younger ones."""
        entry = self._entries.get(key)
        if entry is None or not self._is_expired(entry, now):
            return entry
        self._drop(key)
        return None

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
            self._entry_bytes -= entry.num_bytes
            if entry.question is not None:
                self.index.remove(entry.question.conversation, key)
