"""Quantised weights in 32-bit words, as the GPU kernels read them; packing, unpacking and the torch reference.

Formats: `int8` with an fp32 scale per output; `int4` with a scale and an offset, two bfloat16, per output and `GROUP` inputs;
`fp8` (e4m3) with an fp32 scale per output and group of inputs, or per output. Checkpoints have further ones, to which nothing is
rounded: `mxfp4` (e2m1) with a power of two as the scale, `nvfp4` (e2m1) with a scale in e4m3 and a factor per output,
`float16_int4` and `bfloat16_int4` with a scale in that dtype and a zero point, and those of GGUF files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from phalanx_runtime.checkpoint.table_schemes import E2M1
from phalanx_runtime.model.ggml.codes import LAYOUTS, GgmlLayout, dequantize_planes, pack_planes, split_blocks
from phalanx_runtime.model.ggml.weight import GgmlWeight
from phalanx_runtime.model.linear.cpu import quantize
from phalanx_runtime.model.linear.grouped import GroupedBlocks
from phalanx_runtime.model.linear.integer import IntWeight

Format = Literal["int4", "int8", "fp8"]
GgmlFormat = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"]
PackedFormat = Literal[Format, "mxfp4", "nvfp4", "float16_int4", "bfloat16_int4", GgmlFormat]
GGML: Mapping[PackedFormat, GgmlLayout] = {kind.name.lower(): layout for kind, layout in LAYOUTS.items()}  # type: ignore[misc]
GROUP = 128
"""Inputs with a common scale and offset in int4."""
PACKED_AT_ONCE = 1 << 22
"""Weights in blocks of GGUF that are packed at once: each takes up to 8 bytes meanwhile."""
WIDTHS = (32, 16)
"""Words of a span, the preferred one first."""
_CODES: Mapping[PackedFormat, torch.dtype] = {"float16_int4": torch.float16, "bfloat16_int4": torch.bfloat16}
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


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Returns e4m3 values with a scale per output. weight: [outputs, inputs]."""
    dtype, weight = weight.dtype, weight.float()
    scales = weight.abs().amax(1, keepdim=True).clamp_min_(1e-30) / FP8_MAX
    values = (weight / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Weight(values=values, scales=scales, group=weight.shape[1], dtype=dtype)


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values 0 to 15 [outputs, inputs] and bfloat16 scales and offsets [outputs, groups]: value * scale + offset."""
    outputs, inputs = weight.shape
    weight = weight.float()
    padded = torch.cat((weight, weight[:, -1:].expand(-1, -inputs % GROUP)), 1).view(outputs, -1, GROUP)
    offsets = padded.amin(2).bfloat16()
    scales = ((padded.amax(2) - offsets.float()) / 15).clamp_min_(1e-30).bfloat16()
    values = (padded - offsets.float()[:, :, None]).div_(scales.float()[:, :, None]).round_().clamp_(0, 15)
    return values.to(torch.uint8).view(outputs, -1)[:, :inputs], scales, offsets


def as_int4(weight: Tensor) -> IntWeight:
    """Returns the weight as `quantize_int4` rounds it. weight: [outputs, inputs]."""
    values, scales, offsets = quantize_int4(weight)
    groups = torch.arange(weight.shape[1], device=weight.device) // GROUP
    return IntWeight(codes=values, scales=scales, zeros=None, groups=groups, bits=4, dtype=weight.dtype, offsets=offsets)


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
        return words, -(-num_groups // 4) + 1 if self.format == "nvfp4" else num_groups

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales."""
        if self.format == "mxfp4":
            return torch.uint8
        return torch.float32 if self.format in ("int8", "fp8") else torch.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A quantised weight, or with another dimension in front of both tensors those of a layer's experts.

    A span of inputs is `width` words: field j of word c is input j * width + c of the span.
    """

    words: Tensor
    """int32 [outputs, spans * width], padded to whole spans; GGUF: as `pack_planes` returns them."""
    scales: Tensor
    """fp32 [outputs, groups]; mxfp4: uint8, e8m0; nvfp4: int32, bytes of e4m3 and at last an fp32 factor; GGUF: as `split_blocks`
    has them; others of 4 bits: int32, bits of the scale below the offset or zero point."""
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
        if self.format == "nvfp4":
            cut = -(-self.inputs // self.group)
            scales = self.scales[:, :-1].contiguous().view(FP8)[:, :cut].float().to(wide).repeat_interleave(self.group, 1)
            table = torch.tensor(E2M1, dtype=wide, device=fields.device)
            factors = self.scales[:, -1:].contiguous().view(torch.float32).to(wide)
            return (table[fields.int()] * scales[:, : self.inputs] * factors).to(dtype)
        if self.format in _CODES:
            stored = self.scales.view(torch.int16).view(self.outputs, -1, 2).repeat_interleave(self.group, 1)[:, : self.inputs]
            scales = stored[:, :, 0].contiguous().view(_CODES[self.format]).to(wide)
            return ((fields.to(wide) - stored[:, :, 1]) * scales).to(dtype)
        if self.format == "fp8":
            return Fp8Weight(values=fields.view(FP8), scales=self.scales, group=self.group, dtype=dtype).dequantize(dtype)
        if self.format == "int8":
            scales = self.scales.to(wide).repeat_interleave(self.group, 1)[:, : self.inputs]
            return ((fields.to(wide) - 128) * scales).to(dtype)
        pairs = self.scales.view(torch.bfloat16).view(self.outputs, -1, 2).to(wide).repeat_interleave(self.group, 1)
        scales, offsets = pairs[:, : self.inputs].unbind(2)
        return (fields.to(wide) * scales + offsets).to(dtype)


def pack(weight: Tensor | Fp8Weight, kind: Format) -> PackedWeight:
    """Quantises to `kind`, or packs what is quantised. A group must be a multiple of 16. weight: [outputs, inputs]."""
    if isinstance(weight, Fp8Weight) or kind == "fp8":
        fp8 = weight if isinstance(weight, Fp8Weight) else quantize_fp8(weight)
        is_whole = fp8.scales.shape[1] == 1
        width = next(width for width in WIDTHS if is_whole or fp8.group % width == 0)
        group = -(-fp8.group // width) * width if is_whole else fp8.group
        return _packed(fp8.values.contiguous().view(torch.uint8), fp8.scales.contiguous(), "fp8", group=group, width=width)
    inputs = weight.shape[1]
    if kind == "int8":
        values, scales = quantize(weight)
        fields = (values.to(torch.int16) + 128).to(torch.uint8)
        return _packed(fields, scales[:, None].contiguous(), kind, group=-(-inputs // WIDTHS[0]) * WIDTHS[0], width=WIDTHS[0])
    fields, scale, offset = quantize_int4(weight)
    return _packed(fields, torch.stack((scale, offset), 2).view(torch.int32)[:, :, 0].contiguous(), kind, group=GROUP, width=16)


def pack_codes(weight: IntWeight) -> PackedWeight | None:
    """Packs codes of a checkpoint as they are; None if no format has exactly their values."""
    found = None if weight.offsets is not None or weight.is_e4m3 else _runs(weight)
    if found is None:
        return None
    size, places = found
    if weight.table is not None:
        return _pack_e2m1(weight, weight.table, size, places)
    if weight.bits == 4:
        return _pack_int4(weight, size, places)
    if weight.zeros is not None:
        return None
    width = next(width for width in WIDTHS if size % width == 0)
    return _packed(weight.codes, weight.scales.float()[:, places].contiguous(), "int8", group=size, width=width)


def pack_ggml(weight: GgmlWeight) -> PackedWeight:
    """Packs whole blocks of a weight with one part; `skipped` inputs are among them."""
    (part,) = weight.parts
    (outputs, num_bytes), (block, block_bytes) = part.raw.shape, GGML_QUANT_SIZES[part.kind]
    inputs, ggml = num_bytes // block_bytes * block, LAYOUTS[part.kind]
    name: PackedFormat = part.kind.name.lower()  # type: ignore[assignment]
    layout = PackedLayout(name, ggml.group, WIDTHS[-1])
    words, scales = (part.raw.new_empty((outputs, size), dtype=torch.int32) for size in layout.row_sizes(inputs))
    step = max(1, PACKED_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        codes, scales[rows] = split_blocks(part.kind, part.raw[rows])
        words[rows] = pack_planes(codes, ggml, layout.width)
    return PackedWeight(
        words=words, scales=scales, format=name, group=ggml.group, width=layout.width, outputs=outputs, inputs=inputs
    )


def _runs(weight: IntWeight) -> tuple[int, Tensor] | None:
    """Returns a length, a multiple of 16 inputs, and the group of each run of that length; None if inputs of a run differ in it.

    The columns of a tensor-parallel rank may begin within a group: then runs are shorter than groups, and repeat their scales.
    """
    groups = weight.groups
    if weight.scales.shape[1] == 1:
        return -(-len(groups) // WIDTHS[0]) * WIDTHS[0], groups[:1]
    for size in (int((groups == 0).sum()), 128, 64, 32, 16):
        if size and size % WIDTHS[-1] == 0 and torch.equal(groups[::size].repeat_interleave(size)[: len(groups)], groups):
            return size, groups[::size]
    return None


def _pack_int4(weight: IntWeight, size: int, places: Tensor) -> PackedWeight | None:
    for kind, dtype in _CODES.items():
        scales = weight.scales.to(dtype)
        if torch.equal(scales.float(), weight.scales.float()):
            pairs = torch.stack((scales.view(torch.int16), weight.all_zeros().to(torch.int16)), 2)[:, places].contiguous()
            return _packed(weight.codes, pairs.view(torch.int32)[:, :, 0], kind, group=size, width=WIDTHS[-1])
    return None


def _pack_e2m1(weight: IntWeight, table: Tensor, size: int, places: Tensor) -> PackedWeight | None:
    if not torch.equal(table, torch.tensor(E2M1, device=table.device)):
        return None
    if weight.scales.dtype == torch.float8_e8m0fnu and weight.factors is None:
        scales = weight.scales.view(torch.uint8)[:, places].contiguous()
        return _packed(weight.codes, scales, "mxfp4", group=size, width=WIDTHS[-1])
    if weight.scales.dtype == FP8 and weight.factors is not None:
        scales = weight.scales.view(torch.uint8)[:, places]
        words = F.pad(scales, (0, -scales.shape[1] % 4)).contiguous().view(torch.int32)
        scales = torch.cat((words, weight.factors[:, None].contiguous().view(torch.int32)), 1)
        return _packed(weight.codes, scales, "nvfp4", group=size, width=WIDTHS[-1])
    return None


def _packed(fields: Tensor, scales: Tensor, kind: PackedFormat, *, group: int, width: int) -> PackedWeight:
    outputs, inputs = fields.shape
    bits = PackedLayout(kind, group, width).bits
    num_fields = 32 // bits
    spans = F.pad(fields, (0, -inputs % (num_fields * width))).view(outputs, -1, num_fields, width)
    words = spans[:, :, 0].to(torch.int32)
    for field in range(1, num_fields):
        words |= spans[:, :, field].to(torch.int32) << bits * field
    return PackedWeight(
        words=words.view(outputs, -1), scales=scales, format=kind, group=group, width=width, outputs=outputs, inputs=inputs
    )


def unpack(words: Tensor, bits: int, width: int) -> Tensor:
    """Returns the fields in the order of the inputs, uint8 [outputs, padded inputs]. words: as in `PackedWeight`."""
    spans = words.view(words.shape[0], -1, width)
    fields = [(spans >> bits * field & (1 << bits) - 1).to(torch.uint8) for field in range(32 // bits)]
    return torch.stack(fields, 2).view(words.shape[0], -1)


class DequantizedLinear:
    """`Linear` that dequantises its weight to the dtype of x in each call: the reference of kernels with packed weights."""

    __slots__ = ("bias", "num_bytes", "weight")

    def __init__(self, weight: PackedWeight | GroupedBlocks | GgmlWeight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self.weight.dequantize(x.dtype), self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))
