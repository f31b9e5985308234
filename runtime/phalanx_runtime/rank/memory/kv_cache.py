"""The page pool of a rank: how many pages fit, and the memory they lie in."""

import math
import mmap

import torch

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import KvLayout

CPU_POOL_BYTES = 4 << 30
"""Most that the pool of a pod takes on CPU when no size is asked for."""
CPU_POOL_SHARE = 0.3
"""Share of the memory limit that it takes at most."""


def cpu_pool_bytes(memory_limit: int, local_world_size: int) -> int:
    """Bytes of one rank's pool on CPU when no size is asked for."""
    return int(min(CPU_POOL_BYTES, CPU_POOL_SHARE * memory_limit)) // local_world_size


def pool_bytes(usable: int, taken: int, most: int, remedy: str) -> int:
    """Bytes of the pool: what `taken` (weights, and what the largest step needs) leaves of `usable`, but no more than `most`.

    Raises ModelError when nothing is left.
    """
    if taken >= usable:
        raise ModelError(
            f"weights and the largest step take {taken >> 20} MiB of the {usable >> 20} MiB that the rank may use: "
            f"{remedy}, or lower max_num_batched_tokens or max_num_seqs"
        )
    return min(most, usable - taken)


def page_bytes(kv: KvLayout, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values, on this rank."""
    return 2 * kv.kv_heads * page_size * sum(kv.head_dims) * dtype.itemsize


def longest_request(asked: int | None, max_position: int, num_pages: int, page_size: int) -> int:
    """Tokens, prompt and output, of the longest request: what was asked for, else what model and pool hold.

    Raises ModelError when the pool holds no page, or not one request of the length asked for.
    """
    held = num_pages * page_size
    if num_pages < 1:
        raise ModelError("the KV cache has no room for a single page: raise kv_cache_memory_bytes or give the pod more memory")
    if asked is not None and asked > held:
        raise ModelError(
            f"max_model_len {asked} does not fit the KV cache, which holds {held} tokens; raise kv_cache_memory_bytes"
        )
    return asked if asked is not None else min(max_position, held)


def make_caches(kv: KvLayout, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """Zeroed pages of every layer. On CPU memory is taken as pages are first used."""
    shapes = [(num_pages, kv.kv_heads, page_size, head_dim) for head_dim in kv.head_dims]
    if device.type != "cpu":
        return [LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))) for shape in shapes]
    counts = [math.prod(shape) for shape in shapes]
    memory = mmap.mmap(-1, 2 * sum(counts) * dtype.itemsize)
    flat = torch.frombuffer(memory, dtype=dtype)
    parts = torch.split(flat, [count for count in counts for _ in range(2)])
    return [LayerCache(parts[2 * layer].view(shape), parts[2 * layer + 1].view(shape)) for layer, shape in enumerate(shapes)]
