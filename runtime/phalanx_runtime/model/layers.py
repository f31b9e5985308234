"""Layers of a decoder between its linears: normalisation, gated activation, vocabulary-parallel embedding."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.rope import Angles, rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension, with the scale in fp32 for narrower dtypes.

    An fp32 weight with a narrower x multiplies before the result is rounded.
    """
    if x.dtype in (torch.float32, torch.float64):
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / size).add_(eps).rsqrt_()
        normed: Tensor = (x * scale).mul_(weight)
        return normed
    wide = x.float()
    if weight.dtype == torch.float32:
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns activation(gate) * up, where `gate_up` holds both side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


class QkNorm(Protocol):
    """Normalises queries and keys."""

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """q: [tokens, heads, dim]; k: [tokens, kv_heads, dim]. Returns [tokens, heads + kv_heads, dim]."""
        ...


class HeadNorm:
    """Normalises each head separately."""

    __slots__ = ("_eps", "_k", "_q")

    def __init__(self, q: Tensor, k: Tensor, eps: float) -> None:
        self._q = q
        self._k = k
        self._eps = eps

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """q: [tokens, heads, dim]; k: [tokens, kv_heads, dim]. Returns [tokens, heads + kv_heads, dim]."""
        return torch.cat((rms_norm(q, self._q, self._eps), rms_norm(k, self._k, self._eps)), 1)


class WholeNorm:
    """Normalises over all heads of all ranks: an all-reduce sums their squares.

    q, k: this rank's weights, [heads, dim] and [kv_heads, dim]. sizes: query and key elements per token over all ranks.
    brings_keys: False on ranks with replicated keys, which add no squares.
    """

    __slots__ = ("_brings_keys", "_collective", "_eps", "_k", "_q", "_sizes")

    def __init__(
        self, q: Tensor, k: Tensor, eps: float, sizes: tuple[int, int], collective: Collective, brings_keys: bool
    ) -> None:
        self._q = q
        self._k = k
        self._eps = eps
        self._sizes = sizes
        self._collective = collective
        self._brings_keys = brings_keys

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """q: [tokens, heads, dim]; k: [tokens, kv_heads, dim]. Returns [tokens, heads + kv_heads, dim]."""
        wide_q, wide_k = (part if part.dtype == torch.float64 else part.float() for part in (q, k))
        keys = wide_k.square().sum((1, 2)) if self._brings_keys else torch.zeros_like(wide_k[:, 0, 0])
        squares = torch.stack((wide_q.square().sum((1, 2)), keys), -1)
        if self._collective.world_size > 1:
            squares = self._collective.all_reduce(squares)
        scale_q, scale_k = (torch.rsqrt(squares[:, i, None, None] / self._sizes[i] + self._eps) for i in range(2))
        return torch.cat(((wide_q * scale_q).to(q.dtype) * self._q, (wide_k * scale_k).to(k.dtype) * self._k), 1)


class Table(Protocol):
    """Row lookup, as of a Tensor."""

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns the rows at `index`."""
        ...


class VocabEmbedding:
    """Vocabulary-parallel embedding: each rank holds a span of rows, and a sum over ranks completes the lookup."""

    __slots__ = ("_collective", "span", "weight")

    def __init__(self, weight: Table, span: Span, collective: Collective) -> None:
        self.weight = weight
        self.span = span
        self._collective = collective

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: [n] ids. Returns [n, hidden]."""
        if self._collective.world_size == 1:
            return self.weight.index_select(0, tokens)
        local = tokens - self.span.start
        elsewhere = (local < 0) | (local >= self.span.size)
        rows = self.weight.index_select(0, local.masked_fill_(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(1), 0)
        return self._collective.all_reduce(rows)


# Norm and rotation, the steps between the linears that have CPU kernels. TorchSteps is the reference implementation.


class Steps(Protocol):
    """Norm and rotation of a decoder block."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [tokens, size]. Normalises over the last dimension."""
        ...

    def turned(self, x: Tensor, angles: Angles) -> Tensor:
        """x: [tokens, heads, dim]. Applies the rotary embedding, possibly in place."""
        ...


class TorchSteps:
    """`Steps` in torch."""

    __slots__ = ()

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [tokens, size]. Normalises over the last dimension."""
        return rms_norm(x, weight, eps)

    def turned(self, x: Tensor, angles: Angles) -> Tensor:
        """x: [tokens, heads, dim]. Applies the rotary embedding."""
        return rotate(x, angles)
