"""Steps on all ranks: rank 0 sends the plan, every rank computes its part, rank 0 collects the scores and draws."""

import msgspec
import torch

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.model.attention import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.batch import BatchBuilder
from phalanx_runtime.rank.sampling import Draw, draw

_decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
_encode = msgspec.msgpack.Encoder().encode


class ModelRunner:
    """One rank's weights, pages and rows. On rank 0 it is the engine's `StepRunner`; the other ranks `follow`."""

    def __init__(
        self, model: Model, caches: list[LayerCache], builder: BatchBuilder, pool: PoolShape, collective: Collective
    ) -> None:
        self._model = model
        self._caches = caches
        self._builder = builder
        self._pool = pool
        self._collective = collective

    @property
    def pool(self) -> PoolShape:
        """The page pool that every rank made."""
        return self._pool

    def run(self, plan: StepPlan) -> StepResult:
        """The tokens drawn by this step, after all ranks computed it. Only on rank 0. Raises PeerLost."""
        if self._collective.world_size > 1:
            self._collective.broadcast(_encode(plan))
        logits = self._compute(plan)
        if logits is None or not plan.draws:
            return StepResult(plan.step, [])
        return StepResult(plan.step, draw(logits, [self._draw(plan, request, index) for request, index in plan.draws]))

    def follow(self) -> None:
        """Obeys rank 0, step after step, sleeping between them, until it is dismissed. Raises PeerLost when rank 0 is gone."""
        while message := self._collective.broadcast(None):
            self._compute(_decode_plan(message))

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks. Only on rank 0."""
        self._collective.broadcast(b"")

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> torch.Tensor | None:
        """All scores of the drawn tokens on rank 0; None elsewhere, or when nothing is drawn."""
        if not plan.rows:
            return None
        for source, target in plan.copies:
            for cache in self._caches:
                cache.k[target].copy_(cache.k[source])
                cache.v[target].copy_(cache.v[source])
        logits = self._model.logits(self._builder.build(plan), self._caches)
        return self._collective.gather(logits) if plan.draws else None

    def _draw(self, plan: StepPlan, request: int, index: int) -> Draw:
        row = self._builder.params[plan.rows[request]]
        s = row.sampling
        return Draw(s.seed, index, s.temperature, s.top_p, s.top_k, s.min_p)
