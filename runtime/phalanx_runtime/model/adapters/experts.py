"""What adapters add to the experts of a layer: rows of one expert and one adapter are one group of its products."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.adapters.products import AdapterProducts
from phalanx_runtime.model.attention.step_inputs import PIECE, AdaptedRows, Piece, StepAdapters
from phalanx_runtime.model.experts.sparse import ExpertAddition, ExpertFactors


class Deltas:
    """What adapters add to the output of one module, for the tokens of a step or the rows of an expert."""

    __slots__ = ("_products", "_step")

    def __init__(self, products: AdapterProducts | None, step: AdaptedRows) -> None:
        self._products = products
        self._step = step

    def add(self, y: Tensor, x: Tensor, *, alternates: bool = False) -> None:
        """See `Addition`."""
        if self._products is not None:
            self._products.add(y, x, self._step, alternates=alternates)


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """What adapters add to one expert."""

    gate_up: AdapterProducts
    down: AdapterProducts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMemory:
    """The adapters of the experts of a layer."""

    first: int
    """Number of the rank's first expert."""
    gate_up: ExpertFactors
    down: ExpertFactors
    products: Sequence[ExpertProducts]
    """Of each expert, with views of the same factors."""


class ExpertDeltas:
    """`ExpertAdditions` of a layer. Of a captured step only factors and slots are used."""

    __slots__ = ("_memory", "_period", "down", "gate_up", "slots")

    def __init__(self, memory: ExpertMemory, step: StepAdapters) -> None:
        self.gate_up = memory.gate_up
        self.down = memory.down
        self.slots = step.slots
        self._memory = memory
        self._period = step.pieces[-1][0] + 2 if step.pieces else 0
        """Keys of an expert: no adapter, then each slot up to the step's last one."""

    def keys(self, experts: Tensor) -> Tensor:
        """See `ExpertAdditions`."""
        return (experts * self._period + (self.slots + 1)[:, None]).flatten()

    def of_experts(self, keys: Tensor) -> Mapping[int, ExpertAddition]:
        """See `ExpertAdditions`."""
        groups, sizes = (part.tolist() for part in torch.unique_consecutive(keys, return_counts=True))
        pieces: dict[int, list[Piece]] = {}
        latest, start = -1, 0
        for group, size in zip(groups, sizes, strict=True):
            number, slot = divmod(group, self._period)
            start = start if number == latest else 0
            latest, stop = number, start + size
            if slot:
                cuts = range(start, stop, PIECE)
                pieces.setdefault(number, []).extend((slot - 1, cut, min(cut + PIECE, stop)) for cut in cuts)
            start = stop
        rows = torch.arange(len(keys), device=keys.device)
        return {number: self._addition(number, rows, own) for number, own in pieces.items()}

    def _addition(self, number: int, rows: Tensor, pieces: Sequence[Piece]) -> ExpertAddition:
        own = self._memory.products[number - self._memory.first]
        step = AdaptedRows(rows=rows, pieces=pieces, table=torch.tensor(pieces, device=rows.device))
        return ExpertAddition(Deltas(own.gate_up, step), Deltas(own.down, step))
