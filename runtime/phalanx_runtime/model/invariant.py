"""Conditions of batch invariance: a token's bits depend neither on the rest of its step nor on how its request was computed.

    linears     CPU kernels: each sum runs over the inputs in order, for any rows, threads and blocks
    attention   CPU kernel with `is_fixed`: blocks of keys at fixed positions, no splits
    the rest    row by row: norms, rotation, embedding; sums over ranks in rank order

Chunked prefill, a recomputed prefix, another batch and a step with a chain of draft tokens then give equal bits. A tree does not:
its tokens occupy other slots, and keys are summed in slot order.
"""

import torch

from phalanx_runtime.model.attention.cpu import attends
from phalanx_runtime.model.decoder.cpu import NativeSteps
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.protocol import Model


def why_not(model: Model, dtype: torch.dtype, page_size: int) -> str:
    """Returns the reason why this model's computation is not batch-invariant; empty when it is."""
    made = library()
    if made is None or not made.has_runs:
        return "this processor has no AVX512-BF16, which the batch-invariant CPU kernels need"
    if not isinstance(model, Decoder):
        return "only models of the fused decoder are batch-invariant"
    size = model.config.head_dim
    if not attends(made, page_size, size, dtype):
        needs = "bf16, heads of a multiple of 32, pages of a multiple of 16 tokens"
        return f"the attention kernel needs {needs}; this model has {dtype}, {size}, {page_size}"
    if not isinstance(model.steps, NativeSteps) or model.config.logit_softcap is not None:
        return "torch computes its norms or its logit softcap"
    for layer in model.layers:
        if layer.qk_norm is not None or not isinstance(layer.gate_up, NativeGated):
            return "torch computes its query and key norms or its activation"
        if not all(isinstance(linear, NativeLinear) for linear in (layer.qkv, layer.o, layer.down)):
            return "its linears have no CPU kernel"
    return "" if not hasattr(model, "head") or isinstance(model.head, NativeLinear) else "its head has no CPU kernel"
