"""Attention over paged keys and values, in torch.

The cache of one layer is [pages, kv_heads, page, head_dim], so a gather is one `index_select` of whole (page, head) blocks. A
step packs decoding requests first, in bands padded to one length, then prefill chunks. The query heads of one KV head are folded
into the query length (decode) or expanded over a stride-0 head (prefill). `DenseAttention` is the reference implementation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Windows = Mapping[int | None, Tensor | None]
"""Mask of a band or chunk per sliding window of the model (None: full attention). A None mask is plain causal."""

TILE_BYTES = 16 << 20
"""Bytes of attention scores per tile with a softcap. Smaller tiles need more calls, larger ones miss the CPU caches."""

GATHER_BYTES = 32 << 20
"""Bytes of keys and values gathered at once for decoding requests; one request may exceed it."""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Attention of one layer."""

    # Tokens of the sliding window; None: full attention.
    window: int | None = None
    # Factor on the scores; None: 1 / sqrt(head_dim).
    scale: float | None = None
    # Scores become softcap * tanh(score / softcap).
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, [pages, kv_heads, page, head_dim] each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBand:
    """Requests with one token each: tokens [start, start + size) of the step."""

    start: int
    size: int
    # [size * kv_heads * pages] rows of the cache viewed as [pages * kv_heads, page * head_dim].
    lumps: Tensor
    # Additive, [size, 1, 1, pages * page].
    masks: Windows
    # [size, pages] page numbers, for kernels that read pages in place.
    tables: Tensor
    lengths: list[int]
    # [size] int64: `lengths` on the device.
    ends: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChunk:
    """A run of one request's tokens: tokens [start, start + size) of the step, the last of `length` in its pages."""

    start: int
    size: int
    length: int
    # None when the chunk is the whole context: keys and values come from the step itself.
    lumps: Tensor | None
    # Additive, [size, length].
    masks: Windows
    table: Tensor
    # The last tokens of the chunk are a tree of draft tokens: the parent of each as an index among them, or -1 for the tokens
    # before the tree. A token attends to its own branch only. Their slots are consecutive. Empty: no tree.
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step as tensors."""

    tokens: Tensor
    positions: Tensor
    # [tokens * kv_heads] rows of the cache viewed as [pages * kv_heads * page, head_dim].
    slots: Tensor
    bands: list[DecodeBand]
    chunks: list[AttentionChunk]
    # Tokens with logits: first those that are sampled, in the order of the plan, then prompt tokens with logprobs.
    drawn: Tensor


class Attention(Protocol):
    """Writes a step's keys and values into the pages and computes attention over them."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: StepBatch, form: AttentionForm) -> Tensor:
        """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]. Returns [tokens, heads * dim]."""
        ...


