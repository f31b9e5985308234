"""Paged attention by Triton kernels: tiles, launches and the backend.

`PagedAttention` is the reference, and computes layers with slopes or blocks, steps with images whose tokens attend to each other,
and what `can_attend` excludes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.attention.compression import NO_STEPS, can_compress, compress, restore
from phalanx_runtime.model.attention.page_format import FORMAT_NUMBERS, FORMATS, PageFormat, num_groups
from phalanx_runtime.model.attention.paged import (
    Attention,
    AttentionParams,
    LayerCache,
    PagedAttention,
    Segments,
    StepBatch,
    write_pages,
)
from phalanx_runtime.model.attention.triton_kernels import merge_splits, paged_attention
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, power_of_two, variant_of
from phalanx_runtime.model.operators import operator

MIN_SPLIT_KEYS = 64
"""Keys of a split. H100, batch 1, context 512: 7.7 us, with 256 keys 12.4 us."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile of `paged_attention` and its compilation."""

    block_queries: int
    """Queries of one request per tile."""
    block_keys: int
    num_warps: int
    num_stages: int
    """Stages of the load pipeline."""


DECODE: Mapping[int, TileConfig] = {
    64: TileConfig(block_queries=1, block_keys=64, num_warps=4, num_stages=3),
    128: TileConfig(block_queries=1, block_keys=64, num_warps=4, num_stages=3),
    256: TileConfig(block_queries=1, block_keys=32, num_warps=4, num_stages=2),
}
"""By padded head dimension: one query per request."""
PREFILL: Mapping[int, TileConfig] = {
    64: TileConfig(block_queries=16, block_keys=64, num_warps=4, num_stages=3),
    128: TileConfig(block_queries=16, block_keys=32, num_warps=4, num_stages=2),
    256: TileConfig(block_queries=8, block_keys=32, num_warps=4, num_stages=2),
}
"""By padded head dimension: steps with chunks or trees."""
PREFILL_HOPPER: Mapping[int, TileConfig] = {
    **PREFILL,
    128: TileConfig(block_queries=16, block_keys=64, num_warps=4, num_stages=3),
}
"""For compute capability 9. H100, 2,048 tokens of Llama-3.1-8B's heads: 153 us, with 32 keys 174 us. Compute capability 8
spills registers with 64 keys."""
PREFILL_BLACKWELL: Mapping[int, TileConfig] = {
    **PREFILL,
    64: TileConfig(block_queries=16, block_keys=64, num_warps=4, num_stages=2),
    128: TileConfig(block_queries=16, block_keys=32, num_warps=4, num_stages=3),
}
"""For compute capability 10, where the first tile of `PREFILL` spills registers."""
PREFILL_COMPRESSED: Mapping[int, TileConfig] = {
    64: TileConfig(block_queries=16, block_keys=32, num_warps=4, num_stages=3),
    128: TileConfig(block_queries=16, block_keys=16, num_warps=4, num_stages=3),
    256: TileConfig(block_queries=8, block_keys=16, num_warps=4, num_stages=2),
}
"""Of compressed pages, whose conversion needs registers too."""
MIN_ROWS = 16
"""Rows of the smallest tile of tensor cores."""
MERGE_WARPS = 4
MAX_SPLITS = 32
MAX_DIM: Mapping[torch.dtype, int] = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
"""Largest head dimension by dtype; wider tiles of float32 spill registers."""


