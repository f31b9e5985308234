"""Divides the tokens of a step into blocks by their adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from phalanx_runtime.model.attention.step_adapters import AdapterBlock, MixedTokens
from phalanx_runtime.model.copies.uploads import Array

MIXED_TOKENS = 128
"""Most tokens of a block with several adapters: it computes as many tokens for each slot as for that with the most."""
SHORT = 8
"""Most tokens of a request in such a block: decodes, and those that verify draft tokens."""

Upload = Callable[[Sequence[Array]], list[Tensor]]


@dataclass(slots=True)
class _Tokens:
    start: int
    slots: list[int]
    """Of each token, from 0; -1: no adapter."""
    is_short: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.slots)

    def can_join(self, slot: int, count: int) -> bool:
        is_short = self.is_short and count <= SHORT and len(self.slots) + count <= MIXED_TOKENS
        return is_short or all(own == slot for own in self.slots)


def adapter_blocks(slots: Sequence[int], counts: Sequence[int], upload: Upload) -> list[AdapterBlock]:
    """Returns the blocks of a step. `slots`: of each request in packed order, from 1; 0: none. `counts`: tokens of each."""
    groups: list[_Tokens] = []
    start = 0
    for slot, count in zip(slots, counts, strict=True):
        own = [slot - 1] * count
        last = groups[-1] if groups else None
        if last is not None and last.stop == start and last.can_join(slot - 1, count):
            last.slots += own
            last.is_short &= count <= SHORT
        elif slot:
            groups.append(_Tokens(start, own, count <= SHORT))
        start += count
    return [_block(group, upload) for group in groups]


def _block(group: _Tokens, upload: Upload) -> AdapterBlock:
    while group.slots[-1] < 0:
        group.slots.pop()
    slots = np.asarray(group.slots)
    first, last = int(slots[slots >= 0].min()), int(slots.max()) + 1
    is_mixed = last - first > 1 or bool((slots < 0).any())
    mixed = _mixed(slots, first, last, upload) if is_mixed else None
    return AdapterBlock(start=group.start, stop=group.stop, first=first, last=last, mixed=mixed)


def _mixed(slots: Array, first: int, last: int, upload: Upload) -> MixedTokens:
    most = int(np.bincount(slots[slots >= 0]).max())
    gather, places = np.zeros((last - first, most), np.int64), np.zeros(len(slots), np.int64)
    for slot in range(first, last):
        tokens = np.flatnonzero(slots == slot)
        gather[slot - first, : len(tokens)] = tokens
        places[tokens] = (slot - first) * most + np.arange(len(tokens))
    plain = slots[:, None] < 0
    uploaded = upload([gather.reshape(-1), places, *([plain] if plain.any() else [])])
    return MixedTokens(gather=uploaded[0], places=uploaded[1], plain=uploaded[2] if len(uploaded) > 2 else None)
