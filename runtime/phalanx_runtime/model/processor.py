"""CPU features and the compute dtype."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx_runtime.errors import ModelError

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""CPU flags of bf16 arithmetic, without which torch's bf16 linears are hundreds of times slower than fp32."""

LIMIT = "ATEN_CPU_CAPABILITY"
"""Variable of the environment by which torch, and the C++ kernels with it, use no more than its value: `avx2`."""
_BEYOND_AVX2 = ("avx512", "avx_vnni", "avx10", "amx")


@dataclass(frozen=True, slots=True)
class Processor:
    """Vendor and feature flags in /proc/cpuinfo."""

    is_intel: bool = False
    flags: frozenset[str] = frozenset()


def choose_dtype(requested: str, stored: str, device: torch.device, cpu: Processor) -> torch.dtype:
    """Returns the compute dtype: by default the stored one, but fp32 on a CPU without bf16 or for fp16. Raises ModelError."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if device.type == "cuda":
        names["float16"] = torch.float16
    elif requested == "float16":
        raise ModelError("dtype float16 is for GPUs: use float32 or bfloat16")
    if requested != "auto":
        if requested not in names:
            raise ModelError(f"dtype {requested!r} is not supported: use auto, {', '.join(names)}")
        return names[requested]
    if device.type == "cpu" and not cpu.flags & BF16_FLAGS:
        return torch.float32
    return names.get(stored, torch.bfloat16 if device.type == "cuda" else torch.float32)


def is_limited() -> bool:
    """Whether the environment forbids vectors beyond AVX2 (`LIMIT`)."""
    return os.environ.get(LIMIT) == "avx2" and platform.machine() == "x86_64"


def read_processor(path: Path = Path("/proc/cpuinfo")) -> Processor:
    """Reads the processor, without the flags that `LIMIT` forbids; empty if unreadable."""
    try:
        text = path.read_text()
    except OSError:
        return Processor()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    allowed = (flag for flag in flags.split() if not (is_limited() and flag.startswith(_BEYOND_AVX2)))
    return Processor(fields.get("vendor_id") == "GenuineIntel", frozenset(allowed))
