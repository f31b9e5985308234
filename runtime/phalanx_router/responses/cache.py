"""The response cache of one router: stores outputs by revision, as the policy allows, and shares them with the other routers."""

import logging
import random
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from phalanx_api.summary import ResponseCachePolicy
from phalanx_frontend.stream.lexical_guard import LexicalGuard
from phalanx_frontend.stream.response_cache import MISS, CacheAnswer, CachedOutput, CacheQuery, Question
from phalanx_frontend.text.tokenizer import RecentEncodings
from phalanx_router.backend import RouterBackend
from phalanx_router.responses.embedder import Embedded, QuestionEmbedder, load_index
from phalanx_router.responses.metrics import ResponseCacheMetrics
from phalanx_router.responses.recheck import Recheck, SemanticHit
from phalanx_router.responses.sharing import Outbox, from_wire, to_wire
from phalanx_router.resume.peer_wire import JournalCopy, SharedResponse
from phalanx_router.routing.equality import conversation_key, response_key
from phalanx_router.routing.response_lru import TOKEN_TYPE, LruBounds, ResponseLru, StoredQuestion, StoredResponse
from phalanx_router.routing.semantic import MAX_CANDIDATES, Decision, decide

log = logging.getLogger(__name__)

MAX_TRANSIT_S = 5.0
"""Longest way of a response from router to router, by which it looks younger than it is."""


@dataclass(frozen=True, slots=True)
class EmbeddedQuestion:
    """A question and its vector."""

    question: Question
    embedded: Embedded
    asked_at: float  # before the embedding


def bounds_of(policy: ResponseCachePolicy | None) -> LruBounds:
    """Returns the limits of a policy; without one nothing is stored."""
    if policy is None:
        return LruBounds(ttl_s=0.0, max_entries=0, max_bytes=0)
    return LruBounds(ttl_s=policy.ttl_s, max_entries=policy.max_entries, max_bytes=policy.max_bytes)


