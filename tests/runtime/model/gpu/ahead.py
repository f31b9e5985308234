"""Compiles kernels for a GPU architecture, on a machine with or without it, and reads their cost from the machine code."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from phalanx_runtime.model.attention.compression import calibrated_variants, compress_variant
from phalanx_runtime.model.attention.gpu import HeadShape, attention_variants
from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.attention.paged import AttentionParams
from phalanx_runtime.model.decoder.gpu import MAX_PARTS, can_hold, gate_variant, heads_variant, norm_variant, parts_variant
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.kernels.target import TARGETS as NVIDIA_TARGETS
from phalanx_runtime.model.kernels.target import compiling_for
from phalanx_runtime.model.kernels.variant import KernelVariant
from phalanx_runtime.rank.device.decode_inputs import input_variant
from phalanx_runtime.rank.device.device_rows import row_variants
from tools.cache import cache_root, finished, key_of

TARGETS: Mapping[str, GPUTarget] = {**NVIDIA_TARGETS, "gfx942": GPUTarget("hip", "gfx942", 64)}
"""Architectures by name; the last is AMD's MI300."""
INSTRUCTIONS = ("HGMMA", "HMMA", "UTCHMMA", "LDGSTS.E.BYPASS.128", "LDG.E.128", "ACQBULK", "PREEXIT")
"""Counted in NVIDIA machine code: tensor core products of Hopper, Ampere and Blackwell, 16-byte loads, a wait for preceding
kernels, and the start of the next kernel."""
EARLY_LOADS, EARLY_STORES = "loads before ACQBULK", "stores before ACQBULK"
"""Also counted."""
WIDE_LOADS = "16-byte loads in inner loops"
"""Also counted: those of `INSTRUCTIONS` in loops that contain no loop."""
Named = tuple[str, KernelVariant]
"""A variant with its name in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """What a compiled kernel needs."""

    registers: int
    """Per thread."""
    spills: int
    """Instructions that access spilled registers, or on AMD spilled vector registers (scalar ones spill to these)."""
    shared_bytes: int
    """Per program."""
    instructions: Mapping[str, int]
    """Occurrences of `INSTRUCTIONS`; empty on AMD."""
    warps: int


PLAIN = AttentionParams()
WINDOWED = AttentionParams(window=1024, softcap=50.0)
WITH_SINKS = AttentionParams(window=128, sinks=torch.empty(64, dtype=torch.bfloat16))
GROUPS = {64: 3, 128: 4, 256: 2}
"""Query heads of a KV head by head dimension: SmolLM2, Llama 3, Gemma 2."""


def attention_costs(target: GPUTarget) -> Iterator[Named]:
    """Yields `paged_attention` for each tuned configuration of the architecture, and `merge_splits`."""
    capability = _capability(target)
    if target.backend == "cuda" and capability == 9:  # tuned for Hopper: groups of Llama 70B and Qwen2.5 7B
        for group in (8, 7):
            hopper = HeadShape(8 * group, 8, 128, 16)
            for variant in attention_variants(hopper, PLAIN, torch.bfloat16, q_stride=8 * (group + 2) * 128, capability=9):
                yield f"{_attention_name(variant)} 128 group {group}", variant
    for dim, group in GROUPS.items():
        shape = HeadShape(8 * group, 8, dim, 16)
        for params in (PLAIN, WINDOWED):
            for variant in attention_variants(
                shape, params, torch.bfloat16, q_stride=8 * (group + 2) * dim, capability=capability
            ):
                name = _attention_name(variant)
                if name in FORMS[params.window is not None]:
                    yield f"{name} {dim}{' window' if params.window else ''}", variant
        wide = attention_variants(shape, PLAIN, torch.float32, q_stride=8 * (group + 2) * dim, capability=capability)
        yield from ((f"float32 {dim}", variant) for variant in wide if _attention_name(variant) == "decode split")
    sinks = attention_variants(HeadShape(64, 8, 64, 16), WITH_SINKS, torch.bfloat16, q_stride=80 * 64, capability=capability)
    named = ((_attention_name(variant), variant) for variant in sinks)
    yield from ((f"{name} 64 sinks", variant) for name, variant in named if name in ("decode split", "mixed split"))


def compressed_costs(target: GPUTarget, name: str) -> Iterator[Named]:
    """Yields attention over pages of a format, and what writes them."""
    format, capability = FORMATS[name], _capability(target)
    for dim, group in GROUPS.items():
        rows, shape = 8 * (group + 1), HeadShape(8 * group, 8, dim, 16, format)
        for params in (PLAIN, WINDOWED):
            for variant in attention_variants(shape, params, torch.bfloat16, q_stride=rows * dim, capability=capability):
                form = _attention_name(variant)
                if form in COMPRESSED_FORMS[params.window is not None]:
                    yield f"{form} {dim}{' window' if params.window else ''} {name}", variant
    for dim, rotated in ((64, 64), (96, 72), (128, 128), (256, 0)):
        projected = 8 * (GROUPS.get(dim, 4) + 2) * dim
        strides: dict[str, Any] = {"qk_stride": projected, "v_stride": projected, "v_offset": projected - 8 * dim}
        yield f"heads {dim} {name}", compress_variant(dim, torch.bfloat16, torch.bfloat16, format, rotated=rotated, **strides)
        variant = compress_variant(dim, torch.bfloat16, torch.bfloat16, format, is_calibrated=True, rotated=rotated, **strides)
        yield f"heads {dim} {name} calibrated", variant
        for variant in calibrated_variants(dim, torch.bfloat16, format, heads=8 * GROUPS.get(dim, 4), kv_heads=8):
            yield f"{variant.name} {dim} {name}", variant


def _capability(target: GPUTarget) -> int:
    return int(target.arch) // 10 if target.backend == "cuda" else 9


COMPRESSED_FORMS = ({"decode split", "prefill"}, {"mixed tree split"})
FORMS = (
    {"merge", "decode split", "prefill", "mixed split", "tree"},
    {"decode split", "prefill", "mixed split", "mixed tree split"},
)
"""Forms that are checked: of plain layers, and of layers with windows and softcap. One without splits has less code."""


def _attention_name(variant: KernelVariant) -> str:
    constants = dict(variant.arguments)
    if "BLOCK_QUERIES" not in constants:
        return "merge"
    splits, tree = " split" if constants["HAS_SPLITS"] else "", constants["HAS_TREE"]
    if constants["BLOCK_QUERIES"] == 1:
        return f"decode{splits}"
    return f"mixed{' tree' if tree else ''}{splits}" if splits else "tree" if tree else "prefill"


def row_costs() -> Iterator[Named]:
    """Yields the kernels of rows on the device, for long page tables, and for 1 and 8 KV heads."""
    yield from ((f"rows {variant.name}", variant) for variant in row_variants(8192))
    yield from ((f"inputs {heads}", input_variant(heads, 8192)) for heads in (1, 8))
    yield "inputs with a window", input_variant(8, 8192, has_window=True)
    yield "inputs with adapters", input_variant(8, 8192, has_adapters=True)
    yield "inputs with parts", input_variant(8, 8192, has_window=True, has_parts=True)


def decoder_costs() -> Iterator[Named]:
    """Yields the kernels between the linears: norms of narrow to wide models, gates, heads of each dimension."""
    for size in (576, 4096, 8192, 16384):
        for dtype in (torch.bfloat16, torch.float32):
            for has_after in (False, True):
                if can_hold(size, dtype, has_after):
                    name = f"norm {size} {dtype} {'after' if has_after else ''}"
                    yield name, norm_variant(size, dtype, dtype, has_sum=True, has_after=has_after, has_before=True)
        for parts in (2, MAX_PARTS) if can_hold(size, torch.bfloat16, True) else ():
            yield f"norm of {parts} parts of {size}", parts_variant(size, torch.bfloat16, torch.bfloat16, parts=parts)
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for activation in activations:
        yield f"gate {activation}", gate_variant(14336, torch.bfloat16, activation)
    for dim, rotated in ((64, 64), (96, 72), (128, 128), (128, 0), (256, 256)):
        projected = 8 * (GROUPS.get(dim, 4) + 2) * dim
        for weight in (None, torch.bfloat16):
            yield (
                f"heads {dim} {rotated} {'plain' if weight is None else 'norm'}",
                heads_variant(
                    dim,
                    torch.bfloat16,
                    weight,
                    rotated=rotated,
                    qk_stride=projected,
                    v_stride=projected,
                    v_offset=projected - 8 * dim,
                ),
            )


def compile_variant(variant: KernelVariant, target: GPUTarget) -> KernelCost:
    """Compiles one kernel and returns its cost."""
    with compiling_for(target):
        compiled = variant.compile()
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    if target.backend == "hip":
        return _amd_cost(compiled.asm["amdgcn"], shared, warps)
    return _nvidia_cost(compiled.asm["cubin"], shared, warps)


def _nvidia_cost(cubin: bytes, shared_bytes: int, warps: int) -> KernelCost:
    """Reads the machine code once: nvdisasm takes a quarter of a second, and Triton compiles from its own cache."""

    def read(folder: Path) -> None:
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run_tool("cuobjdump", "-res-usage", str(path))
        code = _run_tool("nvdisasm", "-c", "-ndf", str(path)).replace("LDG.E.EF.", "LDG.E.")  # that the cache evicts first
        path.unlink()
        found = {name: len(re.findall(rf"\b{re.escape(name)}", code)) for name in INSTRUCTIONS}
        early = code.partition("ACQBULK")[0] if found["ACQBULK"] else ""
        found |= {EARLY_LOADS: len(re.findall(r"\bLDG", early)), EARLY_STORES: len(re.findall(r"\b(?:STG|RED|ATOMG)\b", early))}
        found[WIDE_LOADS] = sum(len(re.findall(r"\bLDG(?:\.E|STS\.E\.BYPASS)\.128", loop)) for loop in _inner_loops(code))
        counts = {
            "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
            "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
            "instructions": found,
        }
        (folder / "counts.json").write_text(json.dumps(counts))

    key = key_of(triton.__version__, "any eviction", EARLY_LOADS, WIDE_LOADS, *INSTRUCTIONS, cubin)
    counts = json.loads((finished(cache_root() / "machine-code" / key, read) / "counts.json").read_text())
    return KernelCost(**counts, shared_bytes=shared_bytes, warps=warps)


def _inner_loops(code: str) -> list[str]:
    """Returns the code between a label and a branch back to it, of loops that contain no loop."""
    lines = code.splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}
    branches = ((at, found[1]) for at, line in enumerate(lines) if (found := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)))
    loops = [(labels[label], at) for at, label in branches if labels.get(label, at) < at]
    inner = [(start, end) for start, end in loops if not any(start <= one and other < end for one, other in loops)]
    return ["\n".join(lines[start:end]) for start, end in inner]


def _amd_cost(assembly: str, shared_bytes: int, warps: int) -> KernelCost:
    fields = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly))
    return KernelCost(
        registers=int(fields["vgpr_count"]),
        spills=int(fields["vgpr_spill_count"]),
        shared_bytes=shared_bytes,
        instructions={},
        warps=warps,
    )


def _run_tool(name: str, *arguments: str) -> str:
    """Runs a program of the Triton wheel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
