"""The processor at hand, and the dtype that suits it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx_runtime.errors import ModelError

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""CPU flags of processors that multiply bf16. Without one, torch's bf16 linears are hundreds of times slower than fp32."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU: who made it, and what it can do, as Linux names it."""

    is_intel: bool = False
    flags: frozenset[str] = frozenset()


def choose_dtype(asked: str, stored: str, device: torch.device, cpu: Processor) -> torch.dtype:
    """The dtype to compute in. `auto` is the checkpoint's, but fp32 on a processor without bf16 arithmetic.

    Raises ModelError for a dtype that has no meaning here.
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if asked != "auto":
        if asked not in names:
            raise ModelError(f"dtype {asked!r} is not supported; supported are auto, {', '.join(names)}")
        return names[asked]
    if device.type == "cpu" and not cpu.flags & BF16_FLAGS:
        return torch.float32
    # fp16 checkpoints hold values that bf16 holds too, with a shorter mantissa; fp32 loses nothing.
    return names.get(stored, torch.bfloat16 if device.type == "cuda" else torch.float32)


def read_processor(path: Path = Path("/proc/cpuinfo")) -> Processor:
    """This machine's processor. Without a maker or flags when it cannot be told."""
    try:
        text = path.read_text()
    except OSError:
        return Processor()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return Processor(fields.get("vendor_id") == "GenuineIntel", frozenset(flags.split()))
