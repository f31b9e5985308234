"""Kernels of mixtures of experts, in the shapes that are compiled ahead."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx_runtime.model.experts.gpu import (
    FEW_ROWS,
    FLOAT32,
    MANY_ROWS,
    ProductTile,
    combine_constants,
    multiply_constants,
    route_constants,
    sort_constants,
)
from phalanx_runtime.model.experts.triton_kernels import combine_experts, multiply_experts, route_experts, sort_pairs
from phalanx_runtime.model.families import Activation
from tests.runtime.model.gpu.ahead import Variant

TILES = {"few": FEW_ROWS, "many": MANY_ROWS}


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A published model."""

    hidden: int
    inner: int
    num_experts: int
    per_token: int
    activation: Activation = "silu"
    has_bias: bool = False


MIXTRAL = MixtureShape(4096, 14336, 8, 2)
QWEN3_30B = MixtureShape(2048, 768, 128, 8)
GPT_OSS_20B = MixtureShape(2880, 2880, 32, 4, activation="swigluoai", has_bias=True)
MULTIPLY_TYPES = {
    **dict.fromkeys(("x", "weight", "bias", "out"), "*bf16"),
    **dict.fromkeys(("pairs", "tile_experts", "num_tiles"), "*i32"),
    "x_stride": "i32",
}


def _multiply(name: str, config: ProductTile, shape: MixtureShape, *, is_gated: bool) -> Variant:
    sizes = (shape.hidden, shape.inner) if is_gated else (shape.inner, shape.hidden)
    return Variant(
        name=name,
        kernel=multiply_experts,
        types={key: kind.replace("bf16", "fp32" if config is FLOAT32 else "bf16") for key, kind in MULTIPLY_TYPES.items()},
        constants=multiply_constants(
            config,
            *sizes,
            pairs_per_row=shape.per_token if is_gated else 1,
            has_bias=shape.has_bias,
            activation=shape.activation if is_gated else None,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def expert_variants() -> Iterator[Variant]:
    """Yields the products of decodes and prefill, routing, sorting and sums."""
    for name, config in TILES.items():
        yield _multiply(f"experts {name} gated", config, QWEN3_30B, is_gated=True)
        yield _multiply(f"experts {name} down", config, QWEN3_30B, is_gated=False)
    yield _multiply("experts many mixtral", MANY_ROWS, MIXTRAL, is_gated=True)
    yield _multiply("experts few gpt-oss", FEW_ROWS, GPT_OSS_20B, is_gated=True)
    yield _multiply("experts many gpt-oss", MANY_ROWS, GPT_OSS_20B, is_gated=True)
    yield _multiply("float32 experts", FLOAT32, QWEN3_30B, is_gated=True)
    constants = route_constants(QWEN3_30B.num_experts, QWEN3_30B.per_token, True)
    types = {"logits": "*bf16", "experts": "*i32", "weights": "*fp32", "logits_stride": "i32"}
    yield Variant(name="route", kernel=route_experts, types=types, constants=constants, num_warps=1)
    constants = sort_constants(1 << 16, QWEN3_30B.num_experts, MANY_ROWS.block_rows)
    types = dict.fromkeys(("experts", "pairs", "tile_experts", "num_tiles"), "*i32") | {"num_pairs": "i32", "first": "i32"}
    yield Variant(name="sort", kernel=sort_pairs, types=types, constants=constants)
    constants = combine_constants(QWEN3_30B.num_experts, QWEN3_30B.hidden, QWEN3_30B.per_token, True)
    types = {"outputs": "*bf16", "experts": "*i32", "weights": "*fp32", "out": "*bf16", "out_stride": "i32", "first": "i32"}
    yield Variant(name="combine", kernel=combine_experts, types=types, constants=constants)
