"""Compiles kernels for a GPU architecture, on a machine with or without it, and reads their cost from the machine code."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phalanx_runtime.model.attention.gpu import DECODE, TileConfig, can_attend, constants_of, prefill_tiles
from phalanx_runtime.model.attention.paged import AttentionParams
from phalanx_runtime.model.attention.triton_kernels import merge_splits, paged_attention
from phalanx_runtime.model.decoder.gpu import (
    HEADS_WARPS,
    MAX_PARTS,
    can_hold,
    gate_constants,
    heads_constants,
    norm_constants,
    norm_warps,
    parts_constants,
)
from phalanx_runtime.model.decoder.triton_kernels import add_norm, add_parts_norm, gate, prepare_heads
from phalanx_runtime.model.families import Activation
from phalanx_runtime.rank.device.device_rows import MAX_BLOCK, RECORD_BLOCK
from phalanx_runtime.rank.device.triton_kernels import build_decode_inputs, record_tokens, update_rows

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""Architectures by name: A100, H100 and H200, B200, MI300."""
ALIGNED_STRIDES = ("stride", "q_stride", "x_stride", "y_stride", "row_stride", "qk_stride", "v_stride")
"""Multiples of 16 in each supported model."""
INSTRUCTIONS = ("HGMMA", "HMMA", "UTCHMMA", "LDGSTS.E.BYPASS.128", "LDG.E.128")
"""Counted in NVIDIA machine code: tensor core products of Hopper, Ampere and Blackwell, 16-byte loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel with the types and constants that it is compiled for."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Triton type by argument. Pointers and `ALIGNED_STRIDES` are divisible by 16."""
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


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


ATTENTION_TYPES = {
    **dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16"),
    **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
    **dict.fromkeys(("tables", "starts", "lengths"), "*i32"),
    **dict.fromkeys(("tree_sizes", "tree_levels", "ancestors", "block_requests", "block_offsets"), "*i32"),
    "sinks": "*bf16",
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    **dict.fromkeys(("num_decodes", "window", "q_stride", "table_stride", "level_stride"), "i32"),
}
MERGE_TYPES = {"out": "*bf16", "partial": "*fp32", "partial_lse": "*fp32", "lengths": "*i32"}
PLAIN = AttentionParams()
WINDOWED = AttentionParams(window=1024, softcap=50.0)
WITH_SINKS = AttentionParams(window=128, sinks=torch.empty(64))
GROUPS = {64: 3, 128: 4, 256: 2}
"""Query heads of a KV head by head dimension: SmolLM2, Llama 3, Gemma 2."""


def attention_variants(target: GPUTarget) -> Iterator[Variant]:
    """Yields `paged_attention` for each tuned configuration of the architecture, and `merge_splits`."""
    capability = int(target.arch) // 10 if target.backend == "cuda" else 9
    for dim, config in DECODE.items():
        yield _attention(f"decode {dim}", dim, config, max_splits=8)
        yield _attention(f"decode {dim} window", dim, config, max_splits=8, params=WINDOWED)
    yield _attention("decode 64 sinks", 64, DECODE[64], max_splits=8, params=WITH_SINKS)
    yield _attention("mixed 64 sinks", 64, prefill_tiles(capability)[64], max_splits=8, params=WITH_SINKS)
    for dim, config in prefill_tiles(capability).items():
        yield _attention(f"prefill {dim}", dim, config)
        yield _attention(f"prefill {dim} window", dim, config, params=WINDOWED)
        yield _attention(f"tree {dim}", dim, config, has_tree=True)
        yield _attention(f"mixed {dim}", dim, config, max_splits=8)
        yield _attention(f"mixed window {dim}", dim, config, max_splits=8, params=WINDOWED)
        yield _attention(f"mixed tree {dim}", dim, config, max_splits=8, has_tree=True, params=WINDOWED)
        if can_attend(dim, torch.float32):
            yield _attention(f"float32 {dim}", dim, DECODE[dim], max_splits=8, dtype="fp32")
        constants = {"HEADS": 8 * GROUPS[dim], "DIM": dim, "DIM_PADDED": dim, "MAX_SPLITS": 8, "SPLIT_KEYS": 256}
        yield Variant(name=f"merge {dim}", kernel=merge_splits, types=MERGE_TYPES, constants=constants)


def _attention(
    name: str,
    dim: int,
    config: TileConfig,
    *,
    max_splits: int = 1,
    has_tree: bool = False,
    params: AttentionParams = PLAIN,
    dtype: str = "bf16",
) -> Variant:
    return Variant(
        name=name,
        kernel=paged_attention,
        types={name: kind.replace("bf16", dtype) for name, kind in ATTENTION_TYPES.items()},
        constants=constants_of(config, (0, 8, 16, dim), GROUPS[dim], max_splits=max_splits, has_tree=has_tree, params=params),
        num_warps=config.num_warps,
        num_stages=config.num_stages if dtype == "bf16" else 1,
    )


