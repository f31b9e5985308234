"""Profile run: measures the memory of the largest step before the page pool is sized.

The largest step ends the longest context with a prefill chunk of `max_num_batched_tokens`, and samples with every filter and
penalty; with slots for adapters it has one, and a vision tower runs before it. The ranks of a stage run it together over
temporary pages; one page is repeated as context.

On CPU a shorter context runs, and its growth is added: masks, keys, values, and two tiles of attention scores for a fragmented
allocator. Decodes gather up to `GATHER_BYTES` more, which is added too.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.admission import EXTRA_LOGITS_ROWS
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.page_format import EXPANSION_BYTES, PageFormat, choose_format
from phalanx_runtime.model.attention.paged import GATHER_BYTES, TILE_BYTES
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.logits import gather_logits
from phalanx_runtime.model.protocol import ImageEncoder, KvLayout, Model
from phalanx_runtime.model.states.mixers import states_of
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.memory.memory_profiler import MemoryProfiler
from phalanx_runtime.rank.process.device_errors import device_exit
from phalanx_runtime.rank.sampling.registry import choose_sampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.images import kept_bytes
from phalanx_runtime.rank.step.page_tables import CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec

PROFILE_SAMPLING = wire.Sampling(
    max_tokens=2, seed=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1
)
"""Every filter and penalty."""
MAX_CPU_OPERATIONS = 10**11
"""Attention operations on CPU: about a second on two cores."""
_MASK_SCRATCH = 3
"""Booleans per mask element while it is made."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak bytes of a step, without weights and pages."""

    activations: int
    logits_sampler: int

    def max_with(self, other: "PeakMemory") -> "PeakMemory":
        """Needs of two steps that never overlap."""
        return PeakMemory(max(self.activations, other.activations), max(self.logits_sampler, other.logits_sampler))


@torch.inference_mode()
def profile_largest_step(
    spec: RankSpec,
    model: Model,
    pipeline: Pipeline,
    dtype: torch.dtype,
    device: torch.device,
    profiler: MemoryProfiler,
    longest: int,
) -> PeakMemory:
    """Measures the largest step. `longest`: most tokens of a request. Raises PeerLost, and ModelError if a GPU lacks memory."""
    try:
        return _measure(spec, model, pipeline=pipeline, dtype=dtype, device=device, profiler=profiler, longest=longest)
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
    profiler: MemoryProfiler,
    longest: int,
) -> PeakMemory:
    stage = pipeline.stage
    tokens = min(spec.engine.max_num_batched_tokens, model.positions)
    longest = max(tokens, longest)
    length = longest if device.type != "cpu" else min(longest, _max_cpu_context(model, tokens, spec.engine.page_size, dtype))
    plan, num_pages = _largest_plan(spec, tokens, length)
    format = choose_format(spec.engine.kv_cache_dtype, model.kv.head_dims)
    caches = make_caches(model.kv, num_pages, spec.engine.page_size, dtype, device, format=format)
    for tensor in (tensor for cache in caches for tensor in cache.tensors):
        tensor.zero_()  # allocate before measuring: pages are no activations
    adapters = model.adapters if isinstance(model, Decoder) else None
    if adapters is not None:  # they are added to outputs that fused kernels do not keep
        plan.admitted[0] = msgspec.structs.replace(plan.admitted[0], adapter=1)
    shape = CacheShape(spec.engine.page_size, model.kv.kv_heads, 1)
    states = states_of(model)
    builder = BatchBuilder(shape, dtype, device, has_adapters=adapters is not None, has_states=states is not None)
    hidden: list[Tensor] = []

    def compute() -> None:
        if states is not None:
            states.assume(0, plan.starts[0])  # what the states are does not change the memory
        received = None if stage.is_first else builder.empty_hidden(tokens, model.width).zero_()
        with nullcontext() if adapters is None else adapters.held(1):
            hidden.append(model.hidden(builder.build(plan), caches, received))

    activations = profiler.peak_bytes(compute) + (GATHER_BYTES if spec.engine.max_num_seqs > 1 else 0)
    if states is not None:  # the largest step has one row, without drafts; a step of all rows copies the states of each
        num_drafts = 0 if spec.engine.speculative_method == "none" else spec.engine.speculative_tokens
        activations += states.copy_bytes(spec.engine.max_num_seqs - 1, num_drafts) + num_drafts * states.row_bytes
    if longest > length:
        activations += (longest - length) * context_bytes(model.kv, tokens, dtype, format) + 2 * TILE_BYTES
    activations = _with_images(activations, model, profiler)
    if stage.is_last or (stage.is_first and spec.engine.speculative_method == "self_draft"):
        return PeakMemory(activations, profiler.peak_bytes(partial(_sample, model, pipeline, hidden[0][: len(plan.draws)])))
    return PeakMemory(activations, 0)


def _with_images(activations: int, model: Model, profiler: MemoryProfiler) -> int:
    """Adds what encoding an image takes before the step, and the images that are kept."""
    encoder = model.images if isinstance(model, Decoder) else None
    if encoder is None:
        return activations
    encoding = profiler.peak_bytes(partial(encode_blank, encoder))
    return max(activations, encoder.peak_bytes(encoding)) + kept_bytes(encoder)


def encode_blank(encoder: ImageEncoder) -> None:
    """Computes an image for the first time. Raises ModelError for a tower that is not as config.json describes it."""
    try:
        encoder.encode(encoder.blank())
    except Exception as error:
        if device_exit(error) is not None:
            raise
        raise ModelError(f"config.json: the vision tower does not compute images as described: {error!s:.500}") from error


def _largest_plan(spec: RankSpec, tokens: int, length: int) -> tuple[StepPlan, int]:
    """Returns a chunk of `tokens` at the end of a context of `length`, and its pages."""
    first = (length - tokens) // spec.engine.page_size
    own = -(-length // spec.engine.page_size) - first
    pages = [0] * first + list(range(own))
    draws = [(0, 0)] * (spec.engine.max_num_seqs + EXTRA_LOGITS_ROWS)
    return StepPlan(
        step=0,
        admitted=[NewRow(0, PROFILE_SAMPLING)],
        rows=[0],
        starts=[length - tokens],
        counts=[tokens],
        pages=[pages],
        tokens=[0] * tokens,
        draws=draws,
    ), own


def _max_cpu_context(model: Model, tokens: int, page_size: int, dtype: torch.dtype) -> int:
    """Returns the longest affordable context, at least one that gathers pages and fills a tile."""
    affordable = MAX_CPU_OPERATIONS // (4 * tokens * model.width * len(model.kv.head_dims))
    return max(tokens + page_size, TILE_BYTES // (tokens * model.kv.kv_heads * dtype.itemsize), affordable)


def context_bytes(kv: KvLayout, tokens: int, dtype: torch.dtype, format: PageFormat | None = None) -> int:
    """Returns the bytes per context token: mask with scratch, key and value."""
    masks = tokens * (len(set(kv.windows)) * dtype.itemsize + _MASK_SCRATCH)
    scratch = 0 if format is None else EXPANSION_BYTES
    return masks + kv.kv_heads * max(kv.head_dims) * (kv.num_vectors * dtype.itemsize + scratch)


def _sample(model: Model, pipeline: Pipeline, hidden: Tensor) -> None:
    logits = gather_logits(model, model.logits(hidden), pipeline.peers)
    if logits is None:
        return
    sampler = choose_sampler(logits.device, model.vocab_size)
    for row in range(len(hidden)):
        sampler.admit(NewRow(row, PROFILE_SAMPLING, 1, [0]))
    sampler.sample(logits, [(row, 0) for row in range(len(hidden))])
