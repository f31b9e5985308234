"""The tokens of a step that have an adapter, in blocks. Part of `StepBatch`, without the adapters' weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTokens:
    """The tokens of a block by slot: as many for each slot as for that with the most, repeated where there are fewer."""

    num_slots: int
    slots: Tensor | None
    """[slots]: the slots, if they are not all of the block's range."""
    gather: Tensor
    """[slots * most]: tokens of each slot, counted from the start of the block."""
    places: Tensor
    """[tokens]: index of each token in `gather`; any index for a token of no slot here."""
    plain: Tensor | None
    """[tokens, 1]: true for tokens of no slot here; absent if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBlock:
    """Tokens [start, stop) of the step, with adapters in slots [first, last), counted from 0."""

    start: int
    stop: int
    first: int
    last: int
    mixed: MixedTokens | None = None
    """Absent if all tokens have the first slot."""


AdapterBlocks = Sequence[AdapterBlock]
"""Blocks in order of their first tokens; tokens outside have no adapter. Blocks of the same tokens differ in their slots."""
