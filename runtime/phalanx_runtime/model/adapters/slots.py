"""Memory for a fixed number of adapters. A factor of a smaller rank uses the start of its slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx_runtime.model.adapters.experts import Deltas, ExpertDeltas, ExpertMemory, ExpertProducts
from phalanx_runtime.model.adapters.products import AdapterProducts, LinearFactors, NativeProducts, TorchProducts
from phalanx_runtime.model.attention.step_inputs import StepAdapters
from phalanx_runtime.model.experts.sparse import AdaptedMlp, ExpertAdditions, ExpertFactors, SparseMlp
from phalanx_runtime.model.linear.cpu import DTYPES
from phalanx_runtime.model.linear.linear import Linear
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.partition import Span

MODULES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linears that one product computes, in order of their outputs; the last two are also those of each expert."""

NO_EXPERTS = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Inputs and outputs of a linear in the whole model, and this rank's part of both."""

    inputs: int
    outputs: int
    own_inputs: Span
    own_outputs: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlaces:
    """The linears of a layer that adapters may change, by name."""

    linears: Mapping[str, Place]
    expert: Mapping[str, Place] = field(default_factory=dict)
    """Of each expert."""
    experts: Span = NO_EXPERTS
    """The rank's experts; with the number of one and a dot before it, a name is that of its linear."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of one linear of one layer: this rank's inputs of A, its outputs of B."""

    a: Tensor
    """[rank, own inputs]."""
    b: Tensor
    """[rank, own outputs], with the scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """Slots of each linear."""

    num_slots: int
    rank: int
    """Largest of an adapter."""
    dtype: torch.dtype
    device: torch.device

    def new_factors(self, place: Place, outputs: Span) -> LinearFactors:
        """Returns empty factors of a linear. `outputs`: their place in the output of the module that computes it."""
        a, b, ranks = self._zeros(place)
        return LinearFactors(a=a, b=b, ranks=ranks, outputs=slice(outputs.start, outputs.stop))

    def new_expert_factors(self, place: Place, linears: int, experts: int) -> ExpertFactors:
        """Returns empty factors of a module's linears, which have the same sizes, of all experts."""
        return ExpertFactors(*self._zeros(place, linears, experts))

    def _zeros(self, place: Place, *outer: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes, device = (*outer, self.num_slots), self.device
        a, b = (
            torch.zeros(*sizes, self.rank, span.size, dtype=self.dtype, device=device)
            for span in (place.own_inputs, place.own_outputs)
        )
        return a, b, torch.zeros(sizes, dtype=torch.int64, device=device)


class LinearSlots:
    """Memory for the factors of one linear of one layer, or of one expert."""

    __slots__ = ("factors",)

    def __init__(self, factors: LinearFactors) -> None:
        self.factors = factors

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


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """What adapters add to the modules of one layer, in a step."""

    qkv: Deltas
    o: Deltas
    gate_up: Deltas
    down: Deltas
    experts: ExpertAdditions | None = None
    """If an adapter of the step changes experts."""

    def mlp(self, linear: Linear) -> Linear:
        """Returns the second half of an MLP as it is, and router and experts with what adapters add."""
        if self.experts is None or not isinstance(linear, SparseMlp):
            return linear
        return AdaptedMlp(linear, self.experts)


class LayerSlots:
    """Memory of one layer by name of the linear."""

    __slots__ = ("_experts", "_kernels", "_products", "_shape", "linears")

    def __init__(self, places: LayerPlaces, shape: SlotShape, kernels: Kernels) -> None:
        self.linears: dict[str, LinearSlots] = {}
        self._shape = shape
        self._kernels = kernels
        self._products = [self._module(names, places.linears) for names in MODULES]
        self._experts = self._expert_memory(places.expert, places.experts) if places.experts.size else None

    @property
    def has_experts(self) -> bool:
        """Whether there is memory for experts."""
        return self._experts is not None

    def of_step(self, step: StepAdapters, *, has_experts: bool) -> LayerDeltas:
        """Returns what the adapters of a step add. `has_experts`: to experts too."""
        qkv, o, gate_up, down = (Deltas(products, step) for products in self._products)
        experts = ExpertDeltas(self._experts, step) if has_experts and self._experts is not None else None
        return LayerDeltas(*(qkv, o, gate_up, down), experts=experts)

    def _module(self, names: Sequence[str], places: Mapping[str, Place]) -> AdapterProducts | None:
        """Makes the memory of the linears that one product computes; their outputs follow one another."""
        linears, start = [], 0
        for name in names:
            if name in places:
                outputs = Span(start, start + places[name].own_outputs.size)
                linears.append(self._shape.new_factors(places[name], outputs))
                self.linears[name] = LinearSlots(linears[-1])
                start = outputs.stop
        return make_products(linears, self._kernels) if linears else None

    def _expert_memory(self, places: Mapping[str, Place], experts: Span) -> ExpertMemory:
        """Makes the memory of all experts, so that one product may compute them all."""
        gate_up, down = (self._shape.new_expert_factors(places[names[0]], len(names), experts.size) for names in MODULES[2:])
        modules = list(zip(MODULES[2:], (gate_up, down), strict=True))
        products = [
            ExpertProducts(*(self._expert_module(names, whole, experts, at) for names, whole in modules))
            for at in range(experts.size)
        ]
        return ExpertMemory(first=experts.start, gate_up=gate_up, down=down, products=products)

    def _expert_module(self, names: Sequence[str], whole: ExpertFactors, experts: Span, at: int) -> AdapterProducts:
        """Returns the products of one expert. `at`: its number among those of the rank."""
        linears = []
        for index, name in enumerate(names):
            a, b, ranks = (part[index, at] for part in (whole.a, whole.b, whole.ranks))
            outputs = slice(index * b.shape[2], (index + 1) * b.shape[2])
            linears.append(LinearFactors(a=a, b=b, ranks=ranks, outputs=outputs))
            self.linears[f"{experts.start + at}.{name}"] = LinearSlots(linears[-1])
        return make_products(linears, self._kernels)


class AdapterSlots:
    """Memory for `num_slots` adapters of up to `rank`, for the layers of this rank."""

    def __init__(
        self,
        layers: Sequence[LayerPlaces],
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kernels: Kernels,
    ) -> None:
        self.rank = rank
        self.dtype = dtype
        shape = SlotShape(num_slots=num_slots, rank=rank, dtype=dtype, device=device)
        self.layers = [LayerSlots(places, shape, kernels) for places in layers]
        self._with_experts: set[int] = set()
        """Slots whose adapters change experts of this rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(linear.num_bytes for layer in self.layers for linear in layer.linears.values())

    @property
    def has_experts(self) -> bool:
        """Whether there is memory for experts of this rank."""
        return any(layer.has_experts for layer in self.layers)

    def write(self, slot: int, layers: Sequence[Mapping[str, Factors]]) -> None:
        """Replaces the adapter of a slot. `layers`: factors by name of the linear, for each layer of this rank."""
        for own, factors in zip(self.layers, layers, strict=True):
            for name, linear in own.linears.items():
                linear.write(slot, factors.get(name))
        self._set_experts(slot, any("." in name for factors in layers for name in factors))

    def hold(self, slot: int, is_held: bool) -> None:
        """Sets whether a slot without an adapter is computed, with factors of zero."""
        for layer in self.layers:
            for linear in layer.linears.values():
                linear.hold(slot, is_held)
        self._set_experts(slot, is_held)

    def of_step(self, step: StepAdapters) -> list[LayerDeltas]:
        """Returns what the adapters of a step add to each layer of this rank: of a captured step also to experts."""
        has_experts = not step.pieces or any(slot in self._with_experts for slot, _, _ in step.pieces)
        return [layer.of_step(step, has_experts=has_experts) for layer in self.layers]

    def _set_experts(self, slot: int, has_experts: bool) -> None:
        (self._with_experts.add if has_experts else self._with_experts.discard)(slot)


def make_products(linears: Sequence[LinearFactors], kernels: Kernels) -> AdapterProducts:
    """Returns the fastest products of the layout. `linears`: those of a module, of one dtype."""
    if kernels.triton and linears[0].a.dtype != torch.float64:
        from phalanx_runtime.model.adapters.gpu import TritonProducts  # imports Triton

        return TritonProducts(linears)
    compiled = library() if kernels.compiled and linears[0].a.dtype in DTYPES else None
    return TorchProducts(linears) if compiled is None else NativeProducts(compiled, linears)
