"""Quantised weights in 32-bit words, as the GPU kernels read them.

Formats: `int8` with an fp32 scale per output; `int4` with a scale and an offset, two bfloat16, per output and 128 inputs;
`fp8` (e4m3) with an fp32 scale per output and group of inputs, or per output. Checkpoints have further ones, to which nothing is
rounded: `mxfp4` (e2m1) with a power of two as the scale, `nvfp4` (e2m1) with a scale in e4m3 and a factor per output,
`float16_int4` and `bfloat16_int4` with a scale in that dtype and a zero point, `table4` with an fp32 scale and values of its own
(nf4), and those of GGUF files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.schemes.tables import E2M1
from phalanx_runtime.model.ggml.codes import LAYOUTS, GgmlLayout, dequantize_planes
from phalanx_runtime.model.linear.integer import IntWeight

Format = Literal["int4", "int8", "fp8"]
GgmlFormat = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"]
PackedFormat = Literal[Format, "mxfp4", "nvfp4", "table4", "float16_int4", "bfloat16_int4", GgmlFormat]
GGML: Mapping[PackedFormat, GgmlLayout] = {kind.name.lower(): layout for kind, layout in LAYOUTS.items()}  # type: ignore[misc]
TABLE_SIZE = 16
"""Values of codes of 4 bits."""
WIDTHS = (32, 16)
"""Words of a span, the preferred one first."""
CODE_DTYPES: Mapping[PackedFormat, torch.dtype] = {"float16_int4": torch.float16, "bfloat16_int4": torch.bfloat16}
"""Formats of codes with zero points, and the dtype of their scales."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight in e4m3: values * scales."""

    values: Tensor
    """float8_e4m3fn [outputs, inputs]."""
    scales: Tensor
    """fp32 [outputs, groups]."""
    group: int
    """Inputs with a common scale; the last group may be smaller."""
    dtype: torch.dtype
    """Compute dtype."""

    @property
    def can_pack(self) -> bool:
        """Whether `pack` supports its groups."""
        return self.scales.shape[1] == 1 or self.group % WIDTHS[-1] == 0

    def as_codes(self) -> IntWeight:
        """Returns the same weight in codes. Groups with equal scales, which a cut block may have many of, become one."""
        differs = (self.scales[:, 1:] != self.scales[:, :-1]).any(0)
        is_first = torch.cat((differs.new_ones(1), differs))
        groups = (is_first.cumsum(0) - 1)[torch.arange(self.values.shape[1], device=self.values.device) // self.group]
        return IntWeight(
            codes=self.values.view(torch.uint8),
            scales=self.scales[:, is_first],
            zeros=None,
            groups=groups,
            bits=8,
            dtype=self.dtype,
            is_e4m3=True,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [outputs, inputs], rounded once: from fp32, or float64 if that is `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.scales.to(wide).repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return (self.values.to(wide) * scales).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How weights of one shape are packed. Fields as in `PackedWeight`."""

    format: PackedFormat
    group: int
    width: int

    @property
    def bits(self) -> int:
        """Bits of a field: 8, or 4; a field of the planes of other GGUF formats than Q8_0 counts as 4."""
        return 8 if self.format in ("int8", "fp8", "q8_0") else 4

    @property
    def span(self) -> int:
        """Inputs of a span."""
        return 32 // self.bits * self.width

    def row_sizes(self, inputs: int) -> tuple[int, int]:
        """Returns words and scales of an output, as `PackedWeight` has them."""
        words = -(-inputs // self.span) * self.width
        if (ggml := GGML.get(self.format)) is not None:
            return ggml.word_bytes(words) // 4, ggml.scale_words(inputs)
        num_groups = -(-inputs // self.group)
        if self.format == "nvfp4":
            return words, -(-num_groups // 4) + 1
        return words, num_groups + (TABLE_SIZE if self.format == "table4" else 0)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales."""
        if self.format == "mxfp4":
            return torch.uint8
        return torch.float32 if self.format in ("int8", "fp8", "table4") else torch.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A quantised weight, or with another dimension in front of both tensors those of a layer's experts.

    A span of inputs is `width` words: field j of word c is input j * width + c of the span.
    """

    words: Tensor
    """int32 [outputs, spans * width], padded to whole spans; GGUF: as `pack_planes` returns them."""
    scales: Tensor
    """fp32 [outputs, groups], in table4 followed by the values; mxfp4: uint8, e8m0; nvfp4: int32, bytes of e4m3, then a factor in
    fp32; GGUF: as `split_blocks` returns them; others of 4 bits: int32, bits of the scale below the offset or zero point."""
    format: PackedFormat
    group: int
    """Inputs with a common scale; a multiple of `width`."""
    width: int
    outputs: int
    inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return self.words.nbytes + self.scales.nbytes

    @property
    def bits(self) -> int:
        """Bits of a field."""
        return self.layout.bits

    @property
    def layout(self) -> "PackedLayout":
        """How it is packed."""
        return PackedLayout(self.format, self.group, self.width)

    @property
    def span(self) -> int:
        """Inputs of a span."""
        return self.layout.span

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the dimension of experts."""
        return self.outputs, self.inputs

    def __getitem__(self, number: int) -> "PackedWeight":
        """Returns a view of one expert's weight."""
        return replace(self, words=self.words[number], scales=self.scales[number])

    def new_empty(self, shape: tuple[int, ...]) -> "PackedWeight":
        """Returns uninitialised weights of this layout. shape: [experts, outputs, inputs]."""
        words, scales = (part.new_empty((shape[0], *part.shape)) for part in (self.words, self.scales))
        return replace(self, words=words, scales=scales)

    def copy_(self, other: "PackedWeight") -> None:
        """Copies another one's words and scales."""
        self.words.copy_(other.words)
        self.scales.copy_(other.scales)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [outputs, inputs], rounded once: from fp32, or float64 if that is `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        if (ggml := GGML.get(self.format)) is not None:
            return dequantize_planes(self.words, self.scales, ggml, self.width, self.inputs).to(dtype)
        fields = unpack(self.words, self.bits, self.width)[:, : self.inputs]
        if self.format == "mxfp4":
            scales = self.scales.view(torch.float8_e8m0fnu).float().to(wide).repeat_interleave(self.group, 1)
            table = torch.tensor(E2M1, dtype=wide, device=fields.device)
            return (table[fields.int()] * scales[:, : self.inputs]).to(dtype)
        if self.format == "table4":
            scales, table = (part.to(wide) for part in (self.scales[:, :-TABLE_SIZE], self.scales[:, -TABLE_SIZE:]))
            return (table.gather(1, fields.long()) * scales.repeat_interleave(self.group, 1)[:, : self.inputs]).to(dtype)
        if self.format == "nvfp4":
            cut = -(-self.inputs // self.group)
            scales = self.scales[:, :-1].contiguous().view(FP8)[:, :cut].float().to(wide).repeat_interleave(self.group, 1)
            table = torch.tensor(E2M1, dtype=wide, device=fields.device)
            factors = self.scales[:, -1:].contiguous().view(torch.float32).to(wide)
            return (table[fields.int()] * scales[:, : self.inputs] * factors).to(dtype)
        if self.format in CODE_DTYPES:
            stored = self.scales.view(torch.int16).view(self.outputs, -1, 2).repeat_interleave(self.group, 1)[:, : self.inputs]
            scales = stored[:, :, 0].contiguous().view(CODE_DTYPES[self.format]).to(wide)
            return ((fields.to(wide) - stored[:, :, 1]) * scales).to(dtype)
        if self.format == "fp8":
            return Fp8Weight(values=fields.view(FP8), scales=self.scales, group=self.group, dtype=dtype).dequantize(dtype)
        if self.format == "int8":
            scales = self.scales.to(wide).repeat_interleave(self.group, 1)[:, : self.inputs]
            return ((fields.to(wide) - 128) * scales).to(dtype)
        pairs = self.scales.view(torch.bfloat16).view(self.outputs, -1, 2).to(wide).repeat_interleave(self.group, 1)
        scales, offsets = pairs[:, : self.inputs].unbind(2)
        return (fields.to(wide) * scales + offsets).to(dtype)


def unpack(words: Tensor, bits: int, width: int) -> Tensor:
    """Returns the fields in the order of the inputs, uint8 [outputs, padded inputs]. words: as in `PackedWeight`."""
    spans = words.view(words.shape[0], -1, width)
    fields = [(spans >> bits * field & (1 << bits) - 1).to(torch.uint8) for field in range(32 // bits)]
    return torch.stack(fields, 2).view(words.shape[0], -1)
