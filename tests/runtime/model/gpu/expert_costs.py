"""Kernels of mixtures of experts for the compile gate."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from phalanx_runtime.model.experts.gpu import ExpertShape, expert_variants
from phalanx_runtime.model.experts.sparse import ExpertLayouts, Routing
from phalanx_runtime.model.linear.packed.weight import GGML, PackedLayout
from tests.runtime.model.gpu.ahead import Named

MIXTRAL = ExpertShape(
    hidden=4096,
    inner=14336,
    num_experts=8,
    num_local=8,
    routing=Routing(per_token=2, norm_topk_prob=True),
    activation="silu",
    has_bias=False,
)
QWEN3_30B = ExpertShape(
    hidden=2048,
    inner=768,
    num_experts=128,
    num_local=128,
    routing=Routing(per_token=8, norm_topk_prob=True),
    activation="silu",
    has_bias=False,
)
GPT_OSS_20B = ExpertShape(
    hidden=2880,
    inner=2880,
    num_experts=32,
    num_local=32,
    routing=Routing(per_token=4, norm_topk_prob=True),
    activation="swigluoai",
    has_bias=True,
)

LAYOUTS = {
    "mxfp4": PackedLayout("mxfp4", 32, 16),
    "nvfp4": PackedLayout("nvfp4", 16, 16),
    "table4": PackedLayout("table4", 64, 16),
    "float16_int4": PackedLayout("float16_int4", 128, 16),
    "int4": PackedLayout("int4", 128, 16),
    "fp8": PackedLayout("fp8", 128, 32),
    "fp8 rows": PackedLayout("fp8", 2880, 32),
    "int8 rows": PackedLayout("int8", 2880, 32),
    "mxfp4 cut": PackedLayout("mxfp4", 16, 16),
}
BLOCKS = {name: PackedLayout(name, layout.group, 16) for name, layout in GGML.items()}


def expert_costs() -> Iterator[Named]:
    """Yields the products of each model, and the other kernels of the one with the most experts; `sort_pairs` once."""
    for name, shape in (("mixtral", MIXTRAL), ("gpt-oss", GPT_OSS_20B)):
        for variant in expert_variants(shape, torch.bfloat16):
            if variant.name == "multiply_experts":
                yield f"experts {_form(variant.arguments)} {name}", variant
    packed = {name: (GPT_OSS_20B, layout) for name, layout in LAYOUTS.items()}
    packed |= {name: (QWEN3_30B, layout) for name, layout in BLOCKS.items()}
    for name, (shape, layout) in packed.items():
        for variant in expert_variants(replace(shape, layouts=ExpertLayouts(layout, layout)), torch.bfloat16):
            if variant.name == "multiply_packed_experts":
                yield f"experts {_form(variant.arguments)} {name}", variant
    for dtype in (torch.bfloat16, torch.float32):
        prefix, sorts = "float32 " if dtype == torch.float32 else "", 0
        for number, variant in enumerate(expert_variants(QWEN3_30B, dtype)):
            sorts += variant.name == "sort_pairs"
            if variant.name == "multiply_experts":
                yield f"{prefix}experts {_form(variant.arguments)}", variant
            elif dtype == torch.bfloat16 and (variant.name != "sort_pairs" or sorts == 1):
                yield f"{variant.name.partition('_')[0]} {number}", variant


def expert_adapter_costs() -> Iterator[Named]:
    """Yields what steps with adapters of experts launch beside `expert_costs`."""
    packed = ExpertLayouts(LAYOUTS["mxfp4"], LAYOUTS["mxfp4"])
    shapes = {"": QWEN3_30B, " mixtral": MIXTRAL, " gpt-oss": GPT_OSS_20B, " mxfp4": replace(GPT_OSS_20B, layouts=packed)}
    for name, shape in shapes.items():
        known = set(expert_variants(shape, torch.bfloat16))
        for variant in expert_variants(replace(shape, has_adapters=True), torch.bfloat16):
            is_product = variant.name.startswith("multiply")
            if variant not in known and (is_product or not name.endswith("mxfp4")):
                form = _form(variant.arguments)
                label = f"experts {form.replace('down', 'plain')}" if is_product else f"adapters {variant.name} {form}"
                yield label + name, variant
    for variant in expert_variants(replace(QWEN3_30B, has_adapters=True), torch.float32):
        if variant.name in ("shrink_experts", "expand_experts"):
            yield f"adapters {variant.name} {_form(variant.arguments)} float32", variant


def _form(arguments: object) -> str:
    constants = dict(arguments)  # type: ignore[call-overload]
    is_gated = constants["ACTIVATION"] if "ACTIVATION" in constants else constants["PAIRS_PER_ROW"] > 1
    return f"{'many' if constants['BLOCK_ROWS'] == 64 else 'few'} {'gated' if is_gated else 'down'}"
