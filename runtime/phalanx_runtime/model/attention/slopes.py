"""The bias of heads with slopes (ALiBi): a logit loses the slope times the tokens between its key and the query.

Positions are integers and the bias is float32, so it does not depend on how steps are batched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def decode_bias(slopes: Tensor, kv_heads: int, lengths: Tensor, width: int) -> Tensor:
    """Returns the bias of the last token of each request, [rows, kv_heads, group, width]. slopes: [heads]; lengths: [rows]."""
    distances = torch.arange(1, width + 1, device=slopes.device) - lengths.view(-1, 1, 1, 1)
    return slopes.float().view(1, kv_heads, -1, 1) * distances


def chunk_bias(slopes: Tensor, kv_heads: int, positions: Tensor, queries: slice) -> Tensor:
    """Returns the bias of some queries of a request, [kv_heads, group, queries, slots]. positions: see `slot_positions`."""
    distances = positions - positions[queries].unsqueeze(1)
    return slopes.float().view(kv_heads, -1, 1, 1) * distances


def slot_positions(length: int, parents: Sequence[int], device: torch.device) -> Tensor:
    """Returns the position of each slot of a request, [length]. `parents`: of the draft tree at its end, by level."""
    base, levels = length - len(parents), list[int]()
    for parent in parents:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    return torch.tensor([*range(base), *(base + level for level in levels)], device=device)
