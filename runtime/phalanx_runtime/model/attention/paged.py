"""Paged attention in torch.

A step packs decodes first, in bands padded to one length, then prefill chunks. Query heads of one KV head are folded into the
query length (decode) or expanded with stride 0 (prefill).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.attention.bias import causal_mask, chunk_bias, decode_bias, slot_positions
from phalanx_runtime.model.attention.feedback import KvRounding, encode_with_feedback, shifted_back
from phalanx_runtime.model.attention.page_format import EXPANSION_BYTES, PageFormat, encode, gather, hadamard_transform, rows_of
from phalanx_runtime.model.attention.step_inputs import StepAdapters, StepEmbeddings
from phalanx_runtime.model.copies import upload
from phalanx_runtime.model.states.step import StepRows

Windows = Mapping[int | None, Tensor | None]
"""Mask by sliding window, by default causal."""

TILE_BYTES = 16 << 20
"""Logits per tile with a softcap; larger tiles miss the CPU caches."""

GATHER_BYTES = 32 << 20
"""Keys and values per gather, with the scratch that expands their codes; one request may exceed it."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention of one layer."""

    window: int | None = None
    """Sliding window in tokens. Default: full attention."""
    scale: float | None = None
    """Factor on logits. Default: 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Logits become softcap * tanh(logit / softcap)."""
    sinks: Tensor | None = field(default=None, compare=False)
    """[heads]: a logit of each head that takes part in the softmax and has no value."""
    slopes: Tensor | None = field(default=None, compare=False)
    """[heads]: a logit loses this times the tokens between its key and the query (ALiBi)."""
    block: int | None = None
    """Tokens per block, from the first token on: a token attends to its own block only. Default: full attention."""
    chosen: Mapping[int, Tensor] | None = field(default=None, compare=False)
    """Whether a token attends to a key, [tokens, slots], by the first token of a band or chunk. Default: to all."""

    @property
    def has_bias(self) -> bool:
        """Whether logits have a mask of this layer alone, or a bias."""
        return self.slopes is not None or self.block is not None or self.chosen is not None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, [pages, kv_heads, page, head_dim] each; codes of a format have its `code_dim` instead."""

    k: Tensor
    v: Tensor
    """`k` itself if keys are the values too."""
    k_scales: Tensor | None = None
    """[pages, kv_heads, page, num_scales], bf16, with a format."""
    v_scales: Tensor | None = None
    format: PageFormat | None = field(default=None, kw_only=True)
    """Default: keys and values in the dtype of the weights."""
    rounding: KvRounding | None = field(default=None, kw_only=True, compare=False)
    """With a format, if the group is calibrated: then values are transformed as keys are, and attention's result back."""

    @property
    def is_latent(self) -> bool:
        """Whether keys are the values too; those are transformed as keys are, with a format."""
        return self.v is self.k

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a page holds; the first dimension of each is the page."""
        parts = (self.k, self.k_scales) if self.is_latent else (self.k, self.v, self.k_scales, self.v_scales)
        return tuple(tensor for tensor in parts if tensor is not None)

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns keys and values, [rows, page, head_dim]. `rows`: of the cache as [pages * kv_heads, ...]."""
        keys = self._read(self.k, self.k_scales, rows, dtype)
        return keys, keys if self.is_latent else self._read(self.v, self.v_scales, rows, dtype)

    def _read(self, part: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = part.flatten(0, 1).index_select(0, rows)
        if self.format is None:
            return numbers
        assert scales is not None, "a format has scales"
        return self.format.decode(numbers, scales.flatten(0, 1).index_select(0, rows), dtype)

    def encoded(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns codes of keys and values, then their scales, given both as the format stores them; of latents one each."""
        assert self.format is not None, "pages in the dtype of the weights have no codes"
        feedback = (None, None) if self.rounding is None else (self.rounding.keys, self.rounding.values)
        parts = zip((k,) if self.is_latent else (k, v), feedback, strict=False)
        encoded = [encode(self.format, x) if by is None else encode_with_feedback(self.format, x, by) for x, by in parts]
        return (*(codes for codes, _ in encoded), *(scales for _, scales in encoded))

    def rounded(self, x: Tensor) -> Tensor:
        """Returns keys or values, as written, as attention reads them back without `rounding`."""
        return x if self.format is None else self.format.decode(*encode(self.format, x), x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBand:
    """Tokens [start, start + size) of the step, one per request."""

    start: int
    size: int
    cache_rows: Tensor
    """[size * kv_heads * pages]: rows of the cache as [pages * kv_heads, page * head_dim]."""
    masks: Windows
    """Additive, [size, 1, 1, pages * page]."""
    tables: Tensor
    """[size, pages]: page tables."""
    lengths: list[int]
    device_lengths: Tensor
    """[size], int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChunk:
    """Tokens [start, start + size) of the step: the last ones of a request of `length`."""

    start: int
    size: int
    length: int
    cache_rows: Tensor | None
    """As in `DecodeBand`; absent if the chunk is the whole context."""
    masks: Windows
    """Additive, [size, length]."""
    table: Tensor
    """Page table."""
    parents: tuple[int, ...] = ()
    """Of the draft tree at the end of the chunk, by index in the tree; -1 for a root."""


class Segments:
    """The requests of a step in packed order, for kernels that read page tables: decodes first, then chunks."""

    def __init__(
        self,
        *,
        counts: Sequence[int],
        num_decodes: int,
        starts: Tensor,
        lengths: Tensor,
        tables: Tensor,
        tree: Sequence[Tensor] = (),
    ) -> None:
        self.num_requests = len(counts)
        self.num_decodes = num_decodes
        """Leading requests with one token and no tree."""
        self.starts = starts
        """[requests + 1], int32: first token of each request."""
        self.lengths = lengths
        """[requests], int32: tokens in the cache, with those of the step."""
        self.tables = tables
        """[requests, pages], int32."""
        self.tree = list(tree)
        """If any request has a tree at its end, three tensors of int32: sizes, levels and ancestors.

        [requests]: draft tokens of the tree. [requests, nodes]: the tree level of each node, also of nodes from earlier steps.
        [tokens]: bit j is set if node j of the tree is the token or its ancestor.
        """
        self._counts = counts
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def blocks(self, block_queries: int) -> tuple[Tensor, Tensor]:
        """Returns request and query offset of each block of up to `block_queries` tokens of a request, int32: decodes first."""
        if block_queries not in self._blocks:
            blocks = [(i, offset) for i, count in enumerate(self._counts) for offset in range(0, count, block_queries)]
            columns = np.asarray(blocks, np.int32).reshape(-1, 2).T
            requests, offsets = upload((columns[0], columns[1]), self.starts.device)
            self._blocks[block_queries] = (requests, offsets)
        return self._blocks[block_queries]


def no_segments() -> Segments:
    """Raises ValueError."""
    raise ValueError("this batch has no segments; build it with BatchBuilder")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step as tensors."""

    tokens: Tensor
    positions: Tensor  # of rotary embeddings: after images in a grid less than a token's index in the request
    slots: Tensor
    """[tokens * kv_heads]: rows of the cache as [pages * kv_heads * page, head_dim]."""
    bands: Sequence[DecodeBand]
    chunks: Sequence[AttentionChunk]
    logits_indices: Tensor
    """Sampled tokens in plan order, then prompt tokens with logprobs, then `num_pooled` tokens without logits."""
    num_pooled: int = 0
    """Tokens whose hidden states become vectors."""
    segments: Callable[[], Segments] = no_segments
    """Made at the first call. GPU kernels use them, other attention uses bands and chunks."""
    windowed: "StepBatch | None" = None
    """The same step for layers with a window, if they use parts of pages: other slots, bands, chunks and segments."""
    adapters: StepAdapters | None = None
    """Tokens with adapters."""
    rows: StepRows | None = None
    """The requests in packed order, for layers with states, if the model has any."""
    embeddings: StepEmbeddings | None = None
    """Embeddings of the placeholder tokens of images."""
    cells: Tensor | None = None  # [3, tokens]: positions in time, height and width, if the step has tokens of images in a grid
    has_images_within: bool = False  # tokens of images attend to later ones: masks of `chunks` have that, `segments` lack it
    sequences: Sequence[tuple[int, int]] = ()
    """For encoders: tokens of each request, and the first of its second text (0: none), in packed order."""
    await_pages: Callable[[LayerCache], None] | None = None
    """Returns once the pages of a layer may be used, if copies to or from host memory are in progress."""

    def of(self, window: int | None) -> "StepBatch":
        """Returns the step for a layer with this window."""
        return self if window is None or self.windowed is None else self.windowed


class Attention(Protocol):
    """Writes a step to the cache, if `DecoderOps` has not, and computes attention."""

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
        """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]. Returns [tokens, heads * dim].

        `is_written`: keys and values are in the pages already, and queries and keys are as the pages' format stores keys.
        """
        ...


def transform(q: Tensor, k: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Returns queries and keys as the cache's format stores keys."""
    return (hadamard_transform(q), hadamard_transform(k)) if cache.format is not None else (q, k)


def write_pages(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Writes k and v, [tokens, kv_heads, dim] each; k alone if keys are the values too."""
    parts = cache.encoded(k, v) if cache.format is not None else (k,) if cache.is_latent else (k, v)
    for target, part in zip(cache.tensors, parts, strict=True):
        dim = target.shape[-1]
        target.view(-1, dim).index_copy_(0, slots, part.reshape(-1, dim))


class PagedAttention:
    """Gathers into reused buffers, then computes scaled_dot_product_attention."""

    __slots__ = ("_gather_bytes", "_k", "_v")

    def __init__(self, gather_bytes: int = GATHER_BYTES) -> None:
        self._gather_bytes = gather_bytes
        # Page faults of a new allocation cost ten times the gather.
        self._k = torch.empty(0)
        self._v = torch.empty(0)

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
            q, k, v = self._transform(q, k, v, cache)
            self._write(k, v, cache, batch.slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for band in batch.bands:
            self._decode(q, cache, band, params, out)
        self._prefill_all(q, k, v=v, cache=cache, batch=batch, params=params, out=out)
        return self._restored(out, cache).view(q.shape[0], -1)

    def _prefill_all(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: StepBatch, params: AttentionParams, out: Tensor
    ) -> None:
        for chunk in batch.chunks:
            self._prefill(q, k, v=v, cache=cache, chunk=chunk, params=params, out=out)

    def _transform(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as the cache's format stores keys and values."""
        if cache.format is None:
            return q, k, v
        return self._hadamard(q), self._hadamard(k), v if cache.rounding is None else self._hadamard(v)

    def _hadamard(self, x: Tensor) -> Tensor:
        return hadamard_transform(x)

    def _restored(self, out: Tensor, cache: LayerCache) -> Tensor:
        """Returns attention's result, [tokens, heads, head_dim], in the dimensions of the values that were given."""
        return out if cache.rounding is None else self._hadamard(shifted_back(out, cache.rounding.values.shift))

    def _write(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        write_pages(k, v, cache, slots)

    def _decode(self, q: Tensor, cache: LayerCache, band: DecodeBand, params: AttentionParams, out: Tensor) -> None:
        (kv_heads, page), dim = cache.k.shape[1:3], q.shape[-1]
        cache_rows, mask = band.cache_rows.view(band.size, -1), band.masks[params.window]
        assert mask is not None, "a band is padded"
        pair_bytes = 2 * q.element_size() + (0 if cache.format is None else EXPANSION_BYTES)
        size = max(1, self._gather_bytes // (cache_rows.shape[1] * page * dim * pair_bytes))
        for first in range(0, band.size, size):
            part = slice(first, first + size)
            keys, values = self._gather(cache, cache_rows[part].reshape(-1), q.dtype)
            shape = (len(cache_rows[part]), kv_heads, -1, dim)
            rows = slice(band.start + first, band.start + first + shape[0])
            sinks = None if params.sinks is None else params.sinks.view(1, kv_heads, -1, 1)
            biased = mask[part]
            if params.has_bias:
                lengths = band.device_lengths[part]
                biased = biased + decode_bias(params.slopes, params.block, lengths, mask.shape[-1], kv_heads).to(q.dtype)
            if params.chosen is not None:
                biased = biased.masked_fill(~params.chosen[band.start][part, None, None], float("-inf"))
            folded = attend(q[rows].view(shape), keys.view(shape), values.view(shape), biased, params, sinks=sinks)
            out[rows].view(shape).copy_(folded)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, chunk: AttentionChunk, params: AttentionParams, out: Tensor
    ) -> None:
        kv_heads, dim, group = cache.k.shape[1], q.shape[-1], q.shape[1] // cache.k.shape[1]
        rows = slice(chunk.start, chunk.start + chunk.size)
        if chunk.cache_rows is None and cache.rounding is None:
            keys = cache.rounded(k[rows]).transpose(0, 1)
            values = keys if cache.is_latent else cache.rounded(v[rows]).transpose(0, 1)
        else:
            cache_rows = rows_of(chunk.table, kv_heads) if chunk.cache_rows is None else chunk.cache_rows
            keys, values = (part.view(kv_heads, -1, dim)[:, : chunk.length] for part in self._gather(cache, cache_rows, q.dtype))
        # [kv_heads, group, tokens, dim]: query heads share keys with stride 0.
        queries = q[rows].view(chunk.size, kv_heads, group, dim).permute(1, 2, 0, 3)
        shape = (kv_heads, group, chunk.length, dim)
        keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
        sinks = None if params.sinks is None else params.sinks.view(kv_heads, group, 1, 1)
        result = out[rows].view(chunk.size, kv_heads, group, dim).permute(1, 2, 0, 3)
        if not params.has_bias:
            result.copy_(attend(queries, keys, values, chunk.masks[params.window], params, sinks=sinks))
            return
        positions = slot_positions(chunk.length, chunk.parents, q.device)
        mask = causal_mask(chunk.size, q) if (mask := chunk.masks[params.window]) is None else mask
        size = max(1, TILE_BYTES // (q.shape[1] * chunk.length * q.element_size()))
        for first in range(0, chunk.size, size):
            tile, start = slice(first, first + size), chunk.length - chunk.size + first
            bias = chunk_bias(params.slopes, params.block, positions, slice(start, start + len(mask[tile])), kv_heads)
            biased = mask[tile] + bias.to(q.dtype)
            if params.chosen is not None:
                biased = biased.masked_fill(~params.chosen[chunk.start][tile], float("-inf"))
            result[:, :, tile].copy_(attend(queries[:, :, tile], keys, values, biased, params, sinks=sinks))

    def _gather(self, cache: LayerCache, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if cache.format is not None:
            return cache.read(rows, dtype)
        size = cache.k.shape[2] * cache.k.shape[3]
        if self._k.numel() < rows.numel() * size or self._k.dtype != cache.k.dtype:
            self._k = cache.k.new_empty(rows.numel() * size)
        keys = gather(cache.k.view(-1, size), rows, self._k)
        if cache.is_latent:
            return keys, keys
        if self._v.numel() < rows.numel() * size or self._v.dtype != cache.v.dtype:
            self._v = cache.v.new_empty(rows.numel() * size)
        return keys, gather(cache.v.view(-1, size), rows, self._v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams, *, sinks: Tensor | None = None
) -> Tensor:
    """Computes attention of [..., queries, dim] over [..., tokens, dim]. `sinks`: of `params`, as [..., queries or 1, 1]."""
    if params.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=params.scale)
    mask = causal_mask(q.shape[-2], q) if mask is None else mask
    size = max(1, TILE_BYTES // (q[..., 0, 0].numel() * k.shape[-2] * q.dtype.itemsize))
    if q.shape[-2] <= size:
        return _explicit(q, k, v=v, mask=mask, params=params, sinks=sinks)
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    for first in range(0, q.shape[-2], size):
        tile = slice(first, first + size)
        tile_mask = mask if mask.shape[-2] == 1 else mask[..., tile, :]
        tile_sinks = sinks if sinks is None or sinks.shape[-2] == 1 else sinks[..., tile, :]
        out[..., tile, :] = _explicit(q[..., tile, :], k, v=v, mask=tile_mask, params=params, sinks=tile_sinks)
    return out


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Computes attention with logits in memory, for softcap and sinks."""
    shape = q.shape
    if q.dim() == 4 and k.stride(1) == 0:  # fold the queries, or matmul copies the expanded keys
        q, k, v = q.reshape(shape[0], -1, shape[-1]), k[:, 0], v[:, 0]
    logits = torch.matmul(q, k.transpose(-1, -2)).mul_(logit_scale(params, shape[-1]))
    if params.softcap is not None:
        logits = logits.div_(params.softcap).tanh_().mul_(params.softcap)
    logits = logits.view(*shape[:-1], -1).add_(mask)
    if sinks is not None:
        logits = torch.cat((logits, sinks.expand(*shape[:-1], 1)), -1)
    probabilities = logits.softmax(-1)[..., : k.shape[-2]].reshape(*q.shape[:-1], -1)
    return torch.matmul(probabilities, v).view(*shape[:-1], -1)


def logit_scale(params: AttentionParams, dim: int) -> float:
    """Returns the factor on logits of heads of this dimension."""
    return dim**-0.5 if params.scale is None else params.scale
