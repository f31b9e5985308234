"""Random experts of one layer, and the same experts in fp32 as the reference."""

import torch

from phalanx_runtime.model.experts.sparse import Expert, ExpertList, ExpertWeights, Routing
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.packed.weight import PackedWeight
from phalanx_runtime.model.partition import Span

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float16: 4e-3, torch.float32: 1e-5}
"""The interpreter multiplies no bfloat16."""


class Noise:
    """Random tensors on the device."""

    def __init__(self, seed: int) -> None:
        self._chance = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=self._chance).to(DEVICE, dtype)


def stacked(noise: Noise, count: int, hidden: int, inner: int, dtype: torch.dtype, *, has_bias: bool) -> ExpertWeights:
    return ExpertWeights(
        gate_up=noise(count, 2 * inner, hidden, dtype=dtype) * hidden**-0.5,
        down=noise(count, hidden, inner, dtype=dtype) * inner**-0.5,
        gate_up_bias=4 * noise(count, 2 * inner, dtype=dtype) if has_bias else None,
        down_bias=noise(count, hidden, dtype=dtype) if has_bias else None,
    )


def wide_reference(weights: ExpertWeights, span: Span, routing: Routing, activation: Activation) -> ExpertList:
    """The same experts in fp32."""

    def linear(weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, i: int) -> DenseLinear:
        whole = weight[i].float() if isinstance(weight, torch.Tensor) else weight[i].dequantize(torch.float32)
        return DenseLinear(whole, None if bias is None else bias[i].float())

    experts = []
    for i in range(span.size):
        up = linear(weights.gate_up, weights.gate_up_bias, i)
        experts.append(Expert(PlainGated(up, activation), linear(weights.down, weights.down_bias, i)))
    return ExpertList(experts, span, routing)


def distinct_logits(seed: int, tokens: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """No two logits of a token are equal, in any dtype: the reference leaves the order of ties open."""
    chance = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=chance) for _ in range(tokens)]).to(DEVICE, dtype) / 8
