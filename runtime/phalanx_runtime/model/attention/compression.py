"""Launches of `compress_heads`: a step for compressed pages. Reference: `paged.transform` and `write_pages`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.attention.page_format import (
    FORMAT_NUMBERS,
    FORMATS,
    PageFormat,
    hadamard_size,
    num_groups,
)
from phalanx_runtime.model.attention.page_kernels import compress_heads
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.kernels.sizes import power_of_two
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, pointer, variant_of
from phalanx_runtime.model.operators import operator

TILE = 1024
"""Elements of a program."""
NUM_WARPS = 2


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """What precedes the transform of queries and keys."""

    cos: Tensor | None = None
    """[tokens, ..., rotated dimensions]."""
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    """[dim]: weight of a norm of each query."""
    k_norm: Tensor | None = None
    eps: float = 0.0


NO_STEPS = HeadSteps()


def compress_constants(dim: int, rotated: int, format: PageFormat, *, has_norm: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of `compress_heads`. `rotated`: dimensions of a head that rotate."""
    padded = power_of_two(dim)
    return {
        "DIM": dim,
        "DIM_PADDED": padded,
        "HALF": rotated // 2,
        "BLOCK_HEADS": max(1, TILE // padded),
        "STAGES": hadamard_size(dim).bit_length() - 1,
        "FORMAT": FORMAT_NUMBERS[format],
        "GROUPS": num_groups(dim) if format.name == "int4" else 1,
        "HAS_ROTARY": rotated > 0,
        "HAS_NORM": has_norm,
    }


@operator(
    "compress_heads(Tensor qk, Tensor v, Tensor(a!) out, Tensor(b!)[] pages, Tensor slots, Tensor? cos, Tensor? sin, "
    "Tensor? q_norm, Tensor? k_norm, float eps, str format)"
)
def _compress_heads(
    qk: Tensor,
    v: Tensor,
    out: Tensor,
    pages: Sequence[Tensor],
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    format: str,
) -> None:
    """`pages`: keys, values, their scales."""
    tokens, kv_heads, dim = v.shape
    heads, rotated = qk.shape[1] - kv_heads, 0 if cos is None else cos.shape[-1]
    constants = compress_constants(dim, rotated, FORMATS[format], has_norm=q_norm is not None)
    query_blocks, key_blocks = (-(-count // constants["BLOCK_HEADS"]) for count in (heads, kv_heads))
    arguments = {
        "qk": qk,
        "v": v,
        "out": out,
        **dict(zip(("k_codes", "v_codes", "k_scales", "v_scales"), pages, strict=True)),
        "slots": slots,
        "cos": qk if cos is None else cos,
        "sin": qk if sin is None else sin,
        "q_norm": qk if q_norm is None else q_norm,
        "k_norm": qk if k_norm is None else k_norm,
        "eps": eps,
        "factor": _factor(dim, qk.dtype),
        "qk_stride": qk.stride(0),
        "v_stride": v.stride(0),
        "heads": heads,
        "kv_heads": kv_heads,
        "query_blocks": query_blocks,
        **constants,
    }
    launch(compress_heads, (tokens, query_blocks + key_blocks), arguments, num_warps=NUM_WARPS)


def _factor(dim: int, dtype: torch.dtype) -> float:
    """Returns an element of the Hadamard matrix in the dtype, as the reference multiplies with it."""
    fraction, exponent = math.frexp(hadamard_size(dim) ** -0.5)
    steps = 1 / torch.finfo(dtype).eps
    return math.ldexp(round(fraction * 2 * steps) / (2 * steps), exponent)


def compress_variant(
    dim: int,
    dtype: torch.dtype,
    weight: torch.dtype | None,
    format: PageFormat,
    *,
    rotated: int,
    qk_stride: int,
    v_stride: int,
    v_offset: int,
) -> KernelVariant:
    """Returns the variant of a projection whose values start at `v_offset`.

    `weight`: dtype of the norms of heads, if they have norms.
    """
    arguments = {
        **dict.fromkeys(("qk", "out", "cos", "sin"), dtype),
        "v": pointer(dtype, v_offset),
        **dict.fromkeys(("k_codes", "v_codes"), format.dtype),
        **dict.fromkeys(("k_scales", "v_scales"), torch.bfloat16),
        **dict.fromkeys(("q_norm", "k_norm"), dtype if weight is None else weight),
        "slots": torch.int64,
        **dict.fromkeys(("eps", "factor"), 0.5),
        "qk_stride": qk_stride,
        "v_stride": v_stride,
        **dict.fromkeys(("heads", "kv_heads", "query_blocks"), 1),
        **compress_constants(dim, rotated, format, has_norm=weight is not None),
    }
    return variant_of(compress_heads, arguments, num_warps=NUM_WARPS)


def can_compress(qk: Tensor, v: Tensor) -> bool:
    """Returns whether the kernel supports the layout: heads of a token are contiguous."""
    dim = v.shape[2]
    return dim <= TILE and all(part.stride()[1:] == (dim, 1) for part in (qk, v))


def compress(qk: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, steps: HeadSteps) -> Tensor:
    """Writes keys and values to the pages and returns queries and keys as the pages' format stores keys, contiguous.

    qk: [tokens, heads + kv_heads, dim]; v: [tokens, kv_heads, dim]; `slots`: as in `StepBatch`, below 0 for rows to skip.
    """
    assert cache.format is not None, "pages in the dtype of the weights need no codes"
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    _compress_heads(
        qk=qk,
        v=v,
        out=out,
        pages=list(cache.tensors),
        slots=slots,
        cos=steps.cos,
        sin=steps.sin,
        q_norm=steps.q_norm,
        k_norm=steps.k_norm,
        eps=steps.eps,
        format=cache.format.name,
    )
    return out
