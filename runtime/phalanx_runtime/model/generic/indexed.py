"""Indexed attention (DeepSeek-V3.2): the indexer of a layer chooses the keys of each query, by index keys that pages have too.

Index keys are a layer of their own in the pages, before that of the attention that uses them. The code of the indexer runs on
tiles of one request, with the index keys of all tokens before.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.attention.bias import causal_mask
from phalanx_runtime.model.attention.paged import LayerCache, StepBatch, write_pages

SCORE_BYTES = 64 << 20
"""Scores of a tile; one query may exceed it."""
Inputs = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]
"""Hidden states, residuals of queries, and cosine and sine of the rotation, [1, tokens, ...] each."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """The indexer of a layer."""

    module: Any
    own: Callable[..., Tensor]
    """Its code, which takes `Inputs`, a mask, positions and a cache; returns the indices of chosen keys, [1, queries, chosen]."""

    @property
    def dim(self) -> int:
        """Dimension of an index key."""
        return int(self.module.head_dim)

    def choose(self, inputs: Inputs, mask: Tensor, keys: Any = None) -> Tensor:
        """Returns an additive mask of the chosen keys, [queries, keys]. mask: additive, [queries, keys]."""
        chosen = self.own(*inputs, mask[None], None, past_key_values=keys)[0]
        return torch.full_like(mask, float("-inf")).scatter_(1, chosen.long(), 0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """What an indexer chose in one step, for the attention of its layer and of later ones without an indexer."""

    masks: Mapping[int, Tensor]
    """Additive, [queries, slots], by the first token of a band or chunk of the step."""
    dim: int


@runtime_checkable
class Chooser(Protocol):
    """A handler of attention calls that runs indexers."""

    def choose(self, indexer: Indexer, inputs: Inputs) -> Choice:
        """Returns the keys of all queries of the step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The tokens of one request in a step; the cache of an indexer for one tile of them at a time."""

    start: int
    """First token in the step."""
    before: int
    """Tokens of the request before the step."""
    table: Tensor
    mask: Tensor
    """Additive, [tokens, slots]."""


class _Keys:
    """The cache that an indexer uses: keeps the index keys of a tile in pages, and returns those of all tokens so far."""

    def __init__(self, cache: LayerCache, head_dim: int, slots: Tensor, table: Tensor, length: int) -> None:
        self._cache, self._head_dim, self._slots, self._table, self._length = cache, head_dim, slots, table, length

    def update_indexer(self, key: Tensor, _: int) -> Tensor:
        """Takes [1, tile, dim], returns [1, length, dim]."""
        kv_heads, page = self._cache.k.shape[1:3]
        size, dim = kv_heads * self._head_dim, key.shape[-1]
        parts = F.pad(key[0], (0, size - dim)).view(-1, kv_heads, self._head_dim)
        write_pages(parts, parts, self._cache, self._slots)
        pages = self._table[: -(-self._length // page), None]
        kept, _values = self._cache.read((pages * kv_heads + torch.arange(kv_heads, device=pages.device)).flatten(), key.dtype)
        heads = kept.view(-1, kv_heads, page, self._head_dim).transpose(1, 2)
        return heads.reshape(1, -1, size)[:, : self._length, :dim]


class IndexedStep:
    """Runs indexers on the requests of a step."""

    def __init__(self, batch: StepBatch, dtype: torch.dtype) -> None:
        self._batch = batch
        self._requests = list(_requests_of(batch, dtype))

    def choose(self, indexer: Indexer, inputs: Inputs, cache: LayerCache, head_dim: int) -> Choice:
        """Returns the keys of all queries, and keeps their index keys in pages of heads with `head_dim`."""
        chosen = [self._choose(request, indexer, inputs, cache, head_dim) for request in self._requests]
        masks: dict[int, Tensor] = {}
        for band in self._batch.bands:
            rows, chosen = chosen[: band.size], chosen[band.size :]
            masks[band.start] = torch.cat(rows)
        return Choice(masks | {chunk.start: mask for chunk, mask in zip(self._batch.chunks, chosen, strict=True)}, indexer.dim)

    def _choose(self, request: _Request, indexer: Indexer, inputs: Inputs, cache: LayerCache, head_dim: int) -> Tensor:
        chosen = torch.full_like(request.mask, float("-inf"))
        size = max(1, SCORE_BYTES // (4 * indexer.module.n_heads * chosen.shape[1]))
        for first in range(0, len(chosen), size):
            tile = slice(first, min(first + size, len(chosen)))
            tokens, length = slice(request.start + tile.start, request.start + tile.stop), request.before + tile.stop
            hidden, residual, (cos, sin) = inputs
            part = hidden[:, tokens], residual[:, tokens], (cos[:, tokens], sin[:, tokens])
            kv_heads = cache.k.shape[1]
            slots = self._batch.slots[tokens.start * kv_heads : tokens.stop * kv_heads]
            keys = _Keys(cache, head_dim, slots=slots, table=request.table, length=length)
            chosen[tile, :length] = indexer.choose(part, request.mask[tile, :length], keys)
        return chosen


def _requests_of(batch: StepBatch, dtype: torch.dtype) -> Iterator[_Request]:
    """Returns the requests in the order of the step: decodes, then chunks."""
    for band in batch.bands:
        causal = band.masks[None]
        assert causal is not None, "a band is padded"
        for row, length in enumerate(band.lengths):
            yield _Request(start=band.start + row, before=length - 1, table=band.tables[row], mask=causal[row, 0].to(dtype))
    for chunk in batch.chunks:
        mask = causal_mask(chunk.size, batch.tokens.new_empty(0, dtype=dtype)) if (own := chunk.masks[None]) is None else own
        yield _Request(start=chunk.start, before=chunk.length - chunk.size, table=chunk.table, mask=mask)
