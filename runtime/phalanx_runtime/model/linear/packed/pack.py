"""Packs weights: rounds them, or keeps the codes of checkpoints and the blocks of GGUF files exactly."""

import torch
import torch.nn.functional as F
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from phalanx_runtime.checkpoint.schemes.tables import E2M1
from phalanx_runtime.model.ggml.codes import LAYOUTS, pack_planes, split_blocks
from phalanx_runtime.model.ggml.weight import GgmlWeight
from phalanx_runtime.model.linear.cpu import quantize
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.packed.weight import (
    CODE_DTYPES,
    FP8,
    FP8_MAX,
    WIDTHS,
    Format,
    Fp8Weight,
    PackedFormat,
    PackedLayout,
    PackedWeight,
)

GROUP = 128
"""Inputs with a common scale and offset in int4."""
PACKED_AT_ONCE = 1 << 22
"""Weights in blocks of GGUF that are packed at once: each takes up to 8 bytes meanwhile."""


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
    weight = weight.with_plain_scales()
    found = None if weight.offsets is not None or weight.is_e4m3 else _runs(weight)
    if found is None:
        return None
    size, places = found
    if weight.table is not None:
        return _pack_e2m1(weight, weight.table, size, places) or _pack_table(weight, weight.table, size, places)
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
    for kind, dtype in CODE_DTYPES.items():
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


def _pack_table(weight: IntWeight, table: Tensor, size: int, places: Tensor) -> PackedWeight | None:
    if weight.factors is not None:
        return None
    scales = torch.cat((weight.scales.float()[:, places], table.float().expand(weight.outputs, -1)), 1)
    return _packed(weight.codes, scales, "table4", group=size, width=WIDTHS[-1])


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
