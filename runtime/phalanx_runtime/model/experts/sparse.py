"""A layer's mixture of experts in torch. `ExpertList` is the reference, and computes on CPUs with the linears of the registry.

router linear -> softmax, largest `per_token` experts -> gate-up linear -> activation * up -> down linear -> weighted sum
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx_runtime.model.linear.linear import Gated, Linear
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """This rank's columns of one expert, or with another dimension in front of one layer's experts."""

    gate_up: Tensor
    """[2 * columns, hidden]: gate above up."""
    down: Tensor
    """[hidden, columns]."""
    gate_up_bias: Tensor | None = None
    """[2 * columns]."""
    down_bias: Tensor | None = None
    """[hidden]."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert's MLP."""

    gate_up: Gated
    down: Linear


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
        if not self.experts:
            return torch.zeros_like(x)
        chosen = choose_experts(logits, self._routing)
        tokens, per_token = chosen.experts.shape
        numbers = chosen.experts.flatten()
        counts = torch.bincount(numbers, minlength=logits.shape[1]).tolist()
        first, counts = sum(counts[: self.span.start]), counts[self.span.start : self.span.stop]
        pairs = numbers.argsort(stable=True)[first : first + sum(counts)]
        rows = x.index_select(0, pairs // per_token)
        is_all = len(pairs) == len(numbers)
        outputs = (x.new_empty if is_all else x.new_zeros)((len(numbers), x.shape[1]))
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(start, start + count)
                outputs.index_copy_(0, pairs[part], expert.down(expert.gate_up(rows[part])))
                start += count
        weights = chosen.weights.unsqueeze(1)
        return torch.bmm(weights, outputs.view(tokens, per_token, x.shape[1]).to(weights.dtype)).squeeze(1).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor, logits: Tensor) -> None:
        """See `Experts`."""
        residual.add_(self(x, logits))


class SparseMlp:
    """`Linear` of router and experts: takes the place of an MLP."""

    __slots__ = ("experts", "num_bytes", "router")

    def __init__(self, router: Linear, experts: Experts) -> None:
        self.router = router
        self.experts = experts
        self.num_bytes = router.num_bytes + experts.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.experts(x, self.router(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        self.experts.add_to(residual, x, self.router(x))
