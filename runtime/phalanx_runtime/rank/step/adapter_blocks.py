"""Divides the tokens of a step into blocks by their adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phalanx_runtime.model.attention.step_adapters import AdapterBlock

MASKED_TOKENS = 256
"""Tokens of a block with several adapters. It computes all their factors for each token, so larger ones waste more."""


@dataclass(slots=True)
class _Tokens:
    start: int
    slots: list[int]
    """Of each token, from 0; -1: no adapter."""

    @property
    def stop(self) -> int:
        return self.start + len(self.slots)

    def can_join(self, slot: int, count: int) -> bool:
        return len(self.slots) + count <= MASKED_TOKENS or all(own == slot for own in self.slots)


def adapter_blocks(
    slots: Sequence[int], counts: Sequence[int], rank: int, upload: Callable[[NDArray[np.bool_]], Tensor]
) -> list[AdapterBlock]:
    """Returns the blocks of a step. `slots`: of each request in packed order, from 1; 0: none. `counts`: tokens of each."""
    groups: list[_Tokens] = []
    start = 0
    for slot, count in zip(slots, counts, strict=True):
        own = [slot - 1] * count
        last = groups[-1] if groups else None
        if last is not None and last.stop == start and last.can_join(slot - 1, count):
            last.slots += own
        elif slot:
            groups.append(_Tokens(start, own))
        start += count
    return [_block(group, rank, upload) for group in groups]


def _block(group: _Tokens, rank: int, upload: Callable[[NDArray[np.bool_]], Tensor]) -> AdapterBlock:
    while group.slots[-1] < 0:
        group.slots.pop()
    of_token = np.asarray(group.slots)
    first, last = int(of_token[of_token >= 0].min()), int(of_token.max()) + 1
    others = of_token[:, None] != np.arange(first, last)
    masks = upload(np.repeat(others, rank, axis=1)) if others.any() else None
    return AdapterBlock(start=group.start, stop=group.start + len(of_token), first=first, last=last, others=masks)
