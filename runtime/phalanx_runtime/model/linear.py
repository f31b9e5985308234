"""Linear layers of a rank: prepacked for oneDNN on CPU, plain elsewhere; and the dtype that suits the processor.

`DenseLinear` is the slow twin of the others, equal within rounding. Times of all linears of a 135M model in one step, fp32,
one thread of an AVX-512 Intel, ms: batch 1: dense 59, packed 68, transposed 51; batch 16: dense 136, packed 93.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.errors import ModelError

PACK_BATCH = 16
"""Batch size that the packed layout is chosen for: a typical decode step."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""CPU flags of processors that multiply bf16. Without one, torch's bf16 linears are hundreds of times slower than fp32."""


class Linear(Protocol):
    """y = x W^T + b."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Gives [tokens, out]."""
        ...


class DenseLinear:
    """The plain linear layer."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Gives [tokens, out]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A linear layer whose weight lies in oneDNN's own layout. The dense weight is not kept."""

    __slots__ = ("bias", "num_bytes", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_BATCH)
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Gives [tokens, out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class TwofoldLinear:
    """A packed linear layer that also keeps its weight transposed, for a single row: MKL streams that fastest."""

    __slots__ = ("_packed", "bias", "num_bytes", "transposed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = PackedLinear(weight, bias)
        self.transposed = weight.t().contiguous()
        self.bias = bias
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Gives [tokens, out]."""
        if x.shape[0] > 1:
            return self._packed(x)
        return x @ self.transposed if self.bias is None else torch.addmm(self.bias, x, self.transposed)


@dataclass(frozen=True, slots=True)
class Kernels:
    """How linears are laid out: packed for oneDNN, and beside that transposed, at twice the memory, for single rows."""

    packed: bool = False
    transposed: bool = False


def make_linear(weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Linear:
    """A linear layer laid out so."""
    if kernels.packed:
        return TwofoldLinear(weight, bias) if kernels.transposed else PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def choose_kernels(dtype: torch.dtype, device: torch.device, cpu: "Processor", spare_bytes: int, num_bytes: int) -> Kernels:
    """The fastest layout here, for linears of `num_bytes` with `spare_bytes` of memory free for a second copy."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not can_pack(dtype):
        return Kernels()
    # On AMD oneDNN is ahead of MKL at any batch; in bf16 too.
    return Kernels(packed=True, transposed=cpu.is_intel and dtype == torch.float32 and num_bytes <= spare_bytes)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this processor. It refuses bf16 on some."""
    if not torch._C._has_mkldnn:
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), PACK_BATCH)
    except RuntimeError:
        return False
    return True


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