def write_pages(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Writes k and v, [tokens, kv_heads, dim] each, into their slots."""
    dim = k.shape[-1]
    cache.k.view(-1, dim).index_copy_(0, slots, k.reshape(-1, dim))
    cache.v.view(-1, dim).index_copy_(0, slots, v.reshape(-1, dim))


class PagedAttention:
    """Gathers by `index_select` into reused buffers, then computes scaled_dot_product_attention.

    A gather holds at most `gather_bytes`, or the context of one request.
    """

    __slots__ = ("_gather_bytes", "_k", "_v")

    def __init__(self, gather_bytes: int = GATHER_BYTES) -> None:
        self._gather_bytes = gather_bytes
        # Reused between steps: on CPU, page faults of a fresh allocation cost ten times the gather.
        self._k = torch.empty(0)
        self._v = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: StepBatch, form: AttentionForm) -> Tensor:
        """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]. Returns [tokens, heads * dim]."""
        self._write(k, v, cache, batch.slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for band in batch.bands:
            self._decode(q, cache, band, form, out)
        for chunk in batch.chunks:
            self._prefill(q, k, v=v, cache=cache, chunk=chunk, form=form, out=out)
        return out.view(q.shape[0], -1)

    def _write(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        write_pages(k, v, cache, slots)

    def _decode(self, q: Tensor, cache: LayerCache, band: DecodeBand, form: AttentionForm, out: Tensor) -> None:
        kv_heads, page, dim = cache.k.shape[1:]
        lumps, mask = band.lumps.view(band.size, -1), band.masks[form.window]
        assert mask is not None, "a band is padded"
        size = max(1, self._gather_bytes // (2 * lumps.shape[1] * page * dim * cache.k.element_size()))
        for first in range(0, band.size, size):
            part = slice(first, first + size)
            keys, values = self._gather(cache, lumps[part].reshape(-1))
            shape = (len(lumps[part]), kv_heads, -1, dim)
            at = slice(band.start + first, band.start + first + shape[0])
            folded = attend(q[at].view(shape), keys.view(shape), values.view(shape), mask[part], form)
            out[at].view(shape).copy_(folded)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, chunk: AttentionChunk, form: AttentionForm, out: Tensor
    ) -> None:
        kv_heads, dim = cache.k.shape[1], cache.k.shape[3]
        group = q.shape[1] // kv_heads
        at = slice(chunk.start, chunk.start + chunk.size)
        if chunk.lumps is None:
            keys, values = k[at].transpose(0, 1), v[at].transpose(0, 1)
        else:
            keys, values = (part.view(kv_heads, -1, dim)[:, : chunk.length] for part in self._gather(cache, chunk.lumps))
        # [kv_heads, group, tokens, dim]: a KV head's query heads share its keys through a stride of 0.
        queries = q[at].view(chunk.size, kv_heads, group, dim).permute(1, 2, 0, 3)
        spread = (kv_heads, group, chunk.length, dim)
        mask = chunk.masks[form.window]
        attended = attend(queries, keys.unsqueeze(1).expand(spread), values.unsqueeze(1).expand(spread), mask, form)
        out[at].view(chunk.size, kv_heads, group, dim).copy_(attended.permute(2, 0, 1, 3))

    def _gather(self, cache: LayerCache, lumps: Tensor) -> tuple[Tensor, Tensor]:
        size = cache.k.shape[2] * cache.k.shape[3]
        wanted = lumps.numel() * size
        if self._k.numel() < wanted or self._k.dtype != cache.k.dtype:
            self._k = torch.empty(wanted, dtype=cache.k.dtype, device=cache.k.device)
            self._v = torch.empty(wanted, dtype=cache.v.dtype, device=cache.v.device)
        shape = (lumps.numel(), size)
        keys, values = self._k[:wanted].view(shape), self._v[:wanted].view(shape)
        torch.index_select(cache.k.view(-1, size), 0, lumps, out=keys)
        torch.index_select(cache.v.view(-1, size), 0, lumps, out=values)
        return keys, values


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    """Attention over the last two dimensions, [queries, dim] over [tokens, dim]. mask is additive; None is plain causal."""
    if form.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=form.scale)
    num_queries = q.shape[-2]
    if mask is None:
        mask = torch.full((num_queries, k.shape[-2]), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    size = max(1, TILE_BYTES // (q[..., 0, 0].numel() * k.shape[-2] * q.dtype.itemsize))
    if num_queries <= size:
        return _capped(q, k, v=v, mask=mask, form=form, softcap=form.softcap)
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    for first in range(0, num_queries, size):
        at = slice(first, first + size)
        seen = mask if mask.shape[-2] == 1 else mask[..., at, :]
        out[..., at, :] = _capped(q[..., at, :], k, v=v, mask=seen, form=form, softcap=form.softcap)
    return out


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, form: AttentionForm, softcap: float) -> Tensor:
    """Attention with a softcap, in explicit matrix products."""
    shape = q.shape
    if q.dim() == 4 and k.stride(1) == 0:  # one KV head per group: fold the queries, or matmul copies the expanded keys
        q, k, v = q.reshape(shape[0], -1, shape[-1]), k[:, 0], v[:, 0]
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(_scale(form, shape[-1]))
    scores = scores.div_(softcap).tanh_().mul_(softcap).view(*shape[:-1], -1).add_(mask)
    probabilities = scores.softmax(-1).view(*q.shape[:-1], -1)
    return torch.matmul(probabilities, v).view(*shape[:-1], -1)


def _scale(form: AttentionForm, dim: int) -> float:
    return dim**-0.5 if form.scale is None else form.scale


class DenseAttention:
    """The reference implementation: softmax(q k^T / sqrt(dim)) v for one query of one request at a time."""

    __slots__ = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: StepBatch, form: AttentionForm) -> Tensor:
        """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]. Returns [tokens, heads * dim]."""
        write_pages(k, v, cache, batch.slots)
        rows = [_attend(q[g.start + i], cache, g.tables[i], range(n), form) for g in batch.bands for i, n in enumerate(g.lengths)]
        for chunk in batch.chunks:
            for i in range(chunk.size):
                rows.append(_attend(q[chunk.start + i], cache, chunk.table, _seen(chunk, i), form))
        return torch.stack(rows)


def _seen(chunk: AttentionChunk, i: int) -> Sequence[int]:
    """The slots that token i of a chunk attends to: all before it, or in a tree those before the tree and its branch."""
    own = chunk.length - len(chunk.parents)
    node, branch = chunk.length - chunk.size + i - own, list[int]()
    if node < 0:
        return range(own + node + 1)
    while node >= 0:
        branch.append(own + node)
        node = chunk.parents[node]
    return [*range(own), *reversed(branch)]


def _attend(q: Tensor, cache: LayerCache, table: Tensor, seen: Sequence[int], form: AttentionForm) -> Tensor:
    """Attention of one query, [heads, dim], over the slots `seen` of the pages in `table`: [heads * dim]."""
    slots = torch.tensor(seen if form.window is None else seen[-form.window :])
    kv_heads, dim = cache.k.shape[1], cache.k.shape[3]
    keys = cache.k[table].transpose(1, 2).reshape(-1, kv_heads, dim)[slots]
    values = cache.v[table].transpose(1, 2).reshape(-1, kv_heads, dim)[slots]
    group = q.shape[0] // kv_heads
    scores = torch.einsum("hd,thd->ht", q, keys.repeat_interleave(group, 1)) * _scale(form, dim)
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values.repeat_interleave(group, 1)).reshape(-1)
