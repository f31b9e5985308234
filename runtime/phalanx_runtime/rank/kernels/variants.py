"""The variants of all kernels that a model launches, as pure functions of its shape. Each list is next to its launch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx_runtime.model.adapters.gpu import adapter_variants
from phalanx_runtime.model.attention.compression import calibrated_variants, compress_variant
from phalanx_runtime.model.attention.gpu import HeadShape, attention_variants, can_attend
from phalanx_runtime.model.attention.page_format import PageFormat
from phalanx_runtime.model.attention.paged import AttentionParams
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.decoder.gpu import (
    DTYPES,
    HEADS_TILE,
    MAX_PARTS,
    can_hold,
    gate_variant,
    heads_variant,
    norm_variant,
    parts_variant,
)
from phalanx_runtime.model.decoder.load import NORM_NAMES
from phalanx_runtime.model.experts.gpu import ExpertShape, expert_variants
from phalanx_runtime.model.experts.sparse import ExpertLayouts, Routing
from phalanx_runtime.model.kernels.variant import KernelVariant
from phalanx_runtime.model.linear.single_row import row_variant
from phalanx_runtime.model.partition import Shard
from phalanx_runtime.rank.device.decode_inputs import input_variant
from phalanx_runtime.rank.device.device_rows import row_variants
from phalanx_runtime.rank.sampling.gpu.results import result_variants
from phalanx_runtime.rank.sampling.gpu.row_state import RowFeature
from phalanx_runtime.rank.sampling.gpu.sample import sampling_variants

ALL_FEATURES = RowFeature.FILTERS | RowFeature.PENALTIES | RowFeature.BIAS | RowFeature.MASKS
"""Of rows on a device that allocates all slots at start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What a rank's kernels depend on beside the model."""

    dtype: torch.dtype
    page_size: int
    capability: int
    """Major compute capability."""
    world_size: int
    """Ranks that share a layer."""
    format: PageFormat | None = None
    """Of the pages."""
    is_calibrated: bool = False
    """Whether pages with a format are."""
    has_dense_layers: bool = True
    """Whether the linears of layers are `DenseLinear`."""
    has_dense_head: bool = True
    has_adapters: bool = False
    """Whether linears have slots for adapters."""
    has_expert_adapters: bool = False
    """Whether experts do."""
    expert_layouts: tuple[ExpertLayouts | None, ...] = (None,)
    """Of the layers with experts, each once; None: weights that are not packed."""


def model_variants(config: ModelConfig, shard: Shard, options: KernelOptions) -> list[KernelVariant]:
    """Returns the variants of a fused decoder: attention and the operations between linears."""
    if options.dtype not in DTYPES:
        return []
    variants = [*_attention(config, shard, options), *_norms(config, options), *_heads(config, shard, options)]
    if config.mixture is None or not all(config.mixture.layers):
        variants.append(gate_variant(shard.mlp.size, options.dtype, config.activation))
    adapters = adapter_variants(options.dtype) if options.has_adapters else []
    return _unique([*variants, *_row_linears(config, shard, options), *_experts(config, shard, options), *adapters])


def sum_variants(config: ModelConfig, options: KernelOptions) -> list[KernelVariant]:
    """Returns the variants of sums over ranks in one kernel, which `all_reduce_choice` compiles where it measures them."""
    size, dtype = config.hidden_size, options.dtype
    if not 1 < options.world_size <= MAX_PARTS or not can_hold(size, dtype, True):
        return []
    return [parts_variant(size, dtype, _weight_dtype(config, dtype), parts=options.world_size)]


def step_variants(
    kv_heads: int,
    vocab_size: int,
    dtype: torch.dtype,
    max_pages: int,
    has_window: bool = False,
    has_parts: bool = False,
    *,
    has_adapters: bool = False,
) -> list[KernelVariant]:
    """Returns the variants of steps on the device: rows, inputs, sampling.

    `max_pages`: of a request; `dtype`: of logits; `has_window`: requests drop the pages before their window, with
    `has_parts` only the parts; `has_adapters`: see `KernelOptions`.
    """
    rows = list(row_variants(max_pages))
    for adapted in (False, True) if has_adapters else (False,):
        rows.append(input_variant(kv_heads, max_pages, has_window and not has_parts, has_adapters=adapted))
    if has_parts:
        rows.append(input_variant(kv_heads, max_pages, has_window=True, has_parts=True))
    return _unique([*rows, *sampling_variants(vocab_size, dtype, ALL_FEATURES), *result_variants(vocab_size, dtype)])


def _unique(variants: Iterable[KernelVariant]) -> list[KernelVariant]:
    return list(dict.fromkeys(variants))