def can_attend(head_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernels support the shape."""
    return head_dim <= MAX_DIM.get(dtype, 0)


def padded_dim(head_dim: int) -> int:
    """Returns the dimension of a tile: the smallest configured one."""
    return min(size for size in DECODE if size >= head_dim)


def prefill_tiles(capability: int, format: PageFormat | None) -> Mapping[int, TileConfig]:
    """Returns the configurations of chunks by padded head dimension. `capability`: major compute capability."""
    if format is not None:
        return PREFILL_COMPRESSED
    return PREFILL_BLACKWELL if capability >= 10 else PREFILL_HOPPER if capability == 9 else PREFILL


MAX_PREFILL_ROWS: Mapping[int, int] = {64: 128, 128: 64, 256: 64}
"""Of a tile by padded head dimension: with more, groups of eight query heads spill registers."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a layer and its pages."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    format: PageFormat | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


def prefill_tile(capability: int, shape: HeadShape) -> TileConfig:
    """Returns the configuration of chunks, with at most `MAX_PREFILL_ROWS`. `capability`: major compute capability."""
    config = prefill_tiles(capability, shape.format)[padded_dim(shape.dim)]
    most = max(1, MAX_PREFILL_ROWS[padded_dim(shape.dim)] // power_of_two(shape.group))
    return replace(config, block_queries=min(config.block_queries, most))


def attention_constants(
    config: TileConfig, shape: HeadShape, params: AttentionParams, *, has_splits: bool, has_tree: bool
) -> dict[str, Any]:
    """Returns the compile-time arguments of `paged_attention`. Without a constant group, decodes of float32 spill registers."""
    return {
        **_tile_constants(config, shape),
        "HAS_SPLITS": has_splits,
        "HAS_TREE": has_tree,
        "HAS_WINDOW": params.window is not None,
        "HAS_SOFTCAP": params.softcap is not None,
        "HAS_SINKS": params.sinks is not None,
    }


@cache
def _tile_constants(config: TileConfig, shape: HeadShape) -> dict[str, Any]:
    is_packed = shape.format is not None and shape.format.code_dim(shape.dim) < shape.dim
    group_rows = power_of_two(shape.group)
    if config.block_queries * group_rows < MIN_ROWS:
        group_rows = MIN_ROWS // config.block_queries
    return {
        "GROUP": shape.group,
        "GROUP_ROWS": group_rows,
        "DIM": shape.dim,
        "PART": shape.dim // 2 if is_packed else shape.dim,
        "PART_PADDED": padded_dim(shape.dim) // 2 if is_packed else padded_dim(shape.dim),
        "FORMAT": FORMAT_NUMBERS[shape.format],
        "GROUPS": num_groups(shape.dim) if is_packed else 1,
        "PAGE": shape.page_size,
        "BLOCK_QUERIES": config.block_queries,
        "BLOCK_KEYS": config.block_keys,
        "SPLIT_KEYS": MIN_SPLIT_KEYS,
    }


def attention_options(config: TileConfig, itemsize: int) -> dict[str, int]:
    """Returns the options of the compilation. Wider tiles of float32 fill the shared memory: they have one stage."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages if itemsize == 2 else 1}


PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs that a decode launch aims at."""
DEFAULT_MULTIPROCESSORS = 132
"""Of an H100, where no device is present."""


def max_splits(num_decodes: int, kv_heads: int, num_multiprocessors: int) -> int:
    """Returns the splits of a decode that fill the device, a power of two. It depends on nothing else, as CUDA graphs require."""
    programs = max(1, num_decodes * kv_heads)
    wanted = -(-num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // programs)
    return min(MAX_SPLITS, power_of_two(wanted))


@operator(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) out, Tensor(b!)[] partial, Tensor[] requests, "
    "Tensor[] tree, Tensor[] blocks, Tensor? sinks, Tensor[] scales, str format, int[] sizes, int[] tile, "
    "float? scale, int? window, float? softcap)"
)
def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    partial: Sequence[Tensor],
    requests: Sequence[Tensor],
    tree: Sequence[Tensor],
    blocks: Sequence[Tensor],
    sinks: Tensor | None,
    scales: Sequence[Tensor],
    format: str,
    sizes: Sequence[int],
    tile: Sequence[int],
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> None:
    """Lists: the arguments of the kernel in its order, an empty `tree`, decodes and splits, the fields of a `TileConfig`."""
    (num_decodes, max_splits), config = sizes, TileConfig(*tile)
    (_, kv_heads, page_size, _), (_, heads, dim) = k_cache.shape, q.shape
    shape = HeadShape(heads, kv_heads, dim, page_size, FORMATS.get(format))
    params = AttentionParams(window, scale, softcap, sinks)
    tensors = (
        q,
        k_cache,
        v_cache,
        out,
        *partial,
        *requests,
        *(tree or [requests[0]] * 3),
        *blocks,
        q if sinks is None else sinks,
        *(scales or [q, q]),
    )
    arguments = {
        **dict(zip(paged_attention.arg_names, tensors, strict=False)),
        **_numbers(shape, params),
        "num_decodes": num_decodes,
        "max_splits": max_splits,
        "q_stride": q.stride(0),
        "table_stride": requests[0].stride(0),
        "level_stride": tree[1].stride(0) if tree else 0,
        **attention_constants(config, shape, params, has_splits=max_splits > 1, has_tree=bool(tree)),
    }
    grid = (len(blocks[0]) + num_decodes * (max_splits - 1), kv_heads)
    launch(paged_attention, grid, arguments, **attention_options(config, q.element_size()))


def _numbers(shape: HeadShape, params: AttentionParams) -> dict[str, Any]:
    return {
        "kv_heads": shape.kv_heads,
        "scale": shape.dim**-0.5 if params.scale is None else params.scale,
        "softcap": params.softcap or 0.0,
        "window": params.window or 0,
    }


@operator("merge_splits(Tensor(a!) out, Tensor partial, Tensor partial_lse, Tensor lengths, int[] sizes)")
def _merge_splits(out: Tensor, partial: Tensor, partial_lse: Tensor, lengths: Tensor, sizes: Sequence[int]) -> None:
    """`sizes`: decodes and splits."""
    (num_decodes, max_splits), (_, heads, dim) = sizes, out.shape
    arguments = {"out": out, "partial": partial, "partial_lse": partial_lse, "lengths": lengths, "max_splits": max_splits}
    launch(merge_splits, (num_decodes, heads), {**arguments, "heads": heads, **merge_constants(dim)}, num_warps=MERGE_WARPS)


def merge_constants(dim: int) -> dict[str, int]:
    """Returns the compile-time arguments of `merge_splits`."""
    return {"DIM": dim, "DIM_PADDED": padded_dim(dim), "SPLITS": MAX_SPLITS, "SPLIT_KEYS": MIN_SPLIT_KEYS}


def attention_variants(
    shape: HeadShape, params: AttentionParams, dtype: torch.dtype, *, q_stride: int, capability: int
) -> list[KernelVariant]:
    """Returns all variants of a layer: steps of decodes and others, each with and without splits, others also with trees,
    which any request may ask for.

    `q_stride`: elements between the queries of two tokens; `capability`: major compute capability.
    """
    if not can_attend(shape.dim, dtype):
        return []
    width = padded_dim(shape.dim)
    prefill = prefill_tile(capability, shape)
    forms = [(DECODE[width], False), (prefill, False), (prefill, True)]
    arrays = {**dict.fromkeys(paged_attention.arg_names, torch.int32), **dict.fromkeys(("partial", "partial_lse"), torch.float32)}
    tensors = arrays | dict.fromkeys(("q", "k_cache", "v_cache", "out", "sinks", "k_scales", "v_scales"), dtype)
    if shape.format is not None:
        tensors |= dict.fromkeys(("k_cache", "v_cache"), shape.format.dtype)
        tensors |= dict.fromkeys(("k_scales", "v_scales"), torch.bfloat16)
    if params.sinks is not None:
        tensors["sinks"] = params.sinks.dtype
    numbers = {**_numbers(shape, params), "q_stride": q_stride}
    numbers |= dict.fromkeys(("num_decodes", "max_splits", "table_stride", "level_stride"), 1)
    merge = {**tensors, "heads": shape.heads, "max_splits": MAX_SPLITS, **merge_constants(shape.dim)}
    variants = [variant_of(merge_splits, merge, num_warps=MERGE_WARPS)]
    for config, has_tree in forms:
        for has_splits in (False, True):
            constants = attention_constants(config, shape, params, has_splits=has_splits, has_tree=has_tree)
            options = attention_options(config, dtype.itemsize)
            variants.append(variant_of(paged_attention, {**tensors, **numbers, **constants}, **options))
    return variants


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunch:
    """Attention of one layer in one step, after its keys were written."""

    q: Tensor
    """[tokens, heads, dim], heads contiguous."""
    out: Tensor
    """[tokens, heads, dim], contiguous."""
    cache: LayerCache
    segments: Segments
    params: AttentionParams
    capability: int = 9
    """Major compute capability of the device."""

    def run(self, max_splits: int) -> None:
        """Computes the step in one launch, then merges the splits of decodes. `max_splits`: a power of two."""
        segments, params, cache = self.segments, self.params, self.cache
        (_, heads, dim), num_decodes = self.q.shape, segments.num_decodes
        shape = HeadShape(heads, cache.k.shape[1], dim, cache.k.shape[2], cache.format)
        is_decode = num_decodes == segments.num_requests
        config = DECODE[padded_dim(dim)] if is_decode else prefill_tile(self.capability, shape)
        splits = max_splits if num_decodes else 1
        rows = num_decodes * self.q.shape[1] * splits if splits > 1 else 1
        partial = [torch.empty(size, dtype=torch.float32, device=self.q.device) for size in (rows * dim, rows)]
        _paged_attention(
            q=self.q,
            k_cache=cache.k,
            v_cache=cache.v,
            out=self.out,
            partial=partial,
            requests=[segments.tables, segments.starts, segments.lengths],
            tree=segments.tree,
            blocks=segments.blocks(config.block_queries),
            sinks=params.sinks,
            scales=list(cache.tensors[2:]),
            format="" if cache.format is None else cache.format.name,
            sizes=[num_decodes, splits],
            tile=astuple(config),
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
        )
        if splits > 1:
            _merge_splits(
                out=self.out, partial=partial[0], partial_lse=partial[1], lengths=segments.lengths, sizes=[num_decodes, splits]
            )


class TritonAttention:
    """Computes a step in one launch, and a second one if decodes have splits."""

    __slots__ = ("_capability", "_num_multiprocessors", "_reference", "num_computed")

    def __init__(self, num_multiprocessors: int = DEFAULT_MULTIPROCESSORS, capability: int = 9) -> None:
        """`capability`: major compute capability of the device."""
        self.num_computed = 0
        """Tokens computed by the kernels."""
        self._num_multiprocessors = num_multiprocessors
        self._reference = PagedAttention()
        self._capability = capability

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        batch: StepBatch,
        params: AttentionParams,
        is_written: bool = False,
    ) -> Tensor:
        """See `Attention`."""
        if cache.is_latent or not can_attend(q.shape[-1], q.dtype) or params.has_bias or batch.has_images_within:
            return self._reference(q, k, v, cache=cache, batch=batch, params=params, is_written=is_written)
        if not is_written:
            q = _write(q, k, v, cache, batch.slots)
        segments = batch.segments()
        splits = max_splits(segments.num_decodes, cache.k.shape[1], self._num_multiprocessors)
        self.num_computed += q.shape[0]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch = AttentionLaunch(q=q, out=out, cache=cache, segments=segments, params=params, capability=self._capability)
        launch.run(splits)
        if cache.rounding is not None:
            restore(out, cache.rounding.values.shift)
        return out.view(q.shape[0], -1)


def _write(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> Tensor:
    """Writes keys and values to the pages and returns the queries as attention reads them."""
    if cache.format is None:
        write_pages(k, v, cache, slots)
        return q
    heads = torch.cat((q, k), 1)
    return compress(heads, v if can_compress(heads, v) else v.contiguous(), cache, slots, NO_STEPS)[:, : q.shape[1]]


def open_gpu_attention(is_batch_invariant: bool) -> Attention:
    """Opens the kernels. `is_batch_invariant` is not available on GPUs: `model.invariant` refuses it before."""
    if not torch.cuda.is_available():
        return TritonAttention()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return TritonAttention(properties.multi_processor_count, properties.major)
