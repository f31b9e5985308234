"""Stored responses on their way to other routers: each router sends them to its peer, which passes them on around the ring."""

from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from phalanx_api.summary import CacheScope
from phalanx_router.resume.peer_wire import SharedResponse
from phalanx_router.routing.equality import DIGEST_BYTES
from phalanx_router.routing.response_lru import TOKEN_TYPE, StoredQuestion, StoredResponse

MAX_WAITING_BYTES = 1 << 20
"""Of responses that wait for the peer, as encoded; over it the oldest are not shared. Their tokens take up to eight times as much
memory as lists."""
FRAME_BYTES = 64 << 10
"""Of responses in one frame, after the first: 3 MiB/s at most."""
MAX_RESPONSE_BYTES = 256 << 10


def to_wire(key: bytes, stored: StoredResponse, vector: bytes, *, scope: CacheScope, hops: int, now: float) -> SharedResponse:
    """Returns a stored response as it is sent. `hops`: routers that lack it."""
    return SharedResponse(
        key=key,
        tokens=stored.tokens.tolist(),
        finish=stored.finish,
        cached_tokens=stored.cached_tokens,
        seconds=stored.seconds,
        revision=stored.revision,
        scope=scope,
        age_s=max(now - stored.stored_at, 0.0),
        hops=hops,
        conversation=stored.question.conversation if stored.question is not None else b"",
        question=stored.question.text if stored.question is not None else "",
        vector=vector,
    )


def from_wire(shared: SharedResponse, revision: str, now: float) -> StoredResponse | None:
    """Returns a received response as it is stored, with the router's own `revision` text; null if it is invalid."""
    has_question = bool(shared.conversation)
    if len(shared.key) != DIGEST_BYTES or shared.age_s < 0 or has_question != (len(shared.conversation) == DIGEST_BYTES):
        return None
    try:
        tokens = array(TOKEN_TYPE, shared.tokens)
    except OverflowError:
        return None
    return StoredResponse(
        tokens=tokens,
        finish=shared.finish,
        cached_tokens=shared.cached_tokens,
        seconds=shared.seconds,
        revision=revision,
        stored_at=now - shared.age_s,
        question=StoredQuestion(shared.conversation, shared.question) if has_question else None,
    )


def size_of(shared: SharedResponse) -> int:
    """Returns about the bytes of an encoded response."""
    return 256 + 5 * len(shared.tokens) + 4 * len(shared.question) + len(shared.vector)


class Outbox:
    """Responses that wait for the peer, bounded in bytes. They grow older meanwhile. Times are those of the caller's clock."""

    def __init__(self) -> None:
        self.on_put: Callable[[], None] = lambda: None
        self._waiting: deque[tuple[float, SharedResponse]] = deque()  # since when
        self._num_bytes = 0

    def put(self, shared: SharedResponse, now: float) -> None:
        """Adds a response, unless it is too large."""
        if shared.hops < 1 or size_of(shared) > MAX_RESPONSE_BYTES:
            return
        self._waiting.append((now, shared))
        self._num_bytes += size_of(shared)
        while self._num_bytes > MAX_WAITING_BYTES:
            self._pop()
        self.on_put()

    def take(self, now: float) -> list[SharedResponse]:
        """Removes and returns the responses of one frame."""
        taken, num_bytes = list[SharedResponse](), 0
        while self._waiting and (not taken or num_bytes + size_of(self._waiting[0][1]) <= FRAME_BYTES):
            since, shared = self._pop()
            num_bytes += size_of(shared)
            taken.append(msgspec.structs.replace(shared, age_s=shared.age_s + max(now - since, 0.0)))
        return taken

    def clear(self) -> None:
        """Removes all."""
        self._waiting.clear()
        self._num_bytes = 0

    def _pop(self) -> tuple[float, SharedResponse]:
        since, shared = self._waiting.popleft()
        self._num_bytes -= size_of(shared)
        return since, shared
