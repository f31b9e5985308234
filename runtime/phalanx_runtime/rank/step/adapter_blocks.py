"""Divides the tokens of a step into blocks by their adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from phalanx_runtime.model.attention.step_adapters import AdapterBlock, MixedTokens
from phalanx_runtime.model.copies.uploads import Array

MIXED_TOKENS = 128
"""Most tokens of a block with several adapters: it computes as many tokens for each slot as for that with the most."""
MAX_PADDING = 2
"""Bound of the computed tokens, as a multiple of the tokens: slots with many more tokens are a block of their own."""
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
    return [block for group in groups for block in _blocks(group, upload)]


def _blocks(group: _Tokens, upload: Upload) -> list[AdapterBlock]:
    while group.slots[-1] < 0:
        group.slots.pop()
    slots = np.asarray(group.slots)
    if slots[0] >= 0 and bool((slots == slots[0]).all()):
        slot = int(slots[0])
        return [AdapterBlock(start=group.start, stop=group.stop, first=slot, last=slot + 1)]
    return [
        AdapterBlock(
            start=group.start, stop=group.stop, first=chosen[0], last=chosen[-1] + 1, mixed=_mixed(slots, chosen, upload)
        )
        for chosen in _similar(slots)
    ]


def _similar(slots: Array) -> list[list[int]]:
    """Returns the slots of the tokens, sorted, in parts that each compute at most `MAX_PADDING` times their tokens."""
    present, counts = np.unique(slots[slots >= 0], return_counts=True)
    parts: list[list[int]] = []
    most = total = 0
    for index in np.argsort(-counts, kind="stable"):
        slot, count = int(present[index]), int(counts[index])
        if parts and (len(parts[-1]) + 1) * most <= MAX_PADDING * (total + count):
            parts[-1].append(slot)
            total += count
        else:
            parts.append([slot])
            most = total = count
    return [sorted(part) for part in parts]


def _mixed(slots: Array, chosen: list[int], upload: Upload) -> MixedTokens:
    tokens_of = [np.flatnonzero(slots == slot) for slot in chosen]
    most = max(map(len, tokens_of))
    gather, places = np.zeros((len(chosen), most), np.int64), np.zeros(len(slots), np.int64)
    plain = np.ones((len(slots), 1), np.bool_)
    for row, tokens in enumerate(tokens_of):
        gather[row, : len(tokens)] = tokens
        places[tokens] = row * most + np.arange(len(tokens))
        plain[tokens] = False
    has_gaps, has_plain = chosen[-1] - chosen[0] >= len(chosen), bool(plain.any())
    optional = [*([np.asarray(chosen)] if has_gaps else []), *([plain] if has_plain else [])]
    uploaded = upload([gather.reshape(-1), places, *optional])
    return MixedTokens(
        num_slots=len(chosen),
        slots=uploaded[2] if has_gaps else None,
        gather=uploaded[0],
        places=uploaded[1],
        plain=uploaded[-1] if has_plain else None,
    )
