"""Launches of what writes compressed pages, calibrated or not, and of what transforms attention's result back.

References: `paged.transform`, `write_pages` and `PagedAttention`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.attention.feedback import MARGINS, Feedback
from phalanx_runtime.model.attention.page_format import (
    FORMAT_NUMBERS,
    FORMATS,
    PageFormat,
    hadamard_size,
    num_groups,
)
from phalanx_runtime.model.attention.page_kernels import compress_heads, round_in_turn
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.attention.triton_kernels import restore_heads
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, pointer, power_of_two, variant_of
from phalanx_runtime.model.operators import operator

TILE = 1024
"""Elements of a program."""
NUM_WARPS = 2
FEEDBACK_WARPS = 4
"""Of `round_in_turn`."""


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


def compress_constants(
    dim: int, rotated: int, format: PageFormat, *, has_norm: bool, is_calibrated: bool = False
) -> dict[str, Any]:
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
        "IS_CALIBRATED": is_calibrated,
    }


def feedback_constants(dim: int, format: PageFormat) -> dict[str, Any]:
    """Returns the compile-time arguments of `round_in_turn`."""
    padded, margins = power_of_two(dim), MARGINS[format.name]
    trials = power_of_two(len(margins))
    return {
        "DIM": dim,
        "DIM_PADDED": padded,
        "FORMAT": FORMAT_NUMBERS[format],
        "GROUPS": num_groups(dim) if format.name == "int4" else 1,
        "TOKENS": max(1, TILE // padded // trials),
        "TRIALS": len(margins),
        "TRIALS_PADDED": trials,
        "MARGIN": margins[1] if len(margins) > 1 else 0.0,
    }


def restore_constants(dim: int, group: int) -> dict[str, int]:
    """Returns the compile-time arguments of `restore_heads`. group: query heads of a KV head."""
    padded = power_of_two(dim)
    stages = hadamard_size(dim).bit_length() - 1
    return {"DIM": dim, "DIM_PADDED": padded, "BLOCK_HEADS": max(1, TILE // padded), "STAGES": stages, "GROUP": group}


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
    """`pages`: keys, values, their scales. `out` has room for values if these are transformed too."""
    tokens, kv_heads, dim = v.shape
    heads, rotated = qk.shape[1] - kv_heads, 0 if cos is None else cos.shape[-1]
    is_calibrated = out.shape[1] > qk.shape[1]
    constants = compress_constants(dim, rotated, FORMATS[format], has_norm=q_norm is not None, is_calibrated=is_calibrated)
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


@operator("round_in_turn(Tensor x, Tensor(a!)[] pages, Tensor slots, Tensor[] keys, Tensor[] values, str format)")
def _round_in_turn(
    x: Tensor, pages: Sequence[Tensor], slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], format: str
) -> None:
    """x: [tokens, 2 * kv_heads, dim]; `keys`, `values`: shift, order, triangle and weights."""
    tokens, heads, dim = x.shape
    constants = feedback_constants(dim, FORMATS[format])
    arguments = {
        "x": x,
        **dict(zip(("k_codes", "v_codes", "k_scales", "v_scales"), pages, strict=True)),
        "slots": slots,
        **dict(zip(_FEEDBACK_NAMES, (*keys, *values), strict=True)),
        "tokens": tokens,
        "kv_heads": heads // 2,
        "stride": x.stride(0),
        **constants,
    }
    launch(round_in_turn, (num_blocks(tokens, constants["TOKENS"]), heads), arguments, num_warps=FEEDBACK_WARPS)


_FEEDBACK_NAMES = tuple(f"{part}_{name}" for part in "kv" for name in ("shift", "order", "triangle", "weights"))


@operator("restore_heads(Tensor(a!) x, Tensor shift)")
def _restore_heads(x: Tensor, shift: Tensor) -> None:
    tokens, heads, dim = x.shape
    constants = restore_constants(dim, heads // len(shift))
    arguments = {"x": x, "shift": shift, "factor": _factor(dim, x.dtype), "heads": heads, **constants}
    launch(restore_heads, (tokens, num_blocks(heads, constants["BLOCK_HEADS"])), arguments, num_warps=NUM_WARPS)


def restore(out: Tensor, shift: Tensor) -> None:
    """Turns attention's result over calibrated pages, [tokens, heads, dim] and contiguous, into the dimensions of the values that
    were given, in place. shift: of values, [kv_heads, dim]."""
    _restore_heads(x=out, shift=shift)


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
    is_calibrated: bool = False,
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
        **compress_constants(dim, rotated, format, has_norm=weight is not None, is_calibrated=is_calibrated),
    }
    return variant_of(compress_heads, arguments, num_warps=NUM_WARPS)


def calibrated_variants(dim: int, dtype: torch.dtype, format: PageFormat, *, heads: int, kv_heads: int) -> list[KernelVariant]:
    """Returns the variants that calibrated pages need beside those of others."""
    tables = {"shift": torch.float32, "order": torch.int64, "triangle": torch.float32, "weights": torch.float32}
    rounding = {
        "x": pointer(dtype, heads * dim),
        **dict.fromkeys(("k_codes", "v_codes"), format.dtype),
        **dict.fromkeys(("k_scales", "v_scales"), torch.bfloat16),
        "slots": torch.int64,
        **{f"{part}_{name}": kind for part in "kv" for name, kind in tables.items()},
        **dict.fromkeys(("tokens", "kv_heads"), 1),
        "stride": (heads + 2 * kv_heads) * dim,
        **feedback_constants(dim, format),
    }
    restoring = {"x": dtype, "shift": torch.float32, "factor": 0.5, "heads": 1, **restore_constants(dim, heads // kv_heads)}
    return [
        variant_of(round_in_turn, rounding, num_warps=FEEDBACK_WARPS),
        variant_of(restore_heads, restoring, num_warps=NUM_WARPS),
    ]


def can_compress(qk: Tensor, v: Tensor) -> bool:
    """Returns whether the kernel supports the layout: heads of a token are contiguous."""
    dim = v.shape[2]
    return dim <= TILE and all(part.stride()[1:] == (dim, 1) for part in (qk, v))


def compress(qk: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, steps: HeadSteps) -> Tensor:
    """Writes keys and values to the pages and returns queries and keys as the pages' format stores keys, contiguous.

    qk: [tokens, heads + kv_heads, dim]; v: [tokens, kv_heads, dim]; `slots`: as in `StepBatch`, below 0 for rows to skip. With a
    calibration the result also has the values, transformed, after the keys.
    """
    assert cache.format is not None, "pages in the dtype of the weights need no codes"
    (tokens, rows, dim), kv_heads, rounding = qk.shape, v.shape[1], cache.rounding
    out = torch.empty((tokens, rows + (0 if rounding is None else kv_heads), dim), dtype=qk.dtype, device=qk.device)
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
    if rounding is not None:
        _round_in_turn(
            x=out[:, rows - kv_heads :],
            pages=list(cache.tensors),
            slots=slots,
            keys=_tables(rounding.keys),
            values=_tables(rounding.values),
            format=cache.format.name,
        )
    return out


def _tables(feedback: Feedback) -> list[Tensor]:
    return [feedback.shift, feedback.order, feedback.triangle, feedback.weights]
