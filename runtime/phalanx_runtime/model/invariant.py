"""Conditions of batch invariance: logits are bitwise independent of batch, chunked prefill,
recomputation and draft chains.

    linears     CPU kernels: sums over the inputs in order
    attention   CPU kernel with `is_batch_invariant`: key blocks at fixed positions, no splits
    other       row by row; sums over ranks in rank order

Draft trees are excluded: their tokens occupy other slots, and keys are summed in slot order.
"""

import torch

from phalanx_runtime.model.attention.cpu import can_attend
from phalanx_runtime.model.decoder.cpu import NativeOps
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.cpu import BlockedWeight, NativeGated, NativeLinear
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.protocol import Model


def invariance_obstacle(model: Model, dtype: torch.dtype, page_size: int) -> str:
    """Returns the reason why the model is not batch-invariant; empty if it is."""
    kernels = library()
    if kernels is None or not kernels.has_bf16_dot:
        return "this processor has no AVX512-BF16, which the batch-invariant CPU kernels need"
    if not isinstance(model, Decoder):
        return "only models of the fused decoder are batch-invariant"
    size = model.config.head_dim
    if not can_attend(kernels, page_size, size, dtype):
        expected = "bf16, heads of a multiple of 32, pages of a multiple of 16 tokens"
        return f"the attention kernel needs {expected}; this model has {dtype}, {size}, {page_size}"
    if not isinstance(model.ops, NativeOps) or model.config.logit_softcap is not None:
        return "torch computes its norms or its logit softcap"
    if model.config.mixture is not None:
        return "torch routes its experts"
    if model.adapters is not None:
        return "the products of adapters depend on the other adapters of a step"
    if any(_has_codes(linear) for layer in model.layers for linear in (layer.gate_up, layer.qkv, layer.o, layer.down)):
        return "its weights are in codes, and the order of their sums depends on the number of rows of a step"
    for layer in model.layers:
        if layer.qk_norm is not None or not _sums_in_order(layer.gate_up):
            return "torch computes its query and key norms or its activation"
        if not all(_sums_in_order(linear) for linear in (layer.qkv, layer.o, layer.down)):
            return "its linears have no CPU kernel"
    return "" if not hasattr(model, "head") or _sums_in_order(model.head) else "its head has no CPU kernel"


def _has_codes(linear: object) -> bool:
    return isinstance(linear, NativeLinear | NativeGated) and not isinstance(linear.blocks, BlockedWeight)


def _sums_in_order(linear: object) -> bool:
    return isinstance(linear, NativeLinear | NativeGated) and isinstance(linear.blocks, BlockedWeight)
