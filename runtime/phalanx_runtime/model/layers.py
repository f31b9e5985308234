"""Norms, gated activation, preparation of heads and vocabulary-parallel embedding."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.rope import Angles, rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    The scale has at least fp32; an fp32 weight multiplies before x is rounded. x: [..., dim]; weight: [dim].
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


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns activation(gate) * up from [gate up]."""
    gates, up = gate_up.chunk(2, dim=-1)
    if activation == "swigluoai":
        limited = gates.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1).mul_(limited * torch.sigmoid(limited * 1.702))
    return (F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")).mul_(up)


class QkNorm(Protocol):
    """Normalises queries and keys."""

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """q: [tokens, heads, dim]; k: [tokens, kv_heads, dim]. Returns [tokens, heads + kv_heads, dim]."""
        ...


class HeadNorm:
    """`QkNorm` per head."""

    __slots__ = ("eps", "k", "q")

    def __init__(self, q: Tensor, k: Tensor, eps: float) -> None:
        self.q = q
        self.k = k
        self.eps = eps

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """See `QkNorm`."""
        return torch.cat((rms_norm(q, self.q, self.eps), rms_norm(k, self.k, self.eps)), 1)


class WholeNorm:
    """`QkNorm` over all heads of all ranks, by an all-reduce of squares.

    `sizes`: query and key elements per token over all ranks. `counts_keys`: false on ranks with replicated keys.
    """

    __slots__ = ("_collective", "_counts_keys", "_eps", "_k", "_q", "_sizes")

    def __init__(
        self, q: Tensor, k: Tensor, eps: float, sizes: tuple[int, int], collective: Collective, counts_keys: bool
    ) -> None:
        self._q = q
        self._k = k
        self._eps = eps
        self._sizes = sizes
        self._collective = collective
        self._counts_keys = counts_keys

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """See `QkNorm`."""
        wide_q, wide_k = (part if part.dtype == torch.float64 else part.float() for part in (q, k))
        keys = wide_k.square().sum((1, 2)) if self._counts_keys else torch.zeros_like(wide_k[:, 0, 0])
        squares = torch.stack((wide_q.square().sum((1, 2)), keys), -1)
        if self._collective.world_size > 1:
            squares = self._collective.all_reduce(squares)
        scale_q, scale_k = (torch.rsqrt(squares[:, i, None, None] / self._sizes[i] + self._eps) for i in range(2))
        return torch.cat(((wide_q * scale_q).to(q.dtype) * self._q, (wide_k * scale_k).to(k.dtype) * self._k), 1)


class RowTable(Protocol):
    """Row lookup of a Tensor."""

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns rows, [n, columns]. index: [n]."""
        ...


class VocabEmbedding:
    """Vocabulary-parallel embedding: ranks look up their rows and sum."""

    __slots__ = ("_collective", "span", "weight")

    def __init__(self, weight: RowTable, span: Span, collective: Collective) -> None:
        self.weight = weight
        self.span = span
        self._collective = collective

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: [n] ids. Returns [n, hidden]."""
        if self._collective.world_size == 1:
            return self.weight.index_select(0, tokens)
        local = tokens - self.span.start
        is_remote = (local < 0) | (local >= self.span.size)
        rows = self.weight.index_select(0, local.masked_fill_(is_remote, 0)).masked_fill_(is_remote.unsqueeze(1), 0)
        return self._collective.all_reduce(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Queries, keys and values of a step, normalised and rotated: [tokens, heads or kv_heads, dim] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_written: bool
    """See `Attention`."""


class DecoderOps(Protocol):
    """Operations between linears."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension. x: [..., hidden]; weight: [hidden]."""
        ...

    def add_norm(self, x: Tensor, y: Tensor, after: Tensor | None, before: Tensor | None, eps: float) -> Tensor:
        """Adds y, normalised by `after`, to x in place, and returns x normalised by `before`.

        Without a weight a norm is the identity. x, y: [tokens, hidden].
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Returns activation(gate) * up from [gate up]. gate_up: [tokens, 2 * inner]."""
        ...

    def prepare_heads(self, qkv: Tensor, norm: QkNorm | None, angles: Angles | None, cache: LayerCache, slots: Tensor) -> Heads:
        """Normalises and rotates queries and keys, possibly in place, and may write keys and values to the pages.

        qkv: [tokens, heads + 2 * kv_heads, dim]; slots: as in `StepBatch`.
        """
        ...


class TorchOps:
    """Reference implementation."""

    __slots__ = ()

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps`."""
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, y: Tensor, after: Tensor | None, before: Tensor | None, eps: float) -> Tensor:
        """See `DecoderOps`."""
        x.add_(y if after is None else self.norm(y, after, eps))
        return x if before is None else self.norm(x, before, eps)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `DecoderOps`."""
        return gate(gate_up, activation)

    def prepare_heads(self, qkv: Tensor, norm: QkNorm | None, angles: Angles | None, cache: LayerCache, slots: Tensor) -> Heads:
        """See `DecoderOps`; writes no pages."""
        kv_heads = cache.k.shape[1]
        heads = qkv.shape[1] - 2 * kv_heads
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if norm is not None:
            qk = norm(qk[:, :heads], qk[:, heads:])
        if angles is not None:
            qk = self.rotate(qk, angles)
        return Heads(q=qk[:, :heads], k=qk[:, heads:], v=v, is_written=False)

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Applies the rotary embedding to [tokens, heads, dim], possibly in place."""
        return rotate(x, angles)
