"""Weights as GGUF files have them: bytes of blocks, dequantised by the library `gguf`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

Kind = GGMLQuantizationType
KINDS = frozenset({Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K})
"""Formats whose blocks the C++ kernel reads. Those of GPUs read `codes.LAYOUTS`."""


@dataclass(frozen=True, slots=True)
class GgmlPart:
    """Outputs in one format."""

    kind: Kind
    raw: Tensor
    """uint8 [outputs, bytes]: as in the file."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [outputs, inputs]: the fp32 numbers of the format's definition, in `dtype`."""
        return torch.from_numpy(dequantize(self.raw.cpu().numpy(), self.kind)).to(self.raw.device, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlWeight:
    """A weight as a GGUF file has it; its parts are one above the other."""

    parts: tuple[GgmlPart, ...]
    inputs: int
    dtype: torch.dtype
    """Compute dtype."""
    skipped: int = 0
    """Inputs of the first blocks that belong to another rank: blocks are not cut. So may the end of the last ones."""

    @property
    def outputs(self) -> int:
        """Of all parts."""
        return sum(len(part.raw) for part in self.parts)

    @property
    def has_whole_blocks(self) -> bool:
        """Whether its blocks have no further inputs."""
        size, num_bytes = GGML_QUANT_SIZES[self.parts[0].kind]
        return self.inputs * num_bytes == self.parts[0].raw.shape[1] * size

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.raw.nbytes for part in self.parts)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [outputs, inputs]."""
        whole = torch.cat([part.dequantize(dtype) for part in self.parts])
        return whole[:, self.skipped : self.skipped + self.inputs]

    def by_outputs(self, change: Callable[[Tensor], Tensor]) -> "GgmlWeight":
        """Returns the weight with a change of the outputs of its only part."""
        (part,) = self.parts
        return replace(self, parts=(GgmlPart(part.kind, change(part.raw)),))


def join_ggml(weights: Sequence[GgmlWeight]) -> GgmlWeight:
    """Returns weights with the same inputs, one above the other. Neighbours in one format become one part."""
    parts: list[GgmlPart] = []
    for part in (part for weight in weights for part in weight.parts):
        if parts and parts[-1].kind == part.kind:
            parts[-1] = GgmlPart(part.kind, torch.cat((parts[-1].raw, part.raw)))
        else:
            parts.append(part)
    return replace(weights[0], parts=tuple(parts))