def _weight_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of norm weights: `load` adds an offset in float32."""
    return torch.float32 if config.norm_offset else dtype


def _projected_heads(config: ModelConfig, shard: Shard) -> tuple[int, int]:
    """Returns the heads between two tokens of queries with keys, and of values."""
    rows = shard.heads.size + shard.kv_heads.size
    projected = rows + shard.kv_heads.size
    return rows if config.qk_norm == "whole" else projected, projected


def _attention(config: ModelConfig, shard: Shard, options: KernelOptions) -> Iterable[KernelVariant]:
    shape = HeadShape(shard.heads.size, shard.kv_heads.size, config.head_dim, options.page_size, options.format)
    written = shard.heads.size + (2 if options.is_calibrated else 1) * shard.kv_heads.size
    q_heads = _projected_heads(config, shard)[0] if options.format is None else written
    sinks = torch.empty(0, dtype=options.dtype) if config.has_sinks else None
    for window in sorted(set(config.windows), key=lambda size: size or 0):
        yield from attention_variants(
            shape,
            AttentionParams(window, config.scale, config.softcap, sinks),
            options.dtype,
            q_stride=q_heads * config.head_dim,
            capability=options.capability,
        )


def _norms(config: ModelConfig, options: KernelOptions) -> Iterable[KernelVariant]:
    """One rank adds the result of a linear in the linear, unless a norm comes between."""
    attention_in, attention_out, mlp_in, mlp_out = (name is not None for name in NORM_NAMES[config.norms])
    sums = ((attention_out, mlp_in), (mlp_out, attention_in), (mlp_out, False))
    forms = [(False, False, True), *((True, *form) for form in sums if form[0] or options.world_size > 1)]
    weight, size, dtype = _weight_dtype(config, options.dtype), config.hidden_size, options.dtype
    for has_sum, has_after, has_before in forms:
        if can_hold(size, dtype, has_after):
            yield norm_variant(size, dtype, weight, has_sum=has_sum, has_after=has_after, has_before=has_before)


def _row_linears(config: ModelConfig, shard: Shard, options: KernelOptions) -> Iterable[KernelVariant]:
    """Linears of a single row: the head, and of one rank those of layers that `dense_layer` supports."""
    dtype, hidden = options.dtype, config.hidden_size
    if options.has_dense_head:
        yield row_variant(hidden, dtype, None, has_bias=False, form="")
    has_only_experts = config.mixture is not None and all(config.mixture.layers)
    if not options.has_dense_layers or options.world_size > 1 or config.norms != "before" or has_only_experts:
        return
    norm = _weight_dtype(config, dtype)
    yield row_variant(hidden, dtype, norm, has_bias=config.qkv_bias, form="")
    yield row_variant(shard.heads.size * config.head_dim, dtype, None, has_bias=config.o_bias, form="add")
    yield row_variant(hidden, dtype, norm, has_bias=config.mlp_bias, form=config.activation)
    yield row_variant(shard.mlp.size, dtype, None, has_bias=config.mlp_bias, form="add")


def _experts(config: ModelConfig, shard: Shard, options: KernelOptions) -> list[KernelVariant]:
    mixture = config.mixture
    if mixture is None or not shard.experts.size:
        return []
    shape = ExpertShape(
        hidden=config.hidden_size,
        inner=shard.expert_mlp.size,
        num_experts=mixture.num_experts,
        num_local=shard.experts.size,
        routing=Routing(per_token=mixture.per_token, norm_topk_prob=mixture.norm_topk_prob),
        activation=config.activation,
        has_bias=mixture.tensors.has_bias,
        is_split=options.world_size > 1 and not mixture.is_parallel,
        has_adapters=options.has_expert_adapters,
    )
    return [one for layouts in options.expert_layouts for one in expert_variants(replace(shape, layouts=layouts), options.dtype)]


def _heads(config: ModelConfig, shard: Shard, options: KernelOptions) -> Iterable[KernelVariant]:
    dim, dtype = config.head_dim, options.dtype
    if dim > HEADS_TILE:
        return
    qk_heads, projected = _projected_heads(config, shard)
    weight = _weight_dtype(config, dtype) if config.qk_norm == "head" else None
    for share in sorted({0.0 if rope is None else rope.share for rope in config.ropes}):
        rotated, offset = 2 * len(range(0, int(dim * share), 2)), (shard.heads.size + shard.kv_heads.size) * dim
        strides = {"qk_stride": qk_heads * dim, "v_stride": projected * dim, "v_offset": offset}
        if options.format is None:
            yield heads_variant(dim, dtype, weight, rotated=rotated, **strides)
        elif can_attend(dim, dtype):
            more: dict[str, Any] = {**strides, "is_calibrated": options.is_calibrated}
            yield compress_variant(dim, dtype, weight, options.format, rotated=rotated, **more)
    if options.is_calibrated and options.format is not None and can_attend(dim, dtype):
        yield from calibrated_variants(dim, dtype, options.format, heads=shard.heads.size, kv_heads=shard.kv_heads.size)
