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
from phalanx_runtime.rank.step.device_rows import MAX_BLOCK, RECORD_BLOCK
from phalanx_runtime.rank.step.triton_kernels import build_decode_inputs, record_tokens, update_rows

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""Architectures by name: A100, H100 and H200, B200, MI300."""
INSTRUCTIONS = ("HGMMA", "HMMA", "UTCHMMA", "LDGSTS.E.BYPASS.128", "LDG.E.128")
"""Counted in NVIDIA machine code: tensor core products of Hopper, Ampere and Blackwell, 16-byte loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel with the types and constants that it is compiled for."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Triton type by argument. Pointers and strides are divisible by 16."""
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
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    **dict.fromkeys(("window", "q_stride", "table_stride", "level_stride"), "i32"),
}
MERGE_TYPES = {"out": "*bf16", "partial": "*fp32", "partial_lse": "*fp32", "lengths": "*i32"}
PLAIN = AttentionParams()
GROUPS = {64: 3, 128: 4, 256: 2}
"""Query heads of a KV head by head dimension: SmolLM2, Llama 3, Gemma 2."""


def attention_variants(target: GPUTarget) -> Iterator[Variant]:
    """Yields `paged_attention` for each tuned configuration of the architecture, and `merge_splits`."""
    capability = int(target.arch) // 10 if target.backend == "cuda" else 9
    for dim, config in DECODE.items():
        yield _attention(f"decode {dim}", dim, config, max_splits=8)
        yield _attention(f"decode {dim} window", dim, config, max_splits=8, params=AttentionParams(window=1024, softcap=50.0))
    for dim, config in prefill_tiles(capability).items():
        yield _attention(f"prefill {dim}", dim, config)
        yield _attention(f"prefill {dim} window", dim, config, params=AttentionParams(window=1024, softcap=50.0))
        yield _attention(f"tree {dim}", dim, config, has_tree=True)
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


ROW_TYPES = dict.fromkeys(("tables", "held", "lengths", "last_tokens", "batch_rows", "batch_lengths", "batch_tables"), "*i32")
INPUT_TYPES = {**ROW_TYPES, **dict.fromkeys(("tokens", "positions", "slots"), "*i64"), "padding_page": "i32"}


def row_variants() -> Iterator[Variant]:
    """Yields the kernels of rows on the device, for long page tables, and for 1 and 8 KV heads."""
    table = {"TABLE_PAGES": 8192, "BLOCK": MAX_BLOCK}
    update = ("update", "tables", "held", "lengths", "last_tokens", "batch_rows")
    yield Variant(name="rows update", kernel=update_rows, types=dict.fromkeys(update, "*i32"), constants=table)
    inputs = (*("batch_rows", "tables", "lengths", "last_tokens", "tokens", "positions", "slots"),)
    inputs += ("batch_lengths", "batch_tables", "padding_page")
    types = {name: INPUT_TYPES[name] for name in inputs}
    for heads in (1, 8):
        constants = {"KV_HEADS": heads, "KV_HEADS_PADDED": heads, "PAGE": 16, **table}
        yield Variant(name=f"inputs {heads}", kernel=build_decode_inputs, types=types, constants=constants)
    record = {"sampled": "*i64", "batch_rows": "*i32", "last_tokens": "*i32", "num_rows": "i32"}
    yield Variant(name="rows record", kernel=record_tokens, types=record, constants={"BLOCK": RECORD_BLOCK})


def compile_variant(variant: Variant, target: GPUTarget) -> KernelCost:
    """Compiles one kernel and returns its cost."""
    signature = {**variant.types, **dict.fromkeys(variant.constants, "constexpr")}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ("q_stride", "table_stride", "stride")
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
