"""`DecoderOps` by Triton kernels: launches and the backend. `TorchOps` computes what they exclude."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.attention.compression import HeadSteps, compress
from phalanx_runtime.model.attention.gpu import can_attend
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.decoder import triton_kernels as kernels
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, pointer, power_of_two, variant_of
from phalanx_runtime.model.layers import HeadNorm, Heads, QkNorm, TorchOps
from phalanx_runtime.model.operators import operator
from phalanx_runtime.model.rope import Angles

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_ROW_BYTES = 32768
"""Widest row of a norm, half of it with two norms: a program holds the row in registers."""
GATE_BLOCK = 2048
"""Columns of a program of `gate`."""
GATE_WARPS = 4
HEADS_TILE = 1024
"""Elements of a program of `prepare_heads`."""
HEADS_WARPS = 2
MAX_PARTS = 8
"""Ranks of `add_parts_norm`."""


@cache
def norm_constants(size: int, *, has_sum: bool, has_after: bool, has_before: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of `add_norm`."""
    return {
        "SIZE_PADDED": power_of_two(size),
        "HAS_SUM": has_sum,
        "HAS_AFTER": has_after,
        "HAS_BEFORE": has_before,
    }


@cache
def norm_warps(size: int) -> int:
    """Returns the warps of a norm, for 16 elements per thread up to 16 warps."""
    return min(16, max(1, power_of_two(size) // 512))


@cache
def gate_constants(size: int, activation: Activation) -> dict[str, Any]:
    """Returns the compile-time arguments of `gate`. `size`: columns of its result."""
    return {"BLOCK": min(GATE_BLOCK, power_of_two(size)), "IS_SILU": activation == "silu"}


@cache
def heads_constants(dim: int, rotated: int, has_norm: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of `prepare_heads`. `rotated`: dimensions of a head that rotate."""
    half = rotated // 2 if rotated else dim // 2
    padded = power_of_two(dim)
    return {
        "DIM": dim,
        "DIM_PADDED": padded,
        "HALF": half,
        "HALF_PADDED": power_of_two(half),
        "REST_PADDED": power_of_two(max(1, dim - 2 * half)),
        "BLOCK_HEADS": max(1, HEADS_TILE // padded),
        "HAS_ROTARY": rotated > 0,
        "HAS_NORM": has_norm,
    }


@operator("add_norm(Tensor(a!) x, Tensor? y, Tensor? after, Tensor? before, Tensor(b!)? out, float eps)")
def _add_norm(x: Tensor, y: Tensor | None, after: Tensor | None, before: Tensor | None, out: Tensor | None, eps: float) -> None:
    rows, size = x.shape
    arguments = {
        "x": x,
        "y": x if y is None else y,
        "after": x if after is None else after,
        "before": x if before is None else before,
        "out": x if out is None else out,
        "eps": eps,
        "x_stride": x.stride(0),
        "y_stride": x.stride(0) if y is None else y.stride(0),
        "size": size,
        **norm_constants(size, has_sum=y is not None, has_after=after is not None, has_before=before is not None),
    }
    launch(kernels.add_norm, (rows,), arguments, num_warps=norm_warps(size))


def norm_variant(
    size: int, dtype: torch.dtype, weight: torch.dtype, *, has_sum: bool, has_after: bool, has_before: bool
) -> KernelVariant:
    """Returns the variant of contiguous rows of `size`. `weight`: dtype of the norms' weights."""
    arguments = {
        "x": dtype,
        "y": dtype,
        "after": weight if has_after else dtype,
        "before": weight if has_before else dtype,
        "out": dtype,
        "eps": 0.0,
        **dict.fromkeys(("x_stride", "y_stride", "size"), size),
        **norm_constants(size, has_sum=has_sum, has_after=has_after, has_before=has_before),
    }
    return variant_of(kernels.add_norm, arguments, num_warps=norm_warps(size))


def parts_constants(size: int, parts: int, *, has_after: bool, has_before: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of `add_parts_norm`."""
    return {
        "SIZE": size,
        "SIZE_PADDED": power_of_two(size),
        "PARTS": parts,
        "HAS_AFTER": has_after,
        "HAS_BEFORE": has_before,
    }


@operator("add_parts_norm(Tensor(a!) x, Tensor[] parts, Tensor? after, Tensor? before, Tensor(b!)? out, float eps)")
def _add_parts_norm(
    x: Tensor, parts: Sequence[Tensor], after: Tensor | None, before: Tensor | None, out: Tensor | None, eps: float
) -> None:
    size = x.shape[1]
    padded = [*parts, *[parts[0]] * (MAX_PARTS - len(parts))]
    arguments = {
        "x": x,
        **{f"part_{rank}": part for rank, part in enumerate(padded)},
        "after": x if after is None else after,
        "before": x if before is None else before,
        "out": x if out is None else out,
        "eps": eps,
        "x_stride": x.stride(0),
        **parts_constants(size, len(parts), has_after=after is not None, has_before=before is not None),
    }
    launch(kernels.add_parts_norm, (len(x),), arguments, num_warps=norm_warps(size))


def parts_variant(size: int, dtype: torch.dtype, weight: torch.dtype, *, parts: int) -> KernelVariant:
    """Returns the variant of contiguous rows of `size` and of this number of parts. `weight`: dtype of the norm's weight."""
    arguments = {
        **dict.fromkeys(("x", *(f"part_{rank}" for rank in range(MAX_PARTS)), "after", "out"), dtype),
        "before": weight,
        "eps": 0.0,
        "x_stride": size,
        **parts_constants(size, parts, has_after=False, has_before=True),
    }
    return variant_of(kernels.add_parts_norm, arguments, num_warps=norm_warps(size))


@operator("gate(Tensor gate_up, Tensor(a!) out, bool is_silu)")
def _gate(gate_up: Tensor, out: Tensor, is_silu: bool) -> None:
    rows, size = out.shape
    constants = gate_constants(size, "silu" if is_silu else "gelu_tanh")
    arguments = {"gate_up": gate_up, "out": out, "row_stride": gate_up.stride(0), "size": size, **constants}
    launch(kernels.gate, (rows, num_blocks(size, constants["BLOCK"])), arguments, num_warps=GATE_WARPS)


def gate_variant(size: int, dtype: torch.dtype, activation: Activation) -> KernelVariant:
    """Returns the variant of contiguous rows. `size`: columns of its result."""
    arguments = {"gate_up": dtype, "out": dtype, "row_stride": 2 * size, "size": size, **gate_constants(size, activation)}
    return variant_of(kernels.gate, arguments, num_warps=GATE_WARPS)


@operator(
    "prepare_heads(Tensor(a!) qk, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots, "
    "Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, float eps)"
)
def _prepare_heads(
    qk: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    tokens, kv_heads, dim = v.shape
    heads, rotated = qk.shape[1] - kv_heads, 0 if cos is None else cos.shape[-1]
    constants = heads_constants(dim, rotated, q_norm is not None)
    block = constants["BLOCK_HEADS"]
    query_blocks = -(-heads // block) if rotated or q_norm is not None else 0
    arguments = {
        "qk": qk,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slots": slots,
        "cos": qk if cos is None else cos,
        "sin": qk if sin is None else sin,
        "q_norm": qk if q_norm is None else q_norm,
        "k_norm": qk if k_norm is None else k_norm,
        "eps": eps,
        "qk_stride": qk.stride(0),
        "v_stride": v.stride(0),
        "heads": heads,
        "kv_heads": kv_heads,
        "query_blocks": query_blocks,
        **constants,
    }
    launch(kernels.prepare_heads, (tokens, query_blocks + -(-kv_heads // block)), arguments, num_warps=HEADS_WARPS)


def heads_variant(
    dim: int, dtype: torch.dtype, weight: torch.dtype | None, *, rotated: int, qk_stride: int, v_stride: int, v_offset: int
) -> KernelVariant:
    """Returns the variant of a projection whose values start at `v_offset`.

    `weight`: dtype of the norms of heads, if they have norms.
    """
    norm = dtype if weight is None else weight
    arguments = {
        **dict.fromkeys(("qk", "k_cache", "v_cache", "cos", "sin"), dtype),
        "v": pointer(dtype, v_offset),
        **dict.fromkeys(("q_norm", "k_norm"), norm),
        "slots": torch.int64,
        "eps": 0.0,
        "qk_stride": qk_stride,
        "v_stride": v_stride,
        **dict.fromkeys(("heads", "kv_heads", "query_blocks"), 1),
        **heads_constants(dim, rotated, weight is not None),
    }
    return variant_of(kernels.prepare_heads, arguments, num_warps=HEADS_WARPS)


class TritonOps(TorchOps):
    """`DecoderOps` by the kernels; float64, wide rows and unusual layouts use torch."""

    __slots__ = ("num_launched",)

    def __init__(self) -> None:
        self.num_launched = 0
        """Kernels launched."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps`."""
        if not _are_rows(x, weight) or not can_hold(x.shape[1], x.dtype, False):
            return super().norm(x, weight, eps)
        self.num_launched += 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _add_norm(x=x, y=None, after=None, before=weight, out=out, eps=eps)
        return out

    def add_norm(self, x: Tensor, y: Tensor, after: Tensor | None, before: Tensor | None, eps: float) -> Tensor:
        """See `DecoderOps`."""
        is_supported = x.dtype == y.dtype and _are_rows(x, after, before) and _are_rows(y)
        if not is_supported or not can_hold(x.shape[1], x.dtype, after is not None):
            return super().add_norm(x, y, after, before, eps)
        self.num_launched += 1
        out = None if before is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _add_norm(x=x, y=y, after=after, before=before, out=out, eps=eps)
        return x if out is None else out

    def can_add_parts(self, x: Tensor, after: Tensor | None, before: Tensor | None) -> bool:
        """See `one_shot.PartsOps`."""
        return _are_rows(x, after, before) and can_hold(x.shape[1], x.dtype, True)

    def add_parts_norm(self, x: Tensor, parts: list[Tensor], after: Tensor | None, before: Tensor | None, eps: float) -> Tensor:
        """See `one_shot.PartsOps`. parts: [rows, hidden] each, 2 to `MAX_PARTS`."""
        self.num_launched += 1
        out = None if before is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _add_parts_norm(x=x, parts=parts, after=after, before=before, out=out, eps=eps)
        return x if out is None else out

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `DecoderOps`."""
        if activation == "swigluoai" or gate_up.dtype not in DTYPES or gate_up.dim() != 2 or gate_up.stride(1) != 1:
            return super().gate(gate_up, activation)
        self.num_launched += 1
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
        _gate(gate_up=gate_up, out=out, is_silu=activation == "silu")
        return out

    def prepare_heads(self, qkv: Tensor, norm: QkNorm | None, angles: Angles | None, cache: LayerCache, slots: Tensor) -> Heads:
        """See `DecoderOps`; writes the pages, and without a format in place. A norm over all heads precedes the kernel."""
        if not _can_prepare(qkv, norm, angles, cache):
            return super().prepare_heads(qkv, norm, angles, cache, slots)
        kv_heads = cache.k.shape[1]
        heads = qkv.shape[1] - 2 * kv_heads
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        per_head = norm if isinstance(norm, HeadNorm) else None
        if norm is not None and per_head is None:
            qk = norm(qk[:, :heads], qk[:, heads:])
        self.num_launched += 1
        if cache.format is not None:
            written = compress(qk, v, cache, slots, _head_steps(per_head, angles))
            q, k = written[:, :heads], written[:, heads : heads + kv_heads]
            return Heads(q=q, k=k, v=v if cache.rounding is None else written[:, heads + kv_heads :], is_written=True)
        _prepare_heads(
            qk=qk,
            v=v,
            k_cache=cache.k,
            v_cache=cache.v,
            slots=slots,
            cos=None if angles is None else angles[0],
            sin=None if angles is None else angles[1],
            q_norm=None if per_head is None else per_head.q,
            k_norm=None if per_head is None else per_head.k,
            eps=0.0 if per_head is None else per_head.eps,
        )
        return Heads(q=qk[:, :heads], k=qk[:, heads:], v=v, is_written=True)


def _head_steps(norm: HeadNorm | None, angles: Angles | None) -> HeadSteps:
    cos, sin = (None, None) if angles is None else angles
    if norm is None:
        return HeadSteps(cos, sin)
    return HeadSteps(cos, sin, norm.q, norm.k, norm.eps)


def _are_rows(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether the norm kernel supports x, [rows, hidden], with these weights."""
    if x.dtype not in DTYPES or x.dim() != 2 or x.stride(1) != 1:
        return False
    return all(weight is None or weight.dtype in (x.dtype, torch.float32) for weight in weights)


def can_hold(size: int, dtype: torch.dtype, has_after: bool) -> bool:
    """Returns whether the norm kernel supports rows of this size. `has_after`: with a norm before the sum, or a sum of parts."""
    return size * dtype.itemsize <= MAX_ROW_BYTES // (2 if has_after else 1)


def _can_prepare(qkv: Tensor, norm: QkNorm | None, angles: Angles | None, cache: LayerCache) -> bool:
    """Whether the kernel supports the step."""
    dim = qkv.shape[2]
    if cache.format is not None and not can_attend(dim, qkv.dtype):
        return False  # as the attention decides, whose reference transforms queries itself
    is_known = cache.format is not None or cache.k.dtype == qkv.dtype
    if qkv.dtype not in DTYPES or not is_known or qkv.stride()[1:] != (dim, 1) or dim > HEADS_TILE:
        return False
    if isinstance(norm, HeadNorm) and any(weight.dtype not in (qkv.dtype, torch.float32) for weight in (norm.q, norm.k)):
        return False
    tensors = (*cache.tensors, *(angles or ()))
    return all(tensor.is_contiguous() for tensor in tensors)
