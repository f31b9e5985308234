"""Steps on all ranks: rank 0 sends the plan, every rank computes its part, rank 0 collects the scores and draws."""

from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.model.attention import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.batch import BatchBuilder
from phalanx_runtime.rank.logprobs import rows_at_once, token_details
from phalanx_runtime.rank.prompt_logprobs import PromptPart, prompt_parts
from phalanx_runtime.rank.sampler import Sampler

_decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
_encode = msgspec.msgpack.Encoder().encode


class ModelRunner:
    """One rank's weights, pages and rows. On rank 0 it is the engine's `StepRunner`; the other ranks `follow`."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        builder: BatchBuilder,
        pool: PoolShape,
        collective: Collective,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._caches = caches
        self._builder = builder
        self._pool = pool
        self._collective = collective
        self._sampler = sampler

    @property
    def pool(self) -> PoolShape:
        """The page pool that every rank made."""
        return self._pool

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """The tokens drawn by this step, after all ranks computed it. Only on rank 0. Raises PeerLost."""
        if self._collective.world_size > 1:
            self._collective.broadcast(_encode(plan))
        for new in plan.admitted:
            self._sampler.admit(new)
        scores, told = self._compute(plan)
        if scores is None:
            return StepResult(plan.step, [], prompt_details=told)
        drawn = self._sampler.draw(scores, [(plan.rows[request], index) for request, index in plan.draws])
        return StepResult(plan.step, drawn.tokens, drawn.details, drawn.ended, told, drawn.failed)

    def follow(self) -> None:
        """Obeys rank 0, step after step, sleeping between them, until it is dismissed. Raises PeerLost when rank 0 is gone."""
        while message := self._collective.broadcast(None):
            self._compute(_decode_plan(message))

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks. Only on rank 0."""
        self._collective.broadcast(b"")

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[Tensor | None, list[tuple[int, int, list[wire.TokenDetail]]]]:
        """On rank 0 all scores of the drawn tokens and the details of told prompt tokens; elsewhere nothing."""
        if not plan.rows:
            return None, []
        for source, target in plan.copies:
            for cache in self._caches:
                cache.k[target].copy_(cache.k[source])
                cache.v[target].copy_(cache.v[source])
        hidden = self._model.hidden(self._builder.build(plan), self._caches)
        num_draws = len(plan.draws)
        scores = self._collective.gather(self._model.scores(hidden[:num_draws])) if num_draws else None
        parts = prompt_parts(plan, self._builder.params)
        return scores, self._tell(parts, hidden[num_draws:]) if parts else []

    def _tell(self, parts: list[PromptPart], hidden: Tensor) -> list[tuple[int, int, list[wire.TokenDetail]]]:
        """Details of prompt tokens, parallel to the rows of `hidden`. Scores are made for few at once; nothing elsewhere."""
        tokens = [token for part in parts for token in part.tokens]
        tops = [part.top for part in parts for _ in part.tokens]
        details: list[wire.TokenDetail] = []
        size = rows_at_once(self._model.vocab_size)
        for first in range(0, len(tokens), size):
            some = slice(first, first + size)
            scores = self._collective.gather(self._model.scores(hidden[some]))
            if scores is not None:
                details += token_details(scores, tokens[some], tops[some])
        ends = accumulate(len(part.tokens) for part in parts)
        return [(part.request, part.start, details[end - len(part.tokens) : end]) for part, end in zip(parts, ends, strict=True)]
