"""A layer's mixture of experts in torch. `ExpertList` is the reference, and computes on CPUs with the linears of the registry.

router linear -> softmax, largest `per_token` experts -> gate-up linear -> activation * up -> down linear -> weighted sum
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx_runtime.model.linear.cpu import Addition
from phalanx_runtime.model.linear.linear import Gated, Linear
from phalanx_runtime.model.linear.packed.weight import PackedLayout, PackedWeight
from phalanx_runtime.model.partition import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How router logits choose experts: see `Mixture`."""

    per_token: int
    norm_topk_prob: bool


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """The experts of each token, largest weight first: [tokens, per_token] each."""

    experts: Tensor
    weights: Tensor
    """In at least fp32."""


def choose_experts(logits: Tensor, routing: Routing) -> ChosenExperts:
    """Returns the experts with the largest logits and their weights. logits: [tokens, experts]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights, experts = wide.softmax(-1).topk(routing.per_token, -1)
    return ChosenExperts(experts, weights / weights.sum(-1, keepdim=True) if routing.norm_topk_prob else weights)


class Experts(Protocol):
    """This rank's part of the experts of a layer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Returns the weighted sum over the experts of each token, [tokens, hidden].

        x: [tokens, hidden]; logits: [tokens, experts] of the router, over the experts of all ranks.
        """
        ...

    def add_to(self, residual: Tensor, x: Tensor, logits: Tensor) -> None:
        """Adds the result to `residual`, in place. residual: [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertLayouts:
    """How the weights of experts are packed."""

    gate_up: PackedLayout
    down: PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """This rank's columns of one expert, or with another dimension in front of one layer's experts."""

    gate_up: Tensor | PackedWeight
    """[2 * columns, hidden]: gate above up."""
    down: Tensor | PackedWeight
    """[hidden, columns]."""
    gate_up_bias: Tensor | None = None
    """[2 * columns]."""
    down_bias: Tensor | None = None
    """[hidden]."""

    @property
    def layouts(self) -> ExpertLayouts | None:
        """How the weights are packed, if they are."""
        if isinstance(self.gate_up, PackedWeight) and isinstance(self.down, PackedWeight):
            return ExpertLayouts(self.gate_up.layout, self.down.layout)
        return None

    def dequantize(self, dtype: torch.dtype) -> "ExpertWeights":
        """Returns the same with weights in `dtype` where they are packed."""
        gate_up, down = (one if isinstance(one, Tensor) else one.dequantize(dtype) for one in (self.gate_up, self.down))
        return replace(self, gate_up=gate_up, down=down)

    def expert(self, number: int) -> "ExpertWeights":
        """Returns a view of one expert of a layer's."""
        return ExpertWeights(**{name: part[number] for name, part in self._parts()})

    def new_empty(self, count: int) -> "ExpertWeights":
        """Returns uninitialised weights of `count` experts, with the shapes and layouts of this expert."""
        return ExpertWeights(**{name: part.new_empty((count, *part.shape)) for name, part in self._parts()})

    def put(self, number: int, expert: "ExpertWeights") -> None:
        """Copies one expert to its place. It must have the same layouts."""
        for (_, whole), (_, part) in zip(self._parts(), expert._parts(), strict=True):
            whole[number].copy_(part)

    def _parts(self) -> list[tuple[str, Any]]:
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, part) for name, part in named if part is not None]

    @property
    def inner(self) -> int:
        """Columns."""
        return self.down.shape[-1] if isinstance(self.down, Tensor) else self.down.inputs

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(part.nbytes if isinstance(part, Tensor) else part.num_bytes for part in parts if part is not None)


def stack(weights: Iterable[ExpertWeights], count: int) -> ExpertWeights:
    """Returns the experts of a layer as one, copied one at a time. They must have the same layouts."""
    whole: ExpertWeights | None = None
    for number, one in enumerate(weights):
        whole = whole or one.new_empty(count)
        whole.put(number, one)
    assert whole is not None, "a rank without experts has no stack"
    return whole


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert's MLP."""

    gate_up: Gated
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertAddition:
    """What adapters add to both products of one expert, for its rows."""

    gate_up: Addition
    down: Addition


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """Factors of one module of a rank's experts, of all slots: of gate and up, which are two linears, or of down."""

    a: Tensor
    """[linears, experts, slots, rank, in]."""
    b: Tensor
    """[linears, experts, slots, rank, out], with the adapter's scale."""
    ranks: Tensor
    """int64 [linears, experts, slots]: of the adapter that a slot has; 0: none, or none of this linear."""