def row_variants() -> Iterator[Variant]:
    """Yields the kernels of rows on the device, for long page tables, and for 1 and 8 KV heads."""
    table = {"TABLE_PAGES": 8192, "BLOCK": MAX_BLOCK}
    update = ("update", "tables", "held", "lengths", "last_tokens", "batch_rows", "batch_indices")
    yield Variant(name="rows update", kernel=update_rows, types=dict.fromkeys(update, "*i32"), constants=table)
    types = dict.fromkeys(("batch_rows", "tables", "lengths", "last_tokens"), "*i32")
    types |= dict.fromkeys(("tokens", "positions", "slots"), "*i64")
    types |= {"batch_lengths": "*i32", "batch_tables": "*i32"}
    for heads in (1, 8):
        constants = {"KV_HEADS": heads, "KV_HEADS_PADDED": heads, "PAGE": 16, **table}
        yield Variant(name=f"inputs {heads}", kernel=build_decode_inputs, types=types, constants=constants)
    record = {"sampled": "*i64", "batch_rows": "*i32", "last_tokens": "*i32", "num_rows": "i32"}
    yield Variant(name="rows record", kernel=record_tokens, types=record, constants={"BLOCK": RECORD_BLOCK})


NORM_TYPES = {
    **dict.fromkeys(("x", "y", "after", "before", "out"), "*bf16"),
    "eps": "fp32",
    **dict.fromkeys(("x_stride", "y_stride"), "i32"),
}
PARTS_TYPES = {
    **dict.fromkeys(("x", *(f"part_{rank}" for rank in range(MAX_PARTS)), "after", "before", "out"), "*bf16"),
    "eps": "fp32",
    "x_stride": "i32",
}
HEADS_TYPES = {
    **dict.fromkeys(("qk", "v", "k_cache", "v_cache"), "*bf16"),
    "slots": "*i64",
    **dict.fromkeys(("cos", "sin", "q_norm", "k_norm"), "*bf16"),
    "eps": "fp32",
    **dict.fromkeys(("qk_stride", "v_stride"), "i32"),
}


def _norm(size: int, dtype: torch.dtype, has_after: bool) -> Variant:
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"
    return Variant(
        name=f"norm {size} {kind} {'after' if has_after else ''}",
        kernel=add_norm,
        types={name: known.replace("bf16", kind) for name, known in NORM_TYPES.items()},
        constants=norm_constants(size, has_sum=True, has_after=has_after, has_before=True),
        num_warps=norm_warps(size),
    )


def decoder_variants() -> Iterator[Variant]:
    """Yields the kernels between the linears: norms of narrow to wide models, gates, heads of each dimension."""
    for size in (576, 4096, 8192, 16384):
        for dtype in (torch.bfloat16, torch.float32):
            for has_after in (False, True):
                if can_hold(size, dtype, has_after):
                    yield _norm(size, dtype, has_after)
        for parts in (2, MAX_PARTS) if can_hold(size, torch.bfloat16, True) else ():
            yield Variant(
                name=f"norm of {parts} parts of {size}",
                kernel=add_parts_norm,
                types=PARTS_TYPES,
                constants=parts_constants(size, parts, has_after=False, has_before=True),
                num_warps=norm_warps(size),
            )
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for activation in activations:
        types = {"gate_up": "*bf16", "out": "*bf16", "row_stride": "i32"}
        yield Variant(name=f"gate {activation}", kernel=gate, types=types, constants=gate_constants(14336, activation))
    for dim, rotated in ((64, 64), (96, 72), (128, 128), (128, 0), (256, 256)):
        for has_norm in (False, True):
            yield Variant(
                name=f"heads {dim} {rotated} {'norm' if has_norm else 'plain'}",
                kernel=prepare_heads,
                types=HEADS_TYPES,
                constants=heads_constants(8 * GROUPS.get(dim, 4), 8, dim, rotated, has_norm),
                num_warps=HEADS_WARPS,
            )


def compile_variant(variant: Variant, target: GPUTarget) -> KernelCost:
    """Compiles one kernel and returns its cost."""
    signature = {**variant.types, **dict.fromkeys(variant.constants, "constexpr")}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ALIGNED_STRIDES
    }
    compiled = triton.compile(
        ASTSource(variant.kernel, signature, dict(variant.constants), aligned),
        target=target,
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    shared = int(compiled.metadata.shared)
    return _amd_cost(compiled.asm["amdgcn"], shared) if target.backend == "hip" else _nvidia_cost(compiled.asm["cubin"], shared)


def _nvidia_cost(cubin: bytes, shared_bytes: int) -> KernelCost:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run_tool("cuobjdump", "-res-usage", str(path))
        code = _run_tool("nvdisasm", "-c", str(path))
    return KernelCost(
        registers=int(re.findall(r"REG:(\d+)", usage)[0]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_bytes=shared_bytes,
        instructions={name: len(re.findall(rf"\b{re.escape(name)}", code)) for name in INSTRUCTIONS},
    )


def _amd_cost(assembly: str, shared_bytes: int) -> KernelCost:
    fields = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly))
    return KernelCost(
        registers=int(fields["vgpr_count"]), spills=int(fields["vgpr_spill_count"]), shared_bytes=shared_bytes, instructions={}
    )


def _run_tool(name: str, *arguments: str) -> str:
    """Runs a program of the Triton wheel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
