"""A dry run of the largest step before the page pool is sized: what it needs is measured, what it computes is forgotten.

The largest step computes one prompt chunk of `max_num_batched_tokens` that ends the longest context there may be, and draws for
`max_num_seqs` requests and some proposals, each with penalties and every filter. The ranks of a stage run it together; pages of
its own are taken and given back: all that lies before the chunk is one page, again and again.
On CPU a long context takes too long to attend over at every start. There a shorter one is run, and what grows with the context
is added: the mask, and the keys and values that are gathered (scores are computed in tiles, which do not grow; two more of them
stand for what the allocator may not find again between larger pieces).
A step that only decodes gathers up to `GATHER_BYTES` more than one context, which is added too.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.admission import MORE_DRAWS
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.paged import GATHER_BYTES, TILE_BYTES
from phalanx_runtime.model.protocol import KvLayout, Model
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.memory.memory_profiler import MemoryProfiler
from phalanx_runtime.rank.sampling.sampler import Sampler
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec

DEAREST = wire.Sampling(
    max_tokens=2, seed=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1
)
"""How each of the dry run's requests is sampled."""
AFFORDABLE_OPERATIONS = 10**11
"""Of attention, in a dry run on CPU: about a second on two cores."""
_MASK_SCRATCH = 3
"""Booleans per score while a mask is made."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes that the largest step takes at its peak beside weights and pages: in the model, and from the scores to the tokens."""

    activations: int
    logits_sampler: int

    def most(self, other: "PeakMemory") -> "PeakMemory":
        """What two steps need that are never computed at once."""
        return PeakMemory(max(self.activations, other.activations), max(self.logits_sampler, other.logits_sampler))


@torch.inference_mode()
def profile_largest_step(
    spec: RankSpec,
    model: Model,
    pipeline: Pipeline,
    dtype: torch.dtype,
    device: torch.device,
    gauge: MemoryProfiler,
    longest: int,
) -> PeakMemory:
    """What the largest step needs on this rank, when no request has more than `longest` tokens.

    Raises PeerLost, and ModelError when a GPU has no room for it.
    """
    try:
        return _measure(spec, model, pipeline=pipeline, dtype=dtype, device=device, gauge=gauge, longest=longest)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "the device has no memory for the largest step: lower max_num_batched_tokens, max_num_seqs or max_model_len"
        ) from error


def _measure(
    spec: RankSpec,
    model: Model,
    pipeline: Pipeline,
    dtype: torch.dtype,
    device: torch.device,
    gauge: MemoryProfiler,
    longest: int,
) -> PeakMemory:
    stage = pipeline.stage
    tokens = min(spec.engine.max_num_batched_tokens, model.positions)
    longest = max(tokens, longest)
    length = longest if device.type != "cpu" else min(longest, _affordable(model, tokens, spec.engine.page_size, dtype))
    plan, num_pages = _largest(spec, tokens, length)
    caches = make_caches(model.kv, num_pages, spec.engine.page_size, dtype, device)
    for cache in caches:  # taken before it is measured: pages are no activations
        cache.k.zero_()
        cache.v.zero_()
    builder = BatchBuilder(CacheShape(spec.engine.page_size, model.kv.kv_heads, 1), dtype, device)
    seen: list[Tensor] = []

    def compute() -> None:
        before = None if stage.is_first else builder.empty(tokens, model.width).zero_()
        seen.append(model.hidden(builder.build(plan), caches, before))

    activations = gauge.peak(compute) + (GATHER_BYTES if spec.engine.max_num_seqs > 1 else 0)
    if longest > length:
        activations += (longest - length) * context_bytes(model.kv, tokens, dtype) + 2 * TILE_BYTES
    drafts = stage.is_first and spec.engine.speculative_method == "self_draft"
    draws = stage.is_last or drafts
    return PeakMemory(activations, gauge.peak(partial(_draw, model, pipeline, seen[0][: len(plan.draws)])) if draws else 0)


def _largest(spec: RankSpec, tokens: int, length: int) -> tuple[StepPlan, int]:
    """A chunk of so many tokens that ends a context of this length, and how many pages it needs."""
    first = (length - tokens) // spec.engine.page_size
    own = -(-length // spec.engine.page_size) - first
    pages = [0] * first + list(range(own))
    draws = [(0, 0)] * (spec.engine.max_num_seqs + MORE_DRAWS)
    return StepPlan(
        step=0,
        admitted=[NewRow(0, DEAREST)],
        rows=[0],
        starts=[length - tokens],
        counts=[tokens],
        pages=[pages],
        tokens=[0] * tokens,
        draws=draws,
    ), own


def _affordable(model: Model, tokens: int, page_size: int, dtype: torch.dtype) -> int:
    """The longest context that a dry run on CPU attends over: pages before the chunk are gathered, a tile of scores is filled."""
    affordable = AFFORDABLE_OPERATIONS // (4 * tokens * model.width * len(model.kv.head_dims))
    return max(tokens + page_size, TILE_BYTES // (tokens * model.kv.kv_heads * dtype.itemsize), affordable)


def context_bytes(kv: KvLayout, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that one more token of context costs a chunk of so many: masks with what they are made from, a key and a value."""
    masks = tokens * (len(kv.windows) * dtype.itemsize + _MASK_SCRATCH)
    return masks + 2 * kv.kv_heads * max(kv.head_dims) * dtype.itemsize


def _draw(model: Model, pipeline: Pipeline, hidden: Tensor) -> None:
    """Scores of all rows, and on the rank that draws a token for each."""
    scores = pipeline.peers.gather(model.scores(hidden))
    if scores is None:
        return
    sampler = Sampler(model.vocab_size)
    for row in range(len(hidden)):
        sampler.admit(NewRow(row, DEAREST, 1, [0]))
    sampler.draw(scores, [(row, 0) for row in range(len(hidden))])
