"""What has to be so that a token's bits do not depend on what else is in its step, nor on how its request came to be computed.

    linears     compiled: each sum goes over the inputs in order, whatever rows, threads and blocks there are
    attention   compiled, with every run taken the same way: blocks of keys from fixed places, no splits (`is_fixed`)
    the rest    by rows: norms, rotation, embedding; sums over ranks in their order

Then a prompt in chunks, a recomputed prefix, another batch and a step with a chain of proposals give the same bits. A tree does
not: its tokens lie in other slots, and keys are summed up in the order of their slots.
"""

import torch

from phalanx_runtime.model.attention.cpu import attends
from phalanx_runtime.model.decoder.cpu import NativeSteps
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.protocol import Model


def why_not(model: Model, dtype: torch.dtype, page_size: int) -> str:
    """What of this model's computation depends on the rest of a step; empty when nothing does."""
    made = library()
    if made is None or not made.has_runs:
        return "this processor has no compiled kernels that multiply pairs of bf16 (AVX512-BF16)"
    if not isinstance(model, Decoder):
        return "only models that the fused decoder computes have them"
    size = model.config.head_dim
    if not attends(made, page_size, size, dtype):
        needs = "bf16, heads of a multiple of 32, pages of a multiple of 16 tokens"
        return f"attention is compiled for {needs}, and here are {dtype}, {size}, {page_size}"
    if not isinstance(model.steps, NativeSteps) or model.config.logit_softcap is not None:
        return "its norms or its scores are left to torch"
    for layer in model.layers:
        if layer.qk_norm is not None or not isinstance(layer.gate_up, NativeGated):
            return "norms of its queries and keys, or its activation, are left to torch"
        if not all(isinstance(linear, NativeLinear) for linear in (layer.qkv, layer.o, layer.down)):
            return "its linears are not compiled"
    return "" if not hasattr(model, "head") or isinstance(model.head, NativeLinear) else "its head is not compiled"
