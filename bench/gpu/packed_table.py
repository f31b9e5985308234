"""Times linears with packed weights, by format, and adapters, as `kernel_table` times other kernels."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bench.gpu.bounds import Figure
from bench.gpu.kernel_table import KernelCase, Tensors, figures_of
from bench.gpu.steps import Bench
from phalanx_api.roofline import ModelShape
from phalanx_runtime.checkpoint.schemes.tables import E2M1
from phalanx_runtime.model.adapters.products import LinearFactors
from phalanx_runtime.model.ggml.weight import GgmlPart, GgmlWeight
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.packed.pack import pack, pack_codes, pack_ggml
from phalanx_runtime.model.linear.packed.weight import Format, PackedWeight
from phalanx_runtime.rank.step.adapters import adapter_rows

GGUF_KINDS = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q8_0)
MIN_INPUTS = 256
"""Inputs of a block of a K-quant."""
NUM_ADAPTERS, RANK = 8, 16


def packed_figures(bench: Bench) -> Iterator[Figure]:
    """Time and share of the copy rate of each format at batch 1 and at that of kernels, and of adapters."""
    shape, batch = bench.sizes.large_shape, bench.sizes.compared_batch
    make = Tensors(bench.sizes, bench.device)
    with torch.inference_mode():
        yield from figures_of(bench, [adapter_case(make, shape, batch)])
        for name, weight in packed_weights(make, 2 * shape.intermediate, max(shape.hidden, MIN_INPUTS)):
            yield from figures_of(bench, [linear_case(make, name, weight, rows) for rows in (1, batch)])


def linear_case(make: Tensors, name: str, weight: PackedWeight, rows: int) -> KernelCase:
    """Returns the product of random inputs, `rows` of them, with a weight."""
    from phalanx_runtime.model.linear.gpu import PackedTritonLinear

    x = make(rows, weight.inputs)
    moved = float(weight.num_bytes + x.nbytes + rows * weight.outputs * x.itemsize)
    return KernelCase(name=f"linear, {name}, {rows}", work=partial(PackedTritonLinear(weight, None), x), num_bytes=moved)


def packed_weights(make: Tensors, outputs: int, inputs: int) -> Iterator[tuple[str, PackedWeight]]:
    """Yields a random weight in each format: of `spec.engine.quantization`, of checkpoints, of GGUF files."""
    kinds: tuple[Format, ...] = get_args(Format)
    for kind in kinds:
        yield kind, pack(make(outputs, inputs), kind)
    for name, codes in _codes(make, outputs, inputs):
        packed = pack_codes(codes)
        assert packed is not None
        yield name, packed
    for ggml in GGUF_KINDS:
        size, num_bytes = GGML_QUANT_SIZES[ggml]
        raw = torch.full((outputs, inputs // size * num_bytes), 0x11, dtype=torch.uint8, device=make.device)  # finite scales
        yield ggml.name, pack_ggml(GgmlWeight(parts=(GgmlPart(ggml, raw),), inputs=inputs, dtype=make.dtype))


def _codes(make: Tensors, outputs: int, inputs: int) -> Iterator[tuple[str, IntWeight]]:
    """Yields random codes by scheme."""

    def codes(group: int, dtype: torch.dtype, bits: int = 4) -> IntWeight:
        return IntWeight(
            codes=make.integers(outputs * inputs, 1 << bits, torch.uint8).view(outputs, inputs),
            scales=torch.ones(outputs, -(-inputs // group), device=make.device).to(dtype),
            zeros=None,
            groups=torch.arange(inputs, device=make.device) // group,
            bits=bits,
            dtype=make.dtype,
        )

    e2m1 = torch.tensor(E2M1, device=make.device)
    yield "W8A16", codes(inputs, torch.bfloat16, 8)
    yield "W4A16", codes(128, torch.bfloat16)
    awq = codes(128, torch.float16)
    yield "AWQ", replace(awq, zeros=torch.full_like(awq.scales, 7, dtype=torch.uint8))
    yield "MXFP4", replace(codes(32, torch.float8_e8m0fnu), table=e2m1)
    yield "NVFP4", replace(codes(16, torch.float8_e4m3fn), table=e2m1, factors=torch.ones(outputs, device=make.device))
    yield "nf4", replace(codes(64, torch.float32), table=e2m1 / 6)


def adapter_case(make: Tensors, shape: ModelShape, rows: int) -> KernelCase:
    """Returns what adapters add to the output linear of attention: each of `NUM_ADAPTERS` for as many rows."""
    from phalanx_runtime.model.adapters.gpu import TritonProducts

    count = min(rows, NUM_ADAPTERS)
    a, b = make(count, RANK, shape.heads * shape.head_dim), make(count, RANK, shape.hidden)
    ranks = torch.full((count,), RANK, device=make.device)
    slots = [1 + row % count for row in range(rows)]
    step = adapter_rows(slots, [1] * rows, lambda arrays: [torch.from_numpy(array).to(make.device) for array in arrays])
    assert step is not None
    x, y = make(rows, a.shape[2]), make(rows, shape.hidden)
    products = TritonProducts([LinearFactors(a=a, b=b, ranks=ranks, outputs=slice(0, shape.hidden))])
    moved = float(a.nbytes + b.nbytes + x.nbytes + 2 * y.nbytes)
    add = partial(products.add, y, x, step, alternates=False)
    return KernelCase(name=f"adapters, {rows} rows on {count}", work=add, num_bytes=moved)
