"""Embeddings of a step that replace those of its tokens."""

from dataclasses import dataclass

from torch import Tensor


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
