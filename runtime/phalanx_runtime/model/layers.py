"""The small parts of a decoder: normalisation, rotary embedding, gated activation, split vocabulary."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.config import Rope
from phalanx_runtime.model.partition import Span


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; for dtypes below fp32 the scale is computed in fp32."""
    if x.dtype in (torch.float32, torch.float64):
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / size).add_(eps).rsqrt_()
        normed: Tensor = (x * scale).mul_(weight)
        return normed
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up holds both side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2], float32. Source: RoFormer; Llama 3.1 for llama3."""
    inverse: Tensor = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _stretched(rope, inverse)
    return inverse


def _stretched(rope: Rope, inverse: Tensor) -> Tensor:
    """Long waves slowed by `factor`, short ones kept, those between blended."""
    wave = 2 * math.pi / inverse
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * inverse / rope.factor + blend * inverse
    slowed = torch.where(wave > low, inverse / rope.factor, inverse)
    return torch.where((wave >= high) & (wave <= low), between, slowed)


class RopeTable:
    """Cosines and signed sines of every position, ready for `rotate`."""

    __slots__ = ("cos", "sin")

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope_frequencies(rope, head_dim))
        cos, sin = angles.cos(), angles.sin()
        # [positions, 1, head_dim]: the middle dimension spreads over heads. The first half of sin is negated once, here.
        self.cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device=device, dtype=dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of these positions: two [tokens, 1, head_dim]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] turned by its position's angles."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * cos, swapped, sin)


class VocabEmbedding:
    """Rows of the embedding that this rank holds; the sum over ranks is the lookup."""

    __slots__ = ("_collective", "span", "weight")

    def __init__(self, weight: Tensor, span: Span, collective: Collective) -> None:
        self.weight = weight
        self.span = span
        self._collective = collective

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: [n] ids. Gives [n, hidden]."""
        if self._collective.world_size == 1:
            return self.weight.index_select(0, tokens)
        local = tokens - self.span.start
        elsewhere = (local < 0) | (local >= self.span.size)
        rows = self.weight.index_select(0, local.masked_fill_(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(1), 0)
        return self._collective.all_reduce(rows)
