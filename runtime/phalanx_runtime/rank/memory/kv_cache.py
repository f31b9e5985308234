"""Size and memory of a rank's page pool."""

import math
import mmap

import torch

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import KvLayout

MAX_CPU_POOL_BYTES = 4 << 30
"""Maximum default pool of a pod."""
MAX_CPU_POOL_SHARE = 0.3
"""Maximum share of its memory limit."""


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


def page_bytes(kv: KvLayout, page_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one page over all layers."""
    return 2 * kv.kv_heads * page_size * sum(kv.head_dims) * dtype.itemsize


def resolve_max_model_len(max_model_len: int | None, max_position: int, num_pages: int, page_size: int) -> int:
    """Returns `max_model_len`, else the limit of model and pool. Raises ModelError if the pool is too small."""
    capacity = num_pages * page_size
    if num_pages < 1:
        raise ModelError("the KV cache has no room for a single page: raise kv_cache_memory_bytes or give the pod more memory")
    if max_model_len is not None and max_model_len > capacity:
        raise ModelError(
            f"max_model_len {max_model_len} exceeds the KV cache of {capacity} tokens: lower it or raise kv_cache_memory_bytes"
        )
    return max_model_len if max_model_len is not None else min(max_position, capacity)


def make_caches(kv: KvLayout, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """Returns zeroed pages for each layer; on CPU, memory is allocated at first use."""
    shapes = [(num_pages, kv.kv_heads, page_size, head_dim) for head_dim in kv.head_dims]
    if device.type != "cpu":
        return [LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))) for shape in shapes]
    counts = [math.prod(shape) for shape in shapes]
    memory = mmap.mmap(-1, 2 * sum(counts) * dtype.itemsize)
    flat = torch.frombuffer(memory, dtype=dtype)
    parts = torch.split(flat, [count for count in counts for _ in range(2)])
    return [LayerCache(parts[2 * layer].view(shape), parts[2 * layer + 1].view(shape)) for layer, shape in enumerate(shapes)]