class ExpertAdditions(Protocol):
    """What adapters add to the experts of a layer, in a step: to experts one by one, or as factors to all of them."""

    @property
    def gate_up(self) -> ExpertFactors:
        """Factors of gate and up."""
        ...

    @property
    def down(self) -> ExpertFactors:
        """Factors of down."""
        ...

    @property
    def slots(self) -> Tensor:
        """See `StepAdapters`."""
        ...

    def keys(self, experts: Tensor) -> Tensor:
        """Returns keys that sort pairs by expert, and those of an expert by adapter: [pairs]. experts: [tokens, per_token]."""
        ...

    def of_experts(self, keys: Tensor) -> Mapping[int, ExpertAddition]:
        """Returns what is added to experts with such rows, by number. keys: of the rank's pairs, sorted."""
        ...


class AdaptableExperts(Experts, Protocol):
    """Experts to which adapters may add."""

    def with_additions(self, x: Tensor, logits: Tensor, additions: ExpertAdditions) -> Tensor:
        """As a call, with what adapters add to each expert before its activation, and to its output."""
        ...


class ExpertList:
    """`Experts` one by one: rows are gathered once, sorted by expert, and experts without rows are skipped.

    The host reads the number of rows of each expert. Each token's sum has the order of its weights, whatever else is in the step.
    """

    __slots__ = ("_routing", "experts", "num_bytes", "span")

    def __init__(self, experts: Sequence[Expert], span: Span, routing: Routing) -> None:
        """`span`: the numbers of the experts among those of all ranks."""
        self.experts = experts
        self.span = span
        self._routing = routing
        self.num_bytes = sum(expert.gate_up.num_bytes + expert.down.num_bytes for expert in experts)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `Experts`."""
        return self.with_additions(x, logits, None)

    def add_to(self, residual: Tensor, x: Tensor, logits: Tensor) -> None:
        """See `Experts`."""
        residual.add_(self(x, logits))

    def with_additions(self, x: Tensor, logits: Tensor, additions: ExpertAdditions | None) -> Tensor:
        """See `AdaptableExperts`. `additions`: none for a step without adapters."""
        if not self.experts:
            return torch.zeros_like(x)
        chosen = choose_experts(logits, self._routing)
        tokens, per_token = chosen.experts.shape
        numbers = chosen.experts.flatten()
        counts = torch.bincount(numbers, minlength=logits.shape[1]).tolist()
        first, counts = sum(counts[: self.span.start]), counts[self.span.start : self.span.stop]
        keys = numbers if additions is None else additions.keys(chosen.experts)
        pairs = keys.argsort(stable=True)[first : first + sum(counts)]
        added = {} if additions is None else additions.of_experts(keys.index_select(0, pairs))
        rows = x.index_select(0, pairs // per_token)
        is_all = len(pairs) == len(numbers)
        outputs = (x.new_empty if is_all else x.new_zeros)((len(numbers), x.shape[1]))
        start = 0
        for number, expert, count in zip(range(self.span.start, self.span.stop), self.experts, counts, strict=True):
            if count:
                part = slice(start, start + count)
                outputs.index_copy_(0, pairs[part], _output(expert, rows[part], added.get(number)))
                start += count
        weights = chosen.weights.unsqueeze(1)
        return torch.bmm(weights, outputs.view(tokens, per_token, x.shape[1]).to(weights.dtype)).squeeze(1).to(x.dtype)


def _output(expert: Expert, rows: Tensor, added: ExpertAddition | None) -> Tensor:
    if added is None:
        return expert.down(expert.gate_up(rows))
    inner = expert.gate_up.with_addition(rows, added.gate_up)
    output = expert.down(inner)
    added.down.add(output, inner)
    return output


class SparseMlp:
    """`Linear` of router and experts: takes the place of an MLP."""

    __slots__ = ("experts", "num_bytes", "router")

    def __init__(self, router: Linear, experts: AdaptableExperts) -> None:
        self.router = router
        self.experts = experts
        self.num_bytes = router.num_bytes + experts.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.experts(x, self.router(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        self.experts.add_to(residual, x, self.router(x))


class AdaptedMlp:
    """`Linear` of router and experts with adapters, for one step."""

    __slots__ = ("_additions", "_mlp", "num_bytes")

    def __init__(self, mlp: SparseMlp, additions: ExpertAdditions) -> None:
        self._mlp = mlp
        self._additions = additions
        self.num_bytes = mlp.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._mlp.experts.with_additions(x, self._mlp.router(x), self._additions)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))
