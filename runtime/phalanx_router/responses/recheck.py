"""Computes a share of the semantic hits anyway and compares both answers by embedding, one at a time, at the lowest priority."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from phalanx_api import wire
from phalanx_frontend.auth.caller import PRIORITIES
from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.ids import random_id
from phalanx_frontend.openai.served_model import MAX_CHARACTERS
from phalanx_frontend.stream.response_cache import CachedOutput, Question
from phalanx_router.backend import RouterBackend
from phalanx_router.responses.embedder import Embedded, QuestionEmbedder
from phalanx_router.responses.metrics import ResponseCacheMetrics
from phalanx_router.routing import vector_index

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
SLACK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticHit:
    """A request that the response to a similar question has answered."""

    request: wire.Request
    question: Question
    output: CachedOutput


class Recheck:
    """Re-checks hits in the background. Bound to one event loop."""

    def __init__(
        self, backend: RouterBackend, embedder: QuestionEmbedder, metrics: ResponseCacheMetrics, draw: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._embedder = embedder
        self._metrics = metrics
        self._draw = draw
        self._running: asyncio.Task[None] | None = None

    def consider(self, hit: SemanticHit, share: float, threshold: float, address: str) -> None:
        """Starts a re-check for a `share` of hits, unless one runs. `address`: of the embedder."""
        is_running = self._running is not None and not self._running.done()
        if not is_running and self._draw() < share:
            self._running = asyncio.create_task(self._run(hit, threshold, address))

    async def close(self) -> None:
        """Ends a running re-check."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, hit: SemanticHit, threshold: float, address: str) -> None:
        outcome = "failed"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                outcome = await self._compare(hit, threshold, address)
        except (BackendError, TimeoutError) as error:
            log.info("a re-check failed", extra={"why": str(error) or type(error).__name__})
        except Exception:
            log.exception("a re-check failed")
        finally:
            self._metrics.rechecked(outcome)

    async def _compare(self, hit: SemanticHit, threshold: float, address: str) -> str:
        """Returns the outcome. Raises BackendError."""
        computed = await self._compute(hit)
        if computed == list(hit.output.tokens):
            return "agreed"
        model = hit.question.model
        outputs = [await asyncio.to_thread(model.text, tokens) for tokens in (computed, hit.output.tokens)]
        texts = [_until_stop(text, hit.question.stop) for text in outputs]
        if texts[0] == texts[1]:
            return "agreed"
        if not all(text.strip() for text in texts):
            return "disagreed"
        first, second = [await self._embedder.embed(text[:MAX_CHARACTERS], model, address, is_question=False) for text in texts]
        if not isinstance(first, Embedded) or not isinstance(second, Embedded) or first.space != second.space:
            return "failed"
        is_alike = vector_index.similarity(first.vector, second.vector) >= threshold
        return "agreed" if is_alike else "disagreed"

    async def _compute(self, hit: SemanticHit) -> list[int]:
        """Returns the request's own output, up to about twice the length of the stored one. Raises BackendError."""
        sampling = hit.request.sampling
        max_tokens = min(sampling.max_tokens, max(2 * len(hit.output.tokens), sampling.min_tokens) + SLACK_TOKENS)
        request = msgspec.structs.replace(
            hit.request,
            id=random_id("recheck-"),
            sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            priority=PRIORITIES[-1],
            can_resume=False,
            ttft_target_ms=None,
            tpot_target_ms=None,
            deadline_ms=None,
        )
        tokens: list[int] = []
        async with aclosing(self._backend.generate(request, is_exempt=True)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if isinstance(delta, Delta):
                    tokens += delta.tokens
        return tokens


def _until_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    return text[: min((found for string in stop if (found := text.find(string)) >= 0), default=len(text))]
