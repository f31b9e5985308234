"""The response cache of one router: stores outputs of its groups by revision, as the policy allows."""

import sys
import time
from array import array
from collections.abc import Callable, Sequence

import msgspec

from phalanx_api.summary import ResponseCachePolicy
from phalanx_frontend.stream.response_cache import CachedOutput, CacheQuery
from phalanx_router.backend import RouterBackend
from phalanx_router.metrics import ResponseCacheMetrics
from phalanx_router.resume.peer_wire import JournalCopy
from phalanx_router.routing.equality import response_key
from phalanx_router.routing.response_lru import LruBounds, ResponseLru, StoredResponse

TOKEN_TYPE = "I"


def bounds_of(policy: ResponseCachePolicy | None) -> LruBounds:
    """Returns the limits of a policy; without one nothing is stored."""
    if policy is None:
        return LruBounds(ttl_s=0.0, max_entries=0, max_bytes=0)
    return LruBounds(ttl_s=policy.ttl_s, max_entries=policy.max_entries, max_bytes=policy.max_bytes)


class RouterResponseCache:
    """Implements `phalanx_frontend.stream.response_cache.ResponseCache`. Bound to one event loop."""

    def __init__(
        self, backend: RouterBackend, metrics: ResponseCacheMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._clock = clock
        self._policy: ResponseCachePolicy | None = None
        self._revisions: Sequence[str] = ()  # of known groups, the newest first
        self._responses = ResponseLru(bounds_of(None))
        backend.balancing.tick_listeners.append(self.refresh)

    @property
    def is_enabled(self) -> bool:
        """Whether the policy permits a response cache."""
        return self._backend.balancing.policy.response_cache is not None

    def refresh(self) -> None:
        """Applies the policy, and drops responses that are too old or of revisions that no group has any more.

        Without groups, responses are kept for the next groups and not used.
        """
        policy, before = self._backend.balancing.policy.response_cache, self._policy
        revisions = self._backend.links.revisions()
        if policy != before:
            self._policy = policy
            if policy is None or before is None or policy.scope != before.scope:
                self._responses.clear()
            self._responses.set_bounds(bounds_of(policy), self._clock())
        if revisions and revisions != self._revisions:
            self._responses.retain(revisions)
        self._revisions = revisions
        self._responses.expire(self._clock())
        self._show()

    def find(self, query: CacheQuery) -> CachedOutput | None:
        """Returns an output of the newest revision that has one."""
        self.refresh()
        now = self._clock()
        for revision in self._used_revisions():
            found = self._responses.get(self._key(query, revision), now)
            if found is not None:
                self._metrics.hit("exact", len(query.request.prompt), len(found.tokens), found.seconds)
                return self._output(query, found)
        self._metrics.missed()
        return None

    def _used_revisions(self) -> Sequence[str]:
        """During a canary without the newest one, whose responses would reach more requests than its share."""
        canary = self._backend.balancing.policy.canary
        return [identity for identity in self._revisions if identity.split(" ")[0] != canary] or self._revisions

    def _output(self, query: CacheQuery, found: StoredResponse) -> CachedOutput:
        tokens, request = found.tokens.tolist(), query.request
        if request.can_resume:  # as an ended stream: its client may lose the connection
            ended = msgspec.structs.replace(request, delivered=tokens)
            self._backend.stream_registry.store.put(JournalCopy(ended, finish=found.finish), displaces=False)
        return CachedOutput(tokens=tokens, finish=found.finish, cached_tokens=found.cached_tokens, seconds=found.seconds)

    def store(self, query: CacheQuery, output: CachedOutput) -> None:
        """Stores an output under the revision of the groups that computed it."""
        self.refresh()
        revision = sys.intern(self._backend.revision_of(query.request))
        if self._policy is None or revision not in self._revisions:
            return
        stored = StoredResponse(
            tokens=array(TOKEN_TYPE, output.tokens),
            finish=output.finish,
            cached_tokens=output.cached_tokens,
            seconds=output.seconds,
            revision=revision,
            stored_at=self._clock(),
        )
        self._responses.put(self._key(query, revision), stored)
        self._show()

    def purge(self) -> int:
        """Drops all responses; returns their number. Those that are computed now will not be stored."""
        self._backend.forget_revisions()
        count = self._responses.clear()
        self._show()
        return count

    def _key(self, query: CacheQuery, revision: str) -> bytes:
        has_tenant = self._policy is None or self._policy.scope == "tenant"
        return response_key(query.request, query.ending, revision, has_tenant)

    def _show(self) -> None:
        self._metrics.show(len(self._responses), self._responses.num_bytes)