class RouterResponseCache:
    """Implements `phalanx_frontend.stream.response_cache.ResponseCache` and `resume.peers.ResponseExchange`.

    Bound to one event loop.
    """

    def __init__(
        self,
        backend: RouterBackend,
        metrics: ResponseCacheMetrics,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._clock = clock
        self._policy: ResponseCachePolicy | None = None
        self._revisions: Sequence[str] = ()  # of known groups, the newest first
        self._responses = ResponseLru(bounds_of(None))
        self._embedder = QuestionEmbedder(backend, metrics.show_embedder, clock)
        self._recheck = Recheck(backend, self._embedder, metrics, draw)
        self._outbox = Outbox()
        self.encodings, self.guard = RecentEncodings(), LexicalGuard()
        self._purged_at = float("-inf")
        backend.balancing.tick_listeners.append(self.refresh)

    @property
    def is_enabled(self) -> bool:
        """Whether the policy permits a response cache."""
        return self._backend.balancing.policy.response_cache is not None

    async def close(self) -> None:
        """Ends a re-check and closes connections."""
        await self._recheck.close()
        await self._embedder.close()

    def refresh(self) -> None:
        """Applies the policy, and drops responses that are too old or of revisions that no group has any more.

        Without groups, responses are kept for the next groups and not used.
        """
        policy, before = self._backend.balancing.policy.response_cache, self._policy
        revisions = self._backend.links.revisions()
        if policy != before:
            self._apply(policy, before)
        if policy is None or not policy.semantic:
            self._embedder.reset()  # an embedding may still fail after the change
        if revisions and revisions != self._revisions:
            self._responses.retain(revisions)
        self._revisions = revisions
        self._responses.expire(self._clock())
        if not len(self._responses):  # texts of clients are kept for hits alone
            self._forget_texts()
        self._show()

    def _apply(self, policy: ResponseCachePolicy | None, before: ResponseCachePolicy | None) -> None:
        self._policy = policy
        if policy is None or before is None or policy.scope != before.scope:
            self._clear()
        if policy is not None and policy.semantic and not (before is not None and before.semantic):
            threading.Thread(target=load_index, daemon=True).start()  # before a request waits for it
        self._responses.set_bounds(bounds_of(policy), self._clock())

    async def find(self, query: CacheQuery) -> CacheAnswer:
        """Returns an output of the newest revision that has one: of an equal request, else to a similar question."""
        try:
            answer = await self._find(query)
        except Exception:
            log.exception("a lookup in the response cache failed")
            answer = MISS
        if answer.output is None:
            self._metrics.missed()
        return answer

    async def _find(self, query: CacheQuery) -> CacheAnswer:
        self.refresh()
        answer = MISS
        if self._policy is not None and self._policy.exact:
            answer = self._find_equal(query)
        if answer.output is None and self._policy is not None and self._policy.semantic:
            answer = await self._find_similar(query, self._policy)
        return answer

    def _find_equal(self, query: CacheQuery) -> CacheAnswer:
        now = self._clock()
        for revision in self._used_revisions():
            found = self._responses.get(self._key(query, revision), now)
            if found is not None:
                self._metrics.hit("exact", len(query.request.prompt), len(found.tokens), found.seconds)
                return CacheAnswer(result="exact", output=self._output(query, found))
        return MISS

    async def _find_similar(self, query: CacheQuery, policy: ResponseCachePolicy) -> CacheAnswer:
        question = query.question() if self._revisions else None
        if question is None:
            self._metrics.not_similar("no_question" if self._revisions else "no_group")
            return MISS
        asked_at = self._clock()
        embedded = await self._embedder.embed(question.text, question.model, policy.embedder, is_question=True)
        if not isinstance(embedded, Embedded):
            self._metrics.not_similar(embedded.why)
            return MISS
        self.refresh()
        if self._policy is None or not self._policy.semantic:
            return MISS
        asked = EmbeddedQuestion(question, embedded, asked_at)
        decision = self._decide(query, asked, self._policy)
        self._metrics.compared(decision.nearest, decision.hit is not None)
        found = None if decision.hit is None else self._responses.get(decision.hit.key, self._clock())
        if decision.hit is None or found is None:
            self._metrics.not_similar(decision.why)
            return CacheAnswer(embedded=asked)
        self._metrics.hit("semantic", len(query.request.prompt), len(found.tokens), found.seconds)
        output = replace(self._output(query, found), cached_tokens=min(found.cached_tokens, len(query.request.prompt)))
        return CacheAnswer(result="semantic", output=output, similarity=decision.hit.similarity, embedded=asked)

    def _decide(self, query: CacheQuery, asked: EmbeddedQuestion, policy: ResponseCachePolicy) -> Decision:
        """Decision by the newest revision with a hit; else the first one with a candidate."""
        decisions = []
        for revision in self._used_revisions():
            conversation = self._conversation(query, asked, revision)
            candidates = self._responses.nearest(conversation, asked.embedded.vector, MAX_CANDIDATES, self._clock())
            max_tokens = query.request.sampling.max_tokens
            decision = decide(asked.question.text, max_tokens, candidates, policy.similarity, self.guard.differs)
            if decision.hit is not None:
                return decision
            decisions.append(decision)
        return next((decision for decision in decisions if decision.nearest is not None), Decision(why="no_candidate"))

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

    def store(self, query: CacheQuery, output: CachedOutput, answer: CacheAnswer) -> None:
        """Stores an output under the revision of the groups that computed it, with the question that `answer` has embedded."""
        self.refresh()
        revision = sys.intern(self._backend.revision_of(query.request))
        if self._policy is None or revision not in self._revisions:
            return
        key, now = self._key(query, revision), self._clock()
        known = self._responses.get(key, now)
        has_all = known is not None and (known.question is not None or answer.embedded is None)
        if known is not None and has_all and known.stored_at >= now - output.seconds:
            return  # stored by an equal request of the same computation, or by another router meanwhile
        question, vector = None, b""
        asked = answer.embedded
        if self._policy.semantic and isinstance(asked, EmbeddedQuestion) and asked.asked_at >= self._purged_at:
            conversation = self._conversation(query, asked, revision)
            if self._responses.index.can_add(conversation, asked.embedded.vector):
                question, vector = StoredQuestion(conversation, asked.question.text), asked.embedded.vector
        stored = StoredResponse(
            tokens=array(TOKEN_TYPE, output.tokens),
            finish=output.finish,
            cached_tokens=output.cached_tokens,
            seconds=output.seconds,
            revision=revision,
            stored_at=now,
            question=question,
        )
        hops = self._backend.balancing.policy.routers - 1
        self._responses.put(key, stored, vector)
        self._outbox.put(to_wire(key, stored, vector, scope=self._policy.scope, hops=hops, now=now), now)
        self._show()

    def was_sent(self, query: CacheQuery, answer: CacheAnswer) -> None:
        """Considers a re-check of a semantic hit."""
        asked, policy = answer.embedded, self._policy
        if policy is not None and answer.output is not None and isinstance(asked, EmbeddedQuestion):
            hit = SemanticHit(request=query.request, question=asked.question, output=answer.output)
            self._recheck.consider(hit, policy.recheck_share, policy.similarity, policy.embedder)

    def notify(self, has_responses: Callable[[], None]) -> None:
        """See `resume.peers.ResponseExchange`."""
        self._outbox.on_put = has_responses

    def take(self) -> list[SharedResponse]:
        """Removes and returns responses for the peer: those of one frame."""
        taken = self._outbox.take(self._clock())
        self._metrics.shared("sent", len(taken))
        return taken

    def receive(self, responses: Sequence[SharedResponse]) -> None:
        """Stores responses of another router and passes them on. Those known here, or computed before a purge, are not stored."""
        if not responses:
            return
        self.refresh()
        for shared in responses:
            if self._accept(shared):
                self._metrics.shared("received", 1)
                self._outbox.put(msgspec.structs.replace(shared, hops=shared.hops - 1), self._clock())
        self._show()

    def _accept(self, shared: SharedResponse) -> bool:
        now, policy = self._clock(), self._policy
        if policy is None or shared.scope != policy.scope or shared.revision not in self._revisions:
            return False
        stored = from_wire(shared, sys.intern(shared.revision), now)
        if stored is None or stored.stored_at - stored.seconds < self._purged_at + MAX_TRANSIT_S or shared.key in self._responses:
            return False
        if stored.question is not None and not self._responses.index.can_add(stored.question.conversation, shared.vector):
            return False
        self._responses.put(shared.key, stored, shared.vector)
        return True

    def purge(self) -> int:
        """Drops all responses; returns their number. Those that are computed now will not be stored, here or by other routers."""
        self._backend.forget_revisions()
        count = self._clear()
        self._purged_at = self._clock()
        self._show()
        return count

    def _clear(self) -> int:
        """Drops all that requests left; returns the number of responses."""
        self._outbox.clear()
        self._forget_texts()
        return self._responses.clear()

    def _forget_texts(self) -> None:
        self.encodings.clear()
        self.guard.clear()

    def _key(self, query: CacheQuery, revision: str) -> bytes:
        return response_key(query.request, query.ending, revision, self._has_tenant)

    def _conversation(self, query: CacheQuery, asked: EmbeddedQuestion, revision: str) -> bytes:
        return conversation_key(
            query.request,
            query.ending,
            revision,
            self._has_tenant,
            context=asked.question.context,
            max_tokens=asked.question.max_tokens,
            space=asked.embedded.space,
        )

    @property
    def _has_tenant(self) -> bool:
        return self._policy is None or self._policy.scope == "tenant"

    def _show(self) -> None:
        self._metrics.show(len(self._responses), self._responses.num_bytes)
