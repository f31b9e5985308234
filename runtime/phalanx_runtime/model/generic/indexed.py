"""Indexed attention (DeepSeek-V3.2): an indexer chooses the keys of each query, by index keys that pages have beside the latents.

Index keys are a layer of their own in the pages, before that of the attention. The code of the indexer computes them and scores,
on tiles of one request or on single tokens of several ones. Of equal scores the first tokens are chosen: the choice of
`transformers` depends on the number of keys after the query, so that chunks and pages would change tokens.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx_runtime.model.attention.bias import causal_rows
from phalanx_runtime.model.attention.page_format import rows_of
from phalanx_runtime.model.attention.paged import AttentionChunk, DecodeBand, LayerCache, StepBatch, write_pages

SCORE_BYTES = 64 << 20
"""Scores and index keys of a tile; one query may exceed it."""
_COPIES = 3
"""Of the scores of all heads, which exist at once: products, scaled, and without negative ones."""
Inputs = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]
"""Hidden states, residuals of queries, and cosine and sine of the rotation, [requests, tokens, ...] each."""


def chosen_keys(scores: Tensor, count: int) -> Tensor:
    """Returns whether a key is among the `count` best of its query, and of equal ones among the first. Shapes: [..., keys]."""
    least = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    is_better, is_equal = scores > least, scores == least
    return is_better | (is_equal & (is_equal.cumsum(-1) <= count - is_better.sum(-1, keepdim=True)))


class _Ranking(NamedTuple):
    indices: Tensor


class _Ranked(TorchFunctionMode):
    """Within it, `Tensor.topk` of the running thread chooses by `chosen_keys`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_chosen = torch.empty(0)
        """The last choice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        self.is_chosen = chosen_keys(*args)
        return _Ranking(self.is_chosen)


@dataclass(frozen=True, slots=True)
class Indexer:
    """The indexer of a layer."""

    module: Any
    own: Callable[..., Tensor]
    """Its code, which takes `Inputs`, a mask, positions and a cache, and ranks the keys of each query by `topk`."""

    @property
    def dim(self) -> int:
        """Dimension of an index key."""
        return int(self.module.head_dim)

    def tile(self, num_keys: int) -> int:
        """Returns the number of queries that are computed at once. num_keys: of each."""
        return max(1, SCORE_BYTES // (4 * num_keys * (_COPIES * int(self.module.n_heads) + self.dim)))

    def choose(self, inputs: Inputs, mask: Tensor, keys: Any = None) -> Tensor:
        """Returns whether a query attends to a key. mask: additive; both [requests, queries, keys]."""
        ranked = _Ranked()
        with ranked:
            self.own(*inputs, mask, None, past_key_values=keys)
        return ranked.is_chosen


@dataclass(frozen=True, slots=True)
class Choice:
    """What an indexer chose in one step, for the attention of its layer and of later ones without an indexer."""

    keys: Mapping[int, Tensor]
    """Whether a query attends to a key, [queries, keys], by the first token of a band or chunk of the step."""
    dim: int
    """Of an index key."""


@runtime_checkable
class Chooser(Protocol):
    """A handler of attention calls that runs indexers."""

    def choose(self, indexer: Indexer, inputs: Inputs) -> Choice:
        """Returns the keys of all queries of the step."""
        ...


class _Keys:
    """The cache that an indexer uses, in place of one in `transformers`: the index keys of all tokens so far, from pages."""

    def __init__(self, cache: LayerCache, rows: Tensor, length: int) -> None:
        """rows: pages of the requests, [requests, pages]; length: tokens returned."""
        self._cache, self._rows, self._length = cache, rows, length

    def update_indexer(self, key: Tensor, _: int) -> Tensor:
        """Takes the index keys of a tile, which pages have. Returns [requests, length, dim]."""
        kept, _values = self._cache.read(self._rows.reshape(-1), key.dtype)
        return kept.view(len(self._rows), -1, key.shape[-1])[:, : self._length]


class _Written(Exception):
    """Ends the code of an indexer once its index keys are in pages."""


class _Writer:
    """The cache of an indexer that writes the index keys of a step."""

    def __init__(self, cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> None:
        """dtype: of the model's activations; some indexers rotate in float32."""
        self._cache, self._slots, self._dtype = cache, slots, dtype

    def update_indexer(self, key: Tensor, _: int) -> Tensor:
        """Takes the index keys of all tokens, [1, tokens, dim]."""
        keys = key.transpose(0, 1).to(self._dtype)
        write_pages(keys, keys, self._cache, self._slots)
        raise _Written


def choose_keys(batch: StepBatch, indexer: Indexer, inputs: Inputs, cache: LayerCache) -> Choice:
    """Returns the keys of all queries of a step, whose inputs are [1, tokens, ...], and writes their index keys to pages.

    All are written before any is read: a request may use pages that another one computes in the same step.
    """
    with suppress(_Written):
        indexer.own(*inputs, None, None, past_key_values=_Writer(cache, batch.slots, inputs[0].dtype))
    step = _Indexing(batch, indexer, inputs, cache)
    of_bands = {band.start: step.of_band(band) for band in batch.bands}
    return Choice(of_bands | {chunk.start: step.of_chunk(chunk) for chunk in batch.chunks}, indexer.dim)


@dataclass(frozen=True, slots=True)
class _Indexing:
    """The work of one indexer in a step."""

    batch: StepBatch
    indexer: Indexer
    inputs: Inputs
    cache: LayerCache

    def of_band(self, band: DecodeBand) -> Tensor:
        mask, rows = band.masks[None], band.cache_rows.view(band.size, -1)
        assert mask is not None, "a band is padded"
        size = self.indexer.tile(mask.shape[-1])
        chosen = []
        for first in range(0, band.size, size):
            tile = slice(first, min(first + size, band.size))
            tokens = slice(band.start + tile.start, band.start + tile.stop)
            keys = _Keys(self.cache, rows[tile], mask.shape[-1])
            chosen.append(self.indexer.choose(self._of(tokens, each=True), mask[tile, 0], keys)[:, 0])
        return torch.cat(chosen)

    def of_chunk(self, chunk: AttentionChunk) -> Tensor:
        mask, rows, page = chunk.masks[None], rows_of(chunk.table, 1), self.cache.k.shape[2]
        chosen = torch.zeros((chunk.size, chunk.length), dtype=torch.bool, device=rows.device)
        size = self.indexer.tile(chunk.length)
        for first in range(0, chunk.size, size):
            tile = slice(first, min(first + size, chunk.size))
            tokens, length = slice(chunk.start + tile.start, chunk.start + tile.stop), chunk.length - chunk.size + tile.stop
            visible = causal_rows(tile.stop - tile.start, length, self.inputs[0]) if mask is None else mask[tile, :length]
            keys = _Keys(self.cache, rows[None, : -(-length // page)], length)
            chosen[tile, :length] = self.indexer.choose(self._of(tokens, each=False), visible[None], keys)[0]
        return chosen

    def _of(self, tokens: slice, each: bool) -> Inputs:
        """Returns the inputs of some tokens. each: as requests of their own."""
        hidden, residual, cosine, sine = (
            part[:, tokens].transpose(0, 1) if each else part[:, tokens] for part in (*self.inputs[:2], *self.inputs[2])
        )
        return hidden, residual, (cosine, sine)
