"""The tokens of a step that have an adapter, in blocks. Part of `StepBatch`, without the adapters' weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBlock:
    """Tokens [start, stop) of the step, with adapters in slots [first, last)."""

    start: int
    stop: int
    first: int
    last: int
    others: Tensor | None = None
    """[stop - start, (last - first) * rank]: true at the factors of slots that a token does not have; absent if none are."""


AdapterBlocks = Sequence[AdapterBlock]
"""Blocks in order of their tokens; tokens outside have no adapter."""
