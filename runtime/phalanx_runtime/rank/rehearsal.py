"""A dry run of the largest step before the page pool is sized: what it needs is measured, what it computes is forgotten.

The largest step computes one prompt chunk of `max_num_batched_tokens` and draws for `max_num_seqs` requests, each with
penalties and every filter. The ranks of a stage run it together; pages of its own are taken and given back.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.plan import NewRow, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.batch import BatchBuilder, CacheShape
from phalanx_runtime.rank.gauge import Gauge
from phalanx_runtime.rank.kv_cache import make_caches
from phalanx_runtime.rank.pipeline import Pipeline
from phalanx_runtime.rank.sampler import Sampler
from phalanx_runtime.rank_spec import RankSpec

DEAREST = wire.Sampling(
    max_tokens=2, seed=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1
)
"""How each of the dry run's requests is sampled."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that the largest step takes at its peak beside weights and pages: in the model, and from the scores to the tokens."""

    activations: int
    logits_sampler: int


@torch.inference_mode()
def rehearse(spec: RankSpec, model: Model, pipeline: Pipeline, dtype: torch.dtype, device: torch.device, gauge: Gauge) -> Needs:
    """What the largest step needs on this rank. Raises PeerLost, and ModelError when a GPU has no room for it."""
    try:
        return _measure(spec, model, pipeline, dtype, device, gauge)
    except torch.OutOfMemoryError as error:
        raise ModelError("the device has no memory for the largest step: lower max_num_batched_tokens or max_num_seqs") from error


def _measure(spec: RankSpec, model: Model, pipeline: Pipeline, dtype: torch.dtype, device: torch.device, gauge: Gauge) -> Needs:
    stage = pipeline.stage
    tokens = min(spec.max_num_batched_tokens, model.positions)
    num_pages = -(-tokens // spec.page_size)
    caches = make_caches(model.kv, num_pages, spec.page_size, dtype, device)
    for cache in caches:  # taken before it is measured: pages are no activations
        cache.k.zero_()
        cache.v.zero_()
    builder = BatchBuilder(CacheShape(spec.page_size, model.kv.kv_heads, 1, model.kv.windows), dtype, device)
    draws = [(0, 0)] * spec.max_num_seqs
    plan = StepPlan(0, [NewRow(0, DEAREST)], [0], [0], [tokens], [list(range(num_pages))], [0] * tokens, draws)
    seen: list[Tensor] = []

    def compute() -> None:
        before = None if stage.is_first else builder.empty(tokens, model.width).zero_()
        seen.append(model.hidden(builder.build(plan), caches, before))

    activations = gauge.peak(compute)
    return Needs(activations, gauge.peak(partial(_draw, model, pipeline, seen[0])) if stage.is_last else 0)


def _draw(model: Model, pipeline: Pipeline, hidden: Tensor) -> None:
    """Scores of all rows, and on the rank that draws a token for each."""
    scores = pipeline.peers.gather(model.scores(hidden))
    if scores is None:
        return
    sampler = Sampler(model.vocab_size)
    for row in range(len(hidden)):
        sampler.admit(NewRow(row, DEAREST, 1, [0]))
    sampler.draw(scores, [(row, 0) for row in range(len(hidden))])
