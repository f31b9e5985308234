"""Splits blocks of GGUF files into codes and scales, and packs them for the kernels of GPUs.

    value = (code - zero) * scale + offset, or IQ4[code] * scale

Codes of 3, 5 and 6 bits are packed as two planes: one of the low bits, one of the high bits. In K formats a scale is an integer
of a group of inputs times a float16 of a block of 256. Source: ggml-common.h and ggml-quants.c of ggml. Reference:
`GgmlPart.dequantize`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from phalanx_runtime.model.ggml.weight import Kind

Scales = Literal["half", "halves", "pairs", "nibbles", "signed"]
"""Scale of a group. half: a float16. halves: float16 of scale and offset. pairs: a byte each for scale and offset. nibbles: 4
bits each for scale and offset. signed: an int8. Integers are multiplied by float16 of their block."""
BLOCK = 256
"""Inputs of a block of formats whose scales are integers."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Dtype of the words of a plane, by the bits of a field: a word of each plane has fields of the same inputs."""


@dataclass(frozen=True, slots=True)
class GgmlLayout:
    """How a format is packed."""

    low: int
    """Bits of a code in the first plane."""
    high: int
    """Bits in the second one."""
    zero: int
    """Code of the value 0, in formats without offset and table."""
    group: int
    """Inputs with a scale."""
    scales: Scales
    has_table: bool = False
    """Whether codes are indices into `IQ4`."""

    @property
    def num_fields(self) -> int:
        """Fields of a word."""
        return 4 if self.low == 8 else 8

    def word_bytes(self, num_words: int) -> int:
        """Returns the bytes of all planes, each of `num_words` words."""
        return num_words * self.num_fields * (self.low + self.high) // 8

    @property
    def code_bytes(self) -> int:
        """Bytes of the integers of a block's scales."""
        return BLOCK // self.group * (2 if self.scales == "pairs" else 1)

    def scale_words(self, inputs: int) -> int:
        """Returns the number of int32 for the scales of an output."""
        if self.scales in ("half", "halves"):
            halves = inputs // self.group * (1 if self.scales == "half" else 2)
        else:
            halves = inputs // BLOCK * (self.code_bytes // 2 + (1 if self.scales == "signed" else 2))
        return -(-halves // 2)


LAYOUTS: Mapping[Kind, GgmlLayout] = {
    Kind.Q4_0: GgmlLayout(4, 0, 8, 32, "half"),
    Kind.Q4_1: GgmlLayout(4, 0, 0, 32, "halves"),
    Kind.Q5_0: GgmlLayout(4, 1, 16, 32, "half"),
    Kind.Q5_1: GgmlLayout(4, 1, 0, 32, "halves"),
    Kind.Q8_0: GgmlLayout(8, 0, 128, 32, "half"),
    Kind.Q2_K: GgmlLayout(2, 0, 0, 16, "nibbles"),
    Kind.Q3_K: GgmlLayout(2, 1, 4, 16, "signed"),
    Kind.Q4_K: GgmlLayout(4, 0, 0, 32, "pairs"),
    Kind.Q5_K: GgmlLayout(4, 1, 0, 32, "pairs"),
    Kind.Q6_K: GgmlLayout(4, 2, 32, 16, "signed"),
    Kind.IQ4_NL: GgmlLayout(4, 0, 0, 32, "half", has_table=True),
    Kind.IQ4_XS: GgmlLayout(4, 0, 0, 32, "signed", has_table=True),
}


def split_blocks(kind: Kind, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes, uint8 [outputs, inputs], and scales, int32 [outputs, `scale_words`]. raw: uint8 [outputs, bytes]."""
    blocks = raw.view(len(raw), -1, GGML_QUANT_SIZES[kind][1])
    codes, scales = _SPLIT[kind](blocks)
    whole = torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in scales], 1)
    return codes.flatten(1), F.pad(whole, (0, -whole.shape[1] % 4)).view(torch.int32)


def pack_planes(codes: Tensor, layout: GgmlLayout, width: int) -> Tensor:
    """Returns the words of both planes, int32 [outputs, words], the low one first, padded to whole spans of `width` words.

    Field j of word c is input j * width + c of a span.
    """
    spans = F.pad(codes, (0, -codes.shape[1] % (layout.num_fields * width))).view(len(codes), -1, layout.num_fields, width)
    planes = [_plane(spans & (1 << layout.low) - 1, layout.low)]
    if layout.high:
        planes.append(_plane(spans >> layout.low, layout.high))
    return torch.cat([plane.view(torch.uint8) for plane in planes], 1).view(torch.int32)


def _plane(fields: Tensor, bits: int) -> Tensor:
    """fields: uint8 [outputs, spans, fields, width]."""
    words = torch.zeros_like(fields[:, :, 0], dtype=torch.int32)
    for field in range(fields.shape[2]):
        words |= fields[:, :, field].to(torch.int32) << bits * field
    return words.to(_PLANES[bits]).flatten(1)


def unpack_planes(words: Tensor, layout: GgmlLayout, width: int) -> Tensor:
    """Returns the codes, uint8 [outputs, padded inputs]."""
    whole = words.contiguous().view(torch.uint8)
    cut = whole.shape[1] * layout.low // (layout.low + layout.high)
    codes = _fields(whole[:, :cut], layout, layout.low, width)
    return codes | _fields(whole[:, cut:], layout, layout.high, width) << layout.low if layout.high else codes


def _fields(plane: Tensor, layout: GgmlLayout, bits: int, width: int) -> Tensor:
    spans = plane.contiguous().view(_PLANES[bits]).to(torch.int32).view(len(plane), -1, width)
    fields = [(spans >> bits * field & (1 << bits) - 1).to(torch.uint8) for field in range(layout.num_fields)]
    return torch.stack(fields, 2).flatten(1)


def scales_and_offsets(scales: Tensor, layout: GgmlLayout, inputs: int) -> tuple[Tensor, Tensor | None]:
    """Returns the scale of each group and what is added, fp32 [outputs, groups]."""
    whole, num_groups = scales.contiguous().view(torch.uint8), inputs // layout.group
    if layout.scales in ("half", "halves"):
        halves = whole.view(torch.float16).float()
        if layout.scales == "half":
            return halves[:, :num_groups], None
        return halves[:, : 2 * num_groups : 2], halves[:, 1 : 2 * num_groups : 2]
    num_blocks = inputs // BLOCK
    cut = num_blocks * layout.code_bytes
    codes, outer = whole[:, :cut], whole[:, cut:].contiguous().view(torch.float16).float()
    per_block = BLOCK // layout.group
    if layout.scales == "signed":
        return codes.contiguous().view(torch.int8) * outer[:, :num_blocks].repeat_interleave(per_block, 1), None
    outer = outer.view(len(outer), num_blocks, 2).repeat_interleave(per_block, 1)
    pair = (codes & 15, codes >> 4) if layout.scales == "nibbles" else (codes[:, ::2], codes[:, 1::2])
    return pair[0] * outer[:, :, 0], -(pair[1] * outer[:, :, 1])


def dequantize_planes(words: Tensor, scales: Tensor, layout: GgmlLayout, width: int, inputs: int) -> Tensor:
    """Returns fp32 [outputs, inputs]."""
    fields = unpack_planes(words, layout, width)[:, :inputs]
    table = torch.tensor(IQ4, dtype=torch.float32, device=words.device)
    codes = table[fields.int()] if layout.has_table else fields.to(torch.float32) - layout.zero
    scale, offset = (
        None if part is None else part.repeat_interleave(layout.group, 1) for part in scales_and_offsets(scales, layout, inputs)
    )
    assert scale is not None, "each format has a scale"
    return codes * scale if offset is None else codes * scale + offset


_Blocks = tuple[Tensor, list[Tensor]]
"""Codes [outputs, blocks, inputs of a block], and parts of the scales, each [outputs, blocks, ...] of any dtype."""


def _cut(packed: Tensor, size: int) -> Tensor:
    """Cuts the bytes of each block into parts of `size`. Returns [outputs, blocks, parts, size]."""
    return packed.reshape(*packed.shape[:2], -1, size)


def _nibbles(packed: Tensor) -> Tensor:
    """Returns the low 4 bits of all bytes, then the high 4 bits, along the last dimension."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor, count: int, bits: int = 1) -> Tensor:
    """Returns `count` fields of each byte, lowest first: [..., count, bytes]."""
    shifts = bits * torch.arange(count, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(-2) >> shifts[:, None] & (1 << bits) - 1


def _q4_0(blocks: Tensor) -> _Blocks:
    return _nibbles(blocks[:, :, 2:]), [blocks[:, :, :2]]


def _q4_1(blocks: Tensor) -> _Blocks:
    return _nibbles(blocks[:, :, 4:]), [blocks[:, :, :4]]


def _fifth(packed: Tensor) -> Tensor:
    """Returns the highest of 5 bits: bit i of 32 in 4 bytes is that of input i."""
    return _bits(packed, 8).transpose(-1, -2).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> _Blocks:
    return _nibbles(blocks[:, :, 6:]) | _fifth(blocks[:, :, 2:6]), [blocks[:, :, :2]]


def _q5_1(blocks: Tensor) -> _Blocks:
    return _nibbles(blocks[:, :, 8:]) | _fifth(blocks[:, :, 4:8]), [blocks[:, :, :4]]


def _q8_0(blocks: Tensor) -> _Blocks:
    return blocks[:, :, 2:] ^ 128, [blocks[:, :, :2]]  # of an int8: 128 more


def _twos(packed: Tensor) -> Tensor:
    """Returns 256 fields of 2 bits of 64 bytes: each half of the bytes has 4 runs of 32 inputs."""
    return _bits(_cut(packed, 32), 4, 2).flatten(-3)


def _q2_k(blocks: Tensor) -> _Blocks:
    return _twos(blocks[:, :, 16:80]), [blocks[:, :, :16], blocks[:, :, 80:]]


def _q3_k(blocks: Tensor) -> _Blocks:
    codes = _twos(blocks[:, :, 32:96]) | _bits(blocks[:, :, :32], 8).flatten(-2) << 2
    packed = blocks[:, :, 96:108]
    scales = _nibbles(packed[:, :, :8]) | _bits(packed[:, :, 8:], 4, 2).flatten(-2) << 4
    return codes, [scales - 32, blocks[:, :, 108:]]  # two's complement


def _six(packed: Tensor) -> Tensor:
    """Returns scale and offset of 8 groups in turn, from 12 bytes with 6 bits for each."""
    first, second, mixed = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), 2)
    offsets = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), 2)
    return torch.stack((scales, offsets), 3).flatten(2)


