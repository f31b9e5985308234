"""Variants of the kernels of quantised linears for the compile gate: tuned tiles of an architecture, and few rows."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from triton.backends.compiler import GPUTarget

from phalanx_runtime.model.adapters.gpu import adapter_variants
from phalanx_runtime.model.ggml.weight import GgmlPart, GgmlWeight
from phalanx_runtime.model.kernels.variant import ALIGNMENT, variant_of
from phalanx_runtime.model.linear.gpu import TILES, LinearTile, PackedRows, constants_of, row_constants, tile_constants
from phalanx_runtime.model.linear.packed.pack import pack, pack_ggml
from phalanx_runtime.model.linear.packed.weight import GGML, Fp8Weight, PackedWeight
from phalanx_runtime.model.linear.scaled import BLOCK_WORDS
from phalanx_runtime.model.linear.single_row import GATES, MAX_NARROW, row_variant
from phalanx_runtime.model.linear.triton_kernels import multiply_rows, multiply_tiles
from phalanx_runtime.model.linear.triton_rows import quantize_rows
from tests.runtime.model.gpu.ahead import Named

_TYPES = {
    **{"x": "*bf16", "words": "*i32", "scales": "*fp32", "bias": "*bf16", "y": "*bf16"},
    **dict.fromkeys(("num_rows", "outputs", "inputs", "num_groups", "x_stride", "word_stride", "y_stride"), "i32"),
}
ALIGNED = ("x_stride", "word_stride", "y_stride", "inputs")
_PARTIAL = {"partial": "*fp32", "arrivals": "*i32"}


def linear_costs(target: GPUTarget) -> Iterator[Named]:
    """Yields `multiply_rows` and `multiply_tiles`: int4 of two kinds, int8, fp8 in blocks of 128 inputs, and formats of GGUF."""
    tiles = TILES[int(target.arch) // 10 if target.backend == "cuda" else 9]
    small, *larger = tiles.values()
    weights = _weights()
    few = {"int4": (1, 2), "int8": (1, 4), "fp8": (4,), "q8_0": (4,), "q4_k": (1,)}
    few |= dict.fromkeys(("float16_int4", "nvfp4", "table4"), (2,))
    for name, most in [(name, most) for name, counts in few.items() for most in counts]:
        weight = weights[name]
        yield _variant(f"linear row {name} {most}", multiply_rows, weight, row_constants(most, weight.width), num_warps=4)
    for name in GGML:
        yield _variant(f"linear row {name} 2", multiply_rows, weights[name], row_constants(2, 16), num_warps=4)
        yield _tile(name, weights[name], larger[-1], splits=1)
        yield f"linear read {name}", PackedRows(weights[name], torch.bfloat16).variants(torch.bfloat16, add=False)[0]
    for name in ("int4", "float16_int4", "nvfp4", "table4", "fp8", "q4_k", "q6_k", "iq4_xs"):
        for tile in tiles.values():
            yield _tile(name, weights[name], tile, splits=1 if tile == larger[-1] else 4)
    yield _tile("int8", weights["int8"], larger[-1], splits=1)
    yield _tile("int8", weights["int8"], small, splits=1, dtype="fp32")
    types = {"x": "*bf16", "words": "*i32", "scales": "*fp32", **dict.fromkeys(("inputs", "x_stride", "word_stride"), "i32")}
    constants = {"WIDTH": weights["fp8"].width, "BLOCK_WORDS": BLOCK_WORDS}
    yield "linear quantize", variant_of(quantize_rows, {**_arguments(types), **constants}, num_warps=8)


def single_row_costs() -> Iterator[Named]:
    """Yields `multiply_row` for each tile, with a norm where layers have one, for Triton's current target."""
    for inputs in (MAX_NARROW, 4 * MAX_NARROW):
        for form in ("", "add", *GATES):
            norm = None if form == "add" else torch.bfloat16
            yield f"linear single {form} {inputs}", row_variant(inputs, torch.bfloat16, norm, has_bias=True, form=form)


def adapter_costs() -> Iterator[Named]:
    """Yields the kernels of adapters, in bf16 and in fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from ((f"adapters {variant.name} {dtype}", variant) for variant in adapter_variants(dtype))


def _arguments(types: Mapping[str, str]) -> dict[str, torch.dtype | int]:
    """Returns an argument of each type; `ALIGNED` integers are multiples of 16 in each supported model."""
    dtypes = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*i32": torch.int32}
    return {name: dtypes.get(kind, ALIGNMENT if name in ALIGNED else ALIGNMENT + 1) for name, kind in types.items()}


def _weights() -> Mapping[str, PackedWeight]:
    weight = torch.zeros(1, 256)
    blocks = Fp8Weight(values=weight.to(torch.float8_e4m3fn), scales=torch.ones(1, 2), group=128, dtype=torch.bfloat16)
    int4 = pack(weight, "int4")
    codes, nvfp4 = replace(int4, format="float16_int4"), replace(int4, format="nvfp4", group=16)
    table4 = replace(int4, format="table4", group=64)
    ggml: dict[str, PackedWeight] = {name: _blocks(GGMLQuantizationType[name.upper()]) for name in GGML}
    rounded = {"int4": int4, "int8": pack(weight, "int8"), "fp8": pack(blocks, "fp8")}
    return {**rounded, "float16_int4": codes, "nvfp4": nvfp4, "table4": table4, **ggml}


def _blocks(kind: GGMLQuantizationType) -> PackedWeight:
    size, num_bytes = GGML_QUANT_SIZES[kind]
    part = GgmlPart(kind, torch.zeros(1, 512 // size * num_bytes, dtype=torch.uint8))
    return pack_ggml(GgmlWeight(parts=(part,), inputs=512, dtype=torch.bfloat16))


def _tile(name: str, weight: PackedWeight, tile: LinearTile, *, splits: int, dtype: str = "bf16") -> Named:
    label = f"linear tile {name} {tile.block_outputs}x{tile.block_rows}"
    if dtype == "fp32":
        return _variant(f"linear {dtype} {name}", multiply_tiles, weight, tile_constants(tile, splits), num_warps=4, dtype=dtype)
    constants = tile_constants(tile, splits)
    return _variant(label, multiply_tiles, weight, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _variant(
    name: str,
    kernel: Any,
    weight: PackedWeight,
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    num_stages: int = 1,
    dtype: str = "bf16",
) -> Named:
    types = dict(_TYPES)
    if kernel is multiply_tiles:  # before the sizes, as in the kernel
        types = {key: types[key] for key in ("x", "words", "scales", "bias", "y")} | _PARTIAL | types
    types |= {key: f"*{dtype}" for key in ("x", "bias", "y")}
    types["scales"] = "*i32" if weight.layout.scale_dtype == torch.int32 else "*fp32"
    arguments = {**_arguments(types), **constants, **constants_of(weight, has_bias=True, add=True)}
    return name, variant_of(kernel, arguments, num_warps=num_warps, num_stages=num_stages)
