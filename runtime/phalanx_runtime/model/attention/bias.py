"""What depends on the positions of a query and a key: slopes (ALiBi) and blocks of tokens, added to logits.

Positions are integers and the bias is float32, so it does not depend on how steps are batched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def decode_bias(slopes: Tensor | None, block: int | None, lengths: Tensor, width: int, kv_heads: int) -> Tensor:
    """Returns the bias of the last token of each request, [rows, kv_heads or 1, group or 1, width].

    slopes: [heads]; lengths: [rows].
    """
    keys, queries = torch.arange(width, device=lengths.device), lengths.view(-1, 1, 1, 1) - 1
    return _bias(None if slopes is None else slopes.view(1, kv_heads, -1, 1), block, keys, queries)


def chunk_bias(slopes: Tensor | None, block: int | None, positions: Tensor, queries: slice, kv_heads: int) -> Tensor:
    """Returns the bias of some queries of a request, [kv_heads or 1, group or 1, queries, slots].

    slopes: [heads]; positions: see `slot_positions`.
    """
    own = positions[queries].view(1, 1, -1, 1)
    return _bias(None if slopes is None else slopes.view(kv_heads, -1, 1, 1), block, positions, own)


def _bias(slopes: Tensor | None, block: int | None, keys: Tensor, queries: Tensor) -> Tensor:
    bias = torch.zeros_like(keys - queries, dtype=torch.float32) if slopes is None else slopes.float() * (keys - queries)
    return bias if block is None else bias.masked_fill(keys < queries - queries % block, float("-inf"))


def slot_positions(length: int, parents: Sequence[int], device: torch.device) -> Tensor:
    """Returns the position of each slot of a request, [length]. `parents`: of the draft tree at its end, by level."""
    base, levels = length - len(parents), list[int]()
    for parent in parents:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    return torch.tensor([*range(base), *(base + level for level in levels)], device=device)


def causal_mask(size: int, like: Tensor) -> Tensor:
    """Returns an additive mask, [size, size]."""
    return causal_rows(size, size, like)


def causal_rows(size: int, length: int, like: Tensor) -> Tensor:
    """Returns an additive mask of the last `size` tokens, [size, length]."""
    return torch.full((size, length), float("-inf"), dtype=like.dtype, device=like.device).triu(1 + length - size)
