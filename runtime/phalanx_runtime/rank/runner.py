"""Steps on all ranks: rank 0 sends the plan, every rank computes its part, the first rank of the last stage draws.

With several stages a plan is in each of them in turn, so that as many plans are computed side by side.
"""

import time
from collections import deque
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.model.attention import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.batch import BatchBuilder
from phalanx_runtime.rank.grammar import Grammars
from phalanx_runtime.rank.logprobs import rows_at_once, token_details
from phalanx_runtime.rank.pipeline import Pipeline
from phalanx_runtime.rank.prompt_logprobs import PromptPart, prompt_parts
from phalanx_runtime.rank.sampler import Sampler

POLL_S = 0.001
"""How often a thread looks that waits for a step. It waits for a rank that lags behind rank 0, so hardly ever."""
_decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode
_encode = msgspec.msgpack.Encoder().encode


class ModelRunner:
    """One rank's weights, pages and rows. On rank 0 it is the engine's `StepRunner`; the other ranks `follow`."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        builder: BatchBuilder,
        pool: PoolShape,
        pipeline: Pipeline,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._caches = caches
        self._builder = builder
        self._pool = pool
        self._pipeline = pipeline
        self._sampler = sampler
        self._done: deque[StepResult] = deque()
        self._step_done = 0

    @property
    def pool(self) -> PoolShape:
        """The page pool that every rank made."""
        return self._pool

    @property
    def caches(self) -> list[LayerCache]:
        """The memory of this rank's pages."""
        return self._caches

    def wait_for(self, step: int) -> None:
        """Returns when this rank has computed a step that it was or will soon be told of. Any thread may call it."""
        while self._step_done < step:
            time.sleep(POLL_S)

    @property
    def grammars(self) -> Grammars | None:
        """Those that this rank draws with; None when it does not draw."""
        return self._sampler.grammars if self._pipeline.draws else None

    @property
    def depth(self) -> int:
        """How many plans are computed side by side: one in each stage."""
        return self._pipeline.stage.count

    def start(self, plan: StepPlan) -> None:
        """Sends the plan to all ranks and computes this rank's part. Only on rank 0. Raises PeerLost."""
        self._pipeline.tell(_encode(plan) if self._pipeline.world.world_size > 1 else b"")
        result = self._step(plan)
        if result is not None:
            self._done.append(result)

    def finish(self) -> StepResult:
        """The tokens of the oldest plan that was started, after all ranks computed it. Only on rank 0. Raises PeerLost."""
        return self._done.popleft() if self._pipeline.draws else _decode_result(self._pipeline.result())

    def follow(self) -> None:
        """Obeys rank 0, step after step, sleeping between them, until it is dismissed. Raises PeerLost when rank 0 is gone."""
        while message := self._pipeline.told():
            result = self._step(_decode_plan(message))
            if result is not None:
                self._pipeline.give_result(_encode(result))
        if self._pipeline.draws:
            self._pipeline.give_result(b"")

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks. Only on rank 0."""
        self._pipeline.tell(b"")

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult | None:
        """This rank's part of a step; the result on the drawer, nothing elsewhere."""
        result = self._compute(plan)
        self._step_done = plan.step
        return result

    def _compute(self, plan: StepPlan) -> StepResult | None:
        pipeline, stage = self._pipeline, self._pipeline.stage
        if pipeline.draws:
            for new in plan.admitted:
                self._sampler.admit(new)
        hidden = self._hidden(plan) if plan.rows else None
        if not stage.is_last:
            if hidden is not None:
                pipeline.hand_on(hidden)
            return None
        scores, told = (None, []) if hidden is None else self._scores(plan, hidden)
        if not pipeline.draws:
            return None
        if scores is None:
            return StepResult(plan.step, [], prompt_details=told)
        drawn = self._sampler.draw(scores, [(plan.rows[request], index) for request, index in plan.draws])
        return StepResult(plan.step, drawn.tokens, drawn.details, drawn.ended, told, drawn.failed, drawn.over)

    def _hidden(self, plan: StepPlan) -> Tensor:
        """What this stage makes of the plan's tokens."""
        for source, target in plan.copies:
            for cache in self._caches:
                cache.k[target].copy_(cache.k[source])
                cache.v[target].copy_(cache.v[source])
        batch = self._builder.build(plan)
        if self._pipeline.stage.is_first:
            return self._model.hidden(batch, self._caches)
        before = self._pipeline.receive(self._builder.empty(len(plan.tokens), self._model.width))
        return self._model.hidden(batch, self._caches, before)

    def _scores(self, plan: StepPlan, hidden: Tensor) -> tuple[Tensor | None, list[tuple[int, int, list[wire.TokenDetail]]]]:
        """On the drawer all scores of the drawn tokens and the details of told prompt tokens; elsewhere nothing."""
        num_draws = len(plan.draws)
        scores = self._pipeline.peers.gather(self._model.scores(hidden[:num_draws])) if num_draws else None
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
            scores = self._pipeline.peers.gather(self._model.scores(hidden[some]))
            if scores is not None:
                details += token_details(scores, tokens[some], tops[some])
        ends = accumulate(len(part.tokens) for part in parts)
        return [(part.request, part.start, details[end - len(part.tokens) : end]) for part, end in zip(parts, ends, strict=True)]