def _q4_k(blocks: Tensor) -> _Blocks:
    return _nibbles(_cut(blocks[:, :, 16:], 32)).flatten(-2), [_six(blocks[:, :, 4:16]), blocks[:, :, :4]]


def _q5_k(blocks: Tensor) -> _Blocks:
    codes = _nibbles(_cut(blocks[:, :, 48:], 32)).flatten(-2)
    return codes | _bits(blocks[:, :, 16:48], 8).flatten(-2) << 4, [_six(blocks[:, :, 4:16]), blocks[:, :, :4]]


def _q6_k(blocks: Tensor) -> _Blocks:
    low = _nibbles(_cut(blocks[:, :, :128], 64)).flatten(-2)
    high = _bits(_cut(blocks[:, :, 128:192], 32), 4, 2).flatten(-3)
    return low | high << 4, [blocks[:, :, 192:208], blocks[:, :, 208:]]


def _iq4_nl(blocks: Tensor) -> _Blocks:
    return _nibbles(blocks[:, :, 2:]), [blocks[:, :, :2]]


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Returns the scales of the groups of IQ4_XS plus 32, uint8 [outputs, blocks, 8]."""
    low = torch.stack((blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4), 3).flatten(2)
    return low | _bits(blocks[:, :, 2:4], 4, 2).transpose(-1, -2).flatten(-2) << 4


def _iq4_xs(blocks: Tensor) -> _Blocks:
    scales = iq4_xs_scales(blocks) - 32  # two's complement
    return _nibbles(_cut(blocks[:, :, 8:], 16)).flatten(-2), [scales, blocks[:, :, :2]]


_SPLIT: Mapping[Kind, Callable[[Tensor], _Blocks]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
}
