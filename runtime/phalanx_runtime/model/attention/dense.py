"""The definition of attention over pages: one query at a time, without masks or kernels. Tests compare all others with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_runtime.model.attention.feedback import shifted_back
from phalanx_runtime.model.attention.page_format import hadamard_transform
from phalanx_runtime.model.attention.paged import (
    AttentionChunk,
    AttentionParams,
    LayerCache,
    StepBatch,
    logit_scale,
    transform,
    write_pages,
)


class DenseAttention:
    """Reference implementation: softmax(q k^T / sqrt(dim)) v for one query at a time."""

    __slots__ = ()

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
        if not is_written:
            q, k = transform(q, k, cache)
            write_pages(k, v if cache.rounding is None else hadamard_transform(v), cache, batch.slots)
        rows = [
            _attend(q[g.start + i], cache, g.tables[i], range(n), params) for g in batch.bands for i, n in enumerate(g.lengths)
        ]
        for chunk in batch.chunks:
            for i in range(chunk.size):
                rows.append(_attend(q[chunk.start + i], cache, chunk.table, _visible_slots(chunk, i), params))
        out = torch.stack(rows)
        if cache.rounding is None:
            return out
        return hadamard_transform(shifted_back(out.view(q.shape), cache.rounding.values.shift)).view(out.shape)


def _visible_slots(chunk: AttentionChunk, i: int) -> Sequence[int]:
    """Returns the slots up to token i, or those before the tree and its branch."""
    base = chunk.length - len(chunk.parents)
    node, branch = chunk.length - chunk.size + i - base, list[int]()
    if node < 0:
        return range(base + node + 1)
    while node >= 0:
        branch.append(base + node)
        node = chunk.parents[node]
    return [*range(base), *reversed(branch)]


def _attend(q: Tensor, cache: LayerCache, table: Tensor, visible: Sequence[int], params: AttentionParams) -> Tensor:
    """q: [heads, dim]. `visible`: slots."""
    first = 0 if params.block is None else (len(visible) - 1) // params.block * params.block
    slots = torch.tensor(visible[first:] if params.window is None else visible[-params.window :], device=q.device)
    kv_heads, dim = cache.k.shape[1], q.shape[-1]
    cache_rows = (table[:, None] * kv_heads + torch.arange(kv_heads, device=table.device)).flatten()
    keys, values = (
        part.view(-1, kv_heads, *part.shape[1:]).transpose(1, 2).reshape(-1, kv_heads, dim)[slots]
        for part in cache.read(cache_rows, q.dtype)
    )
    group = q.shape[0] // kv_heads
    logits = torch.einsum("hd,thd->ht", q, keys.repeat_interleave(group, 1)) * logit_scale(params, dim)
    if params.softcap is not None:
        logits = torch.tanh(logits / params.softcap) * params.softcap
    if params.slopes is not None:
        logits += params.slopes.unsqueeze(1) * torch.arange(1 - len(slots), 1, device=q.device)
    if params.sinks is not None:
        logits = torch.cat((logits, params.sinks.unsqueeze(1)), 1)
    return torch.einsum("ht,thd->hd", logits.softmax(-1)[:, : len(slots)], values.repeat_interleave(group, 1)).reshape(-1)
