"""Memory for a fixed number of adapters. A factor of a smaller rank uses the start of its slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.adapters.products import AdapterProducts, LinearFactors, NativeProducts, TorchProducts
from phalanx_runtime.model.attention.step_adapters import StepAdapters
from phalanx_runtime.model.linear.cpu import DTYPES
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.partition import Span

MODULES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linears that one product computes, in order of their outputs."""


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
    """Memory for the factors of one linear of one layer. `outputs`: their place in the output of the module that computes it."""

    __slots__ = ("factors",)

    def __init__(self, place: Place, outputs: Span, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.factors = LinearFactors(
            a=torch.zeros(num_slots, rank, place.own_inputs.size, dtype=dtype, device=device),
            b=torch.zeros(num_slots, rank, place.own_outputs.size, dtype=dtype, device=device),
            ranks=torch.zeros(num_slots, dtype=torch.int64, device=device),
            outputs=slice(outputs.start, outputs.stop),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.factors.a.nbytes + self.factors.b.nbytes

    def write(self, slot: int, factors: Factors | None) -> None:
        """Replaces the factors of a slot; without any it adds nothing."""
        memory, rank = self.factors, 0
        if factors is not None:
            rank = len(factors.a)
            memory.a[slot, :rank].copy_(factors.a)
            memory.b[slot, :rank].copy_(factors.b)
        memory.ranks[slot] = rank

    def hold(self, slot: int, is_held: bool) -> None:
        """Sets whether the slot's part is computed, whatever its factors are."""
        self.factors.ranks[slot] = self.factors.a.shape[1] if is_held else 0


class Deltas:
    """What adapters add to the output of one module, for the tokens of a step."""

    __slots__ = ("_products", "_step")

    def __init__(self, products: AdapterProducts | None, step: StepAdapters) -> None:
        self._products = products
        self._step = step

    def add(self, y: Tensor, x: Tensor, *, alternates: bool = False) -> None:
        """See `Addition`."""
        if self._products is not None:
            self._products.add(y, x, self._step, alternates=alternates)


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """What adapters add to the modules of one layer, in a step."""

    qkv: Deltas
    o: Deltas
    gate_up: Deltas
    down: Deltas


class LayerSlots:
    """Memory of one layer by name of the linear; a layer with experts has no MLP linears."""

    __slots__ = ("_products", "linears")

    def __init__(self, linears: Mapping[str, LinearSlots], kernels: Kernels) -> None:
        self.linears = linears
        modules = [[linears[name].factors for name in module if name in linears] for module in MODULES]
        self._products = [make_products(module, kernels) if module else None for module in modules]

    def of_step(self, step: StepAdapters) -> LayerDeltas:
        """Returns what the adapters of a step add."""
        qkv, o, gate_up, down = (Deltas(products, step) for products in self._products)
        return LayerDeltas(qkv, o, gate_up, down)


class AdapterSlots:
    """Memory for `num_slots` adapters of up to `rank`, for the layers of this rank."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Place]],
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kernels: Kernels,
    ) -> None:
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self.layers = [LayerSlots(_layer(places, num_slots, rank, dtype, device), kernels) for places in layers]

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

    def of_step(self, step: StepAdapters) -> list[LayerDeltas]:
        """Returns what the adapters of a step add to each layer of this rank."""
        return [layer.of_step(step) for layer in self.layers]


def _layer(
    places: Mapping[str, Place], num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
) -> dict[str, LinearSlots]:
    """Returns the slots of each linear; q, k and v follow one another in the output of their module, and so do gate and up."""
    slots: dict[str, LinearSlots] = {}
    for module in MODULES:
        start = 0
        for name in module:
            if name in places:
                outputs = Span(start, start + places[name].own_outputs.size)
                slots[name] = LinearSlots(places[name], outputs, num_slots=num_slots, rank=rank, dtype=dtype, device=device)
                start = outputs.stop
    return slots


def make_products(linears: Sequence[LinearFactors], kernels: Kernels) -> AdapterProducts:
    """Returns the fastest products of the layout. `linears`: those of a module, of one dtype."""
    if kernels.triton and linears[0].a.dtype != torch.float64:
        from phalanx_runtime.model.adapters.gpu import TritonProducts  # imports Triton

        return TritonProducts(linears)
    compiled = library() if kernels.compiled and linears[0].a.dtype in DTYPES else None
    return TorchProducts(linears) if compiled is None else NativeProducts(compiled, linears)
