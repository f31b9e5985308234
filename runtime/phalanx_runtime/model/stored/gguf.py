"""Reads parts of linears as a GGUF file stores them: in blocks that kernels read, or as codes of 4 bits.

    MXFP4    blocks of 32 weights: a scale in e8m0, 16 bytes of codes
    IQ4_NL   blocks of 32 weights: a scale in fp16, 16 bytes of codes
    IQ4_XS   blocks of 256 weights: a scale in fp16, codes of 6 bits for the scales of 8 groups, 8 times 16 bytes of codes

The low fields of 16 bytes are the first 16 codes of a group of 32. Source: ggml-common.h and ggml-quants.c of ggml.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from phalanx_runtime.checkpoint.schemes.tables import E2M1
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.ggml.codes import IQ4, LAYOUTS, iq4_xs_scales
from phalanx_runtime.model.ggml.weight import KINDS, GgmlPart, GgmlWeight
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.nested import TABLE_SIZE, NestedScales, find_nested
from phalanx_runtime.model.linear.registry import keeps_codes, keeps_ggml
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.stored.tables import check_finite, table_weight
from phalanx_runtime.model.weights import Checkpoint

Kind = GGMLQuantizationType
TABLES = {Kind.MXFP4: E2M1, Kind.IQ4_NL: IQ4, Kind.IQ4_XS: IQ4}
"""Values of the codes, by format."""
_GROUP, _GROUPS = 32, 8
"""Weights with a scale, and scales in a block of IQ4_XS."""


@dataclass(frozen=True, slots=True)
class GgufReader:
    """Reads weights in the formats of kernels, where codes stay packed."""

    checkpoint: Checkpoint

    def is_stored(self, name: str) -> bool:
        """Whether the linear is read as it is; others are dequantised."""
        return self._has_kind(name, KINDS | TABLES.keys() if self._keeps_blocks else {Kind.MXFP4})

    def has_rows(self, name: str, *, is_head: bool) -> bool:
        """Whether `blocks` returns rows for an embedding. `is_head`: a kernel multiplies by them, too."""
        if not keeps_codes(self.checkpoint.device):
            return self._keeps_blocks and self._has_kind(name, LAYOUTS.keys())
        return self._has_kind(name, KINDS if is_head else KINDS | TABLES.keys())

    @property
    def _keeps_blocks(self) -> bool:
        return keeps_ggml(self.checkpoint.device, self.checkpoint.dtype)

    def _has_kind(self, name: str, kinds: Collection[Kind]) -> bool:
        stored = self.checkpoint.gguf_tensor(f"{name}.weight")
        return stored is not None and stored.kind in kinds

    def read(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> GgmlWeight | IntWeight:
        """Returns outputs `rows` and inputs `columns` of a linear of `shape`. Raises ModelError."""
        part, skipped = self._part(name, shape, rows, columns)
        if part.kind in KINDS or (part.kind in LAYOUTS and not keeps_codes(self.checkpoint.device)):
            if part.kind in TABLES:  # refuses scales that are not finite, as on a CPU
                _halves(f"{name}.weight", _split_blocks(part.raw, part.kind))
            return self._weight(part, skipped, columns.size)
        codes, scales, nested = _SPLIT[part.kind](f"{name}.weight", part.raw)
        used = slice(skipped, skipped + columns.size)
        groups = torch.arange(used.start, used.stop) // _GROUP
        table = torch.tensor(TABLES[part.kind], dtype=torch.float32)
        return table_weight(self.checkpoint, codes[:, used], scales, groups, table, nested=nested)

    def blocks(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> GgmlWeight:
        """Returns the blocks with these outputs and inputs. Raises ModelError."""
        part, skipped = self._part(name, shape, rows, columns)
        return self._weight(part, skipped, columns.size)

    def _weight(self, part: GgmlPart, skipped: int, inputs: int) -> GgmlWeight:
        """Returns a weight on the device of the checkpoint."""
        moved = GgmlPart(part.kind, part.raw.to(self.checkpoint.device))
        return GgmlWeight(parts=(moved,), inputs=inputs, dtype=self.checkpoint.dtype, skipped=skipped)

    def _part(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> tuple[GgmlPart, int]:
        """Returns the blocks with these outputs and inputs, in memory of the host, and the inputs before `columns` in them."""
        stored = self.checkpoint.gguf_tensor(f"{name}.weight")
        assert stored is not None
        if stored.shape != shape:
            raise ModelError(f"tensor {name}.weight has shape {list(stored.shape)}; config.json implies {list(shape)}")
        size, num_bytes = GGML_QUANT_SIZES[stored.kind]
        blocks = slice(columns.start // size * num_bytes, -(-columns.stop // size) * num_bytes)
        return GgmlPart(stored.kind, self.checkpoint.gguf_bytes(f"{name}.weight", rows, blocks)), columns.start % size


_Codes = tuple[Tensor, Tensor, NestedScales | None]
"""Codes and scales of blocks, as the fields of `IntWeight`."""


def _mxfp4(name: str, raw: Tensor) -> _Codes:
    blocks = _split_blocks(raw, Kind.MXFP4)
    scales = blocks[:, :, 0].clone()
    if bool((scales == 255).any()):
        raise ModelError(f"tensor {name} has a scale that is not a number")
    return _fields(blocks[:, :, 1:]), scales.view(torch.float8_e8m0fnu), None


def _iq4_nl(name: str, raw: Tensor) -> _Codes:
    blocks = _split_blocks(raw, Kind.IQ4_NL)
    return _fields(blocks[:, :, 2:]), _halves(name, blocks), None


def _iq4_xs(name: str, raw: Tensor) -> _Codes:
    """Scales stay in codes where `find_nested` finds the blocks."""
    blocks = _split_blocks(raw, Kind.IQ4_XS)
    codes = iq4_xs_scales(blocks).flatten(1)
    outer = _halves(name, blocks).float().repeat_interleave(_GROUPS, 1)
    table = torch.arange(TABLE_SIZE, dtype=torch.float32) - 32
    nested = find_nested(table, outer, 0.0)
    return _fields(blocks[:, :, 8:]), table[codes.int()] * outer if nested is None else codes, nested


_SPLIT = {Kind.MXFP4: _mxfp4, Kind.IQ4_NL: _iq4_nl, Kind.IQ4_XS: _iq4_xs}


def _split_blocks(raw: Tensor, kind: Kind) -> Tensor:
    """Returns [outputs, blocks, bytes]."""
    return raw.view(len(raw), -1, GGML_QUANT_SIZES[kind][1])


def _halves(name: str, blocks: Tensor) -> Tensor:
    """Returns the scale at the start of each block, fp16 [outputs, blocks]."""
    scales = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0]
    check_finite(name, scales)
    return scales


def _fields(packed: Tensor) -> Tensor:
    """Returns the codes of bytes [outputs, blocks, 16 for each group], [outputs, inputs]."""
    groups = packed.reshape(len(packed), -1, _GROUP // 2)
    return torch.cat((groups & 15, groups >> 4), 2).flatten(1)
