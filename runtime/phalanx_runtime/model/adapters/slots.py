"""Memory for a fixed number of adapters, and their part of a linear's output.

    y += (x A^T) B        A: [slots, rank, in]    B: [slots, rank, out], with the adapter's scale

The factors of all slots are one tensor, so that a block of tokens with several adapters takes two batched products, however many
they are: its tokens are gathered by slot, padded to one length. A factor of a smaller rank ends in zeros.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.adapter import LINEARS
from phalanx_runtime.model.attention.step_adapters import AdapterBlock, AdapterBlocks
from phalanx_runtime.model.partition import Span


@dataclass(frozen=True, slots=True)
class Place:
    """Inputs and outputs of a linear in the whole model, and this rank's part of both."""

    inputs: int
    outputs: int
    own_inputs: Span
    own_outputs: Span


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of one linear of one layer: this rank's inputs of A, its outputs of B."""

    a: Tensor
    """[rank, own inputs]."""
    b: Tensor
    """[rank, own outputs], with the scale."""


class LinearSlots:
    """Factors of one linear of one layer, of all slots. `outputs`: their place in the output of the module that computes it."""

    __slots__ = ("_a", "_b", "_is_held", "_outputs")

    def __init__(self, place: Place, outputs: Span, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self._a = torch.zeros(num_slots, rank, place.own_inputs.size, dtype=dtype, device=device)
        self._b = torch.zeros(num_slots, rank, place.own_outputs.size, dtype=dtype, device=device)
        self._outputs = slice(outputs.start, outputs.stop)
        self._is_held = [False] * num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self._a.nbytes + self._b.nbytes

    def write(self, slot: int, factors: Factors | None) -> None:
        """Replaces the factors of a slot; without any it adds nothing."""
        self._is_held[slot] = factors is not None
        for memory, part in (
            (self._a, None if factors is None else factors.a),
            (self._b, None if factors is None else factors.b),
        ):
            memory[slot].zero_()
            if part is not None:
                memory[slot, : len(part)].copy_(part)

    def hold(self, slot: int, is_held: bool) -> None:
        """Sets whether the slot's part is computed, whatever its factors are."""
        self._is_held[slot] = is_held

    def add(self, y: Tensor, x: Tensor, block: AdapterBlock) -> None:
        """Adds the adapters' part of the output to y, in place. y: [tokens, out of the module], the block's.

        x: [tokens, in], or with several slots [slots, most, in].
        """
        first, last, own = block.first, block.last, y[:, self._outputs]
        if not any(self._is_held[first:last]):
            return
        if block.mixed is None:
            own.addmm_(x @ self._a[first].t(), self._b[first])
            return
        chosen = block.mixed.slots
        a, b = (factors[first:last] if chosen is None else factors.index_select(0, chosen) for factors in (self._a, self._b))
        outputs = torch.bmm(torch.bmm(x, a.transpose(1, 2)), b)
        added = outputs.flatten(0, 1).index_select(0, block.mixed.places)
        own.add_(added if block.mixed.plain is None else added.masked_fill_(block.mixed.plain, 0.0))


class Deltas:
    """What adapters add to the output of one module, for the tokens of a step."""

    __slots__ = ("_blocks", "_linears")

    def __init__(self, linears: Sequence[LinearSlots], blocks: AdapterBlocks) -> None:
        self._linears = linears
        self._blocks = blocks

    def add(self, y: Tensor, x: Tensor) -> None:
        """Adds to y in place. x: [tokens, in]; y: [tokens, out]."""
        for block in self._blocks if self._linears else ():
            rows = slice(block.start, block.stop)
            own = x[rows]
            if block.mixed is not None:
                own = own.index_select(0, block.mixed.gather).view(block.mixed.num_slots, -1, x.shape[1])
            for linear in self._linears:
                linear.add(y[rows], own, block)


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """What adapters add to the modules of one layer, in a step."""

    qkv: Deltas
    o: Deltas
    gate_up: Deltas
    down: Deltas


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """Factors of one layer by name of the linear; a layer with experts has no MLP linears."""

    linears: Mapping[str, LinearSlots]

    def of_step(self, blocks: AdapterBlocks) -> LayerDeltas:
        """Returns what the adapters of a step add."""
        q, k, v, o, gate, up, down = ([self.linears[name]] if name in self.linears else [] for name in LINEARS)
        return LayerDeltas(Deltas([*q, *k, *v], blocks), Deltas(o, blocks), Deltas([*gate, *up], blocks), Deltas(down, blocks))


class AdapterSlots:
    """Memory for `num_slots` adapters of up to `rank`, for the layers of this rank."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Place]],
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self.layers = [LayerSlots(_layer(places, num_slots, rank, dtype, device)) for places in layers]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(linear.num_bytes for layer in self.layers for linear in layer.linears.values())

    def write(self, slot: int, layers: Sequence[Mapping[str, Factors]]) -> None:
        """Replaces the adapter of a slot. `layers`: factors by name of the linear, for each layer of this rank."""
        for own, factors in zip(self.layers, layers, strict=True):
            for name, linear in own.linears.items():
                linear.write(slot, factors.get(name))

    def hold(self, slot: int, is_held: bool) -> None:
        """Sets whether a slot without an adapter is computed, with factors of zero."""
        for layer in self.layers:
            for linear in layer.linears.values():
                linear.hold(slot, is_held)

    def of_step(self, blocks: AdapterBlocks) -> list[LayerDeltas]:
        """Returns what the adapters of a step add to each layer of this rank."""
        return [layer.of_step(blocks) for layer in self.layers]


def _layer(
    places: Mapping[str, Place], num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
) -> dict[str, LinearSlots]:
    """Returns the slots of each linear; q, k and v follow one another in the output of their module, and so do gate and up."""
    slots: dict[str, LinearSlots] = {}
    for module in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
        start = 0
        for name in module:
            if name in places:
                outputs = Span(start, start + places[name].own_outputs.size)
                slots[name] = LinearSlots(places[name], outputs, num_slots=num_slots, rank=rank, dtype=dtype, device=device)
                start = outputs.stop
    return slots
