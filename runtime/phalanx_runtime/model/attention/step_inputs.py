"""Parts of `StepBatch`: embeddings that replace those of tokens, and the tokens that have an adapter, by slot."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PIECE = 64
"""Most tokens of a piece."""
Piece = tuple[int, int, int]
"""Slot, counted from 0, and its tokens from `first` to `stop` in `AdaptedRows.rows`."""


@dataclass(frozen=True, slots=True)
class StepEmbeddings:
    """Embeddings of some tokens of the step, in packed order."""

    tokens: Tensor
    """[n]: indices of the tokens."""
    values: Tensor
    """[n, hidden]"""
    deeper: tuple[Tensor, ...] = ()
    """[n, hidden] each: what is added to the output of the first layer, the second, and so on."""

    def place(self, x: Tensor) -> None:
        """Writes them into the embeddings of all tokens, [tokens, hidden]."""
        x.index_copy_(0, self.tokens, self.values.to(x.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedRows:
    """The tokens with an adapter, sorted by its slot; of a captured step all tokens."""

    rows: Tensor
    """int64 [tokens with an adapter]: their places in the step."""
    pieces: Sequence[Piece]
    """In order, each of at most `PIECE` tokens; of a captured step none, as only the device knows them."""
    table: Tensor
    """int64 [pieces, 3]: `pieces` on the device, of a captured step one of each token, possibly empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdapters(AdaptedRows):
    """The tokens of a step, and those with an adapter."""

    slots: Tensor
    """int64 [tokens]: slot of each token of the step, counted from 0; -1: none."""
