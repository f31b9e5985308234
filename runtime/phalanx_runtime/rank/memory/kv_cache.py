"""Size and memory of a rank's page pool."""

import itertools
import math
import mmap
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx_runtime.core.page_window import max_request_tokens
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.feedback import KvRounding
from phalanx_runtime.model.attention.page_format import PageFormat
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import KvLayout

MAX_CPU_POOL_BYTES = 4 << 30
"""Maximum default pool of a pod."""
MAX_CPU_POOL_SHARE = 0.3
"""Maximum share of its memory limit."""
CACHE_LINE = 64
"""Alignment of each layer's keys, values and scales."""


def cpu_pool_bytes(memory_limit: int, local_world_size: int) -> int:
    """Returns the default pool of one rank on CPU."""
    return int(min(MAX_CPU_POOL_BYTES, MAX_CPU_POOL_SHARE * memory_limit)) // local_world_size


def pool_bytes(usable: int, taken: int, limit: int, remedy: str) -> int:
    """Returns `usable - taken`, at most `limit`. Raises ModelError if nothing is left."""
    if taken >= usable:
        raise ModelError(
            f"weights and the largest step take {taken >> 20} MiB of {usable >> 20} MiB usable by the rank: "
            f"{remedy}, or lower max_num_batched_tokens or max_num_seqs"
        )
    return min(limit, usable - taken)


def page_bytes(kv: KvLayout, page_size: int, dtype: torch.dtype, format: PageFormat | None = None) -> int:
    """Returns the bytes of one page over all layers."""
    vector_bytes = sum(head_bytes(head_dim, dtype, format) for head_dim in kv.head_dims)
    return kv.kv_heads * page_size * kv.num_vectors * vector_bytes


def part_bytes(kv: KvLayout, page_size: int, dtype: torch.dtype, format: PageFormat | None = None) -> int:
    """Returns the bytes of one page over the layers with a window: of a part, if pages have parts."""
    head_dims = tuple(head_dim for head_dim, window in zip(kv.head_dims, kv.windows, strict=True) if window is not None)
    return page_bytes(replace(kv, head_dims=head_dims, windows=()), page_size, dtype, format)


def head_bytes(head_dim: int, dtype: torch.dtype, format: PageFormat | None = None) -> int:
    """Returns the bytes of one token's key, or value, of a KV head."""
    return sum(size * part.itemsize for size, part in _parts(head_dim, dtype, format))


def _parts(head_dim: int, dtype: torch.dtype, format: PageFormat | None) -> list[tuple[int, torch.dtype]]:
    """Returns sizes and dtypes that store a key or a value: numbers, or codes and scales."""
    if format is None:
        return [(head_dim, dtype)]
    return [(format.code_dim(head_dim), format.dtype), (format.num_scales(head_dim), torch.bfloat16)]


def resolve_max_model_len(
    max_model_len: int | None, max_position: int, num_pages: int, page_size: int, window: int = 0, num_parts: int = 0
) -> int:
    """Returns `max_model_len`, else the limit of model and pool. Raises ModelError if the pool is too small.

    `window`, `num_parts`: as in `PoolShape`.
    """
    capacity = max_request_tokens(num_pages, page_size, window, num_parts)
    if num_pages < 1:
        raise ModelError("the KV cache has no room for a single page: raise kv_cache_memory_bytes or give the pod more memory")
    if max_model_len is not None and max_model_len > capacity:
        raise ModelError(
            f"max_model_len {max_model_len} exceeds the KV cache of {capacity} tokens: lower it or raise kv_cache_memory_bytes"
        )
    return max_model_len if max_model_len is not None else min(max_position, capacity)


def make_caches(
    kv: KvLayout,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    format: PageFormat | None = None,
    num_parts: int = 0,
) -> list[LayerCache]:
    """Returns zeroed pages for each layer; on CPU, memory is allocated at first use.

    `num_parts`: pages of layers with a window, if pages have parts.
    """
    counts = [num_parts if num_parts and window is not None else num_pages for window in kv.windows]
    shapes = [
        ((count, kv.kv_heads, page_size, size), part)
        for head_dim, count in zip(kv.head_dims, counts, strict=True)
        for size, part in _parts(head_dim, dtype, format)
        for _ in range(kv.num_vectors)
    ]
    if device.type == "cpu":
        tensors = lazily_zeroed(shapes)
    else:
        tensors = [torch.zeros(shape, dtype=part, device=device) for shape, part in shapes]
    size = len(tensors) // len(kv.head_dims)
    layers = [tensors[first : first + size] for first in range(0, len(tensors), size)]
    roundings = kv.roundings if format is not None and kv.roundings else [None] * len(layers)
    return [_layer_cache(layer, kv, format, rounding) for layer, rounding in zip(layers, roundings, strict=True)]


def _layer_cache(parts: Sequence[Tensor], kv: KvLayout, format: PageFormat | None, rounding: KvRounding | None) -> LayerCache:
    """`parts`: keys and values, then their scales, or keys and their scales."""
    if not kv.is_latent:
        return LayerCache(*parts, format=format, rounding=rounding)
    keys, *scales = parts
    return LayerCache(keys, keys, *scales, *scales, format=format)


def divide_caches(
    caches: Sequence[LayerCache], windows: Sequence[int | None], num_parts: int
) -> tuple[list[LayerCache], list[LayerCache]]:
    """Returns the caches of layers that use pages, and of those that use parts, given the window of each layer."""
    has_part = [num_parts > 0 and window is not None for window in windows]
    pages = [cache for cache, is_part in zip(caches, has_part, strict=True) if not is_part]
    return pages, [cache for cache, is_part in zip(caches, has_part, strict=True) if is_part]


def lazily_zeroed(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Returns zeroed tensors on CPU, aligned to cache lines, whose memory is allocated at first use."""
    return lazily_mapped(shapes)[1]


def lazily_mapped(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[mmap.mmap, list[Tensor]]:
    """Returns the same with their mapping, which can free the memory. Raises OSError if the system refuses."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    starts = list(itertools.accumulate((-(-size // CACHE_LINE) * CACHE_LINE for size in sizes), initial=0))
    memory = mmap.mmap(-1, starts[-1])
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return memory, [
        flat[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=False)
    ]
