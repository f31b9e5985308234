"""Linears with quantised weights by Triton kernels: tiles, launches and the backend. Reference: `DequantizedLinear`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, power_of_two, variant_of
from phalanx_runtime.model.linear import triton_kernels as kernels
from phalanx_runtime.model.linear import triton_rows
from phalanx_runtime.model.linear.packed.weight import GGML, PackedFormat, PackedWeight
from phalanx_runtime.model.operators import operator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS: Mapping[PackedFormat, int] = {
    **{"int4": 4, "mxfp4": 5, "float16_int4": 6, "bfloat16_int4": 7, "int8": 8, "fp8": 9, "nvfp4": 10, "table4": 11},
    **{name: 16 + int(GGMLQuantizationType[name.upper()]) for name in GGML},
}
"""The kernels' constant by format."""
MAX_ROWS: Mapping[int, int] = {4: 2, 8: 4}
"""Rows that are multiplied without tensor cores, by the bits of a weight."""
ROW_OUTPUTS = 4
ROW_WARPS = 4
ROW_WORDS = 256
"""Words of each output that a program of `multiply_rows` loads at once."""
MAX_SPLITS = 8
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs that splits of the inputs aim at."""
DEFAULT_MULTIPROCESSORS = 132
"""Of an H100, where no device is present."""


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Tile of `multiply_tiles` and its compilation."""

    block_outputs: int
    block_rows: int
    num_warps: int
    num_stages: int
    """Stages of the load pipeline."""


SMALL, MEDIUM = LinearTile(32, 16, 4, 4), LinearTile(64, 32, 4, 3)
TILES: Mapping[int, Mapping[int, LinearTile]] = {
    8: {16: SMALL, 32: MEDIUM, 1 << 30: LinearTile(64, 64, 4, 3)},
    9: {16: SMALL, 32: MEDIUM, 1 << 30: LinearTile(128, 64, 4, 3)},
    10: {16: SMALL, 32: MEDIUM, 1 << 30: LinearTile(128, 64, 4, 3)},
}
"""By major compute capability, then by the largest number of rows."""


def tile_of(num_rows: int, capability: int) -> LinearTile:
    """Returns the tile. `capability`: major compute capability; unknown ones get the nearest older one's."""
    by_rows = TILES[max((known for known in TILES if known <= capability), default=min(TILES))]
    return next(tile for most, tile in by_rows.items() if num_rows <= most)


def num_splits(tile: LinearTile, num_rows: int, weight: PackedWeight, num_multiprocessors: int) -> int:
    """Returns the splits of the inputs that fill the device, a power of two. Nothing else decides, as CUDA graphs require."""
    programs = -(-num_rows // tile.block_rows) * -(-weight.outputs // tile.block_outputs)
    wanted = min(MAX_SPLITS, num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(1, programs))
    most = min(wanted, -(-weight.inputs // weight.span) // tile.num_stages)
    return 1 << max(0, most.bit_length() - 1)


def constants_of(weight: PackedWeight, *, has_bias: bool, add: bool) -> dict[str, Any]:
    """Returns the compile-time arguments that both kernels have."""
    return {
        "WIDTH": weight.width,
        "FORMAT": FORMATS[weight.format],
        "GROUP": weight.group if weight.scales.shape[-1] > 1 or weight.layout.scale_dtype != torch.float32 else 0,
        "HAS_BIAS": has_bias,
        "ADD": add,
    }


def row_constants(num_rows: int, width: int) -> dict[str, Any]:
    """Returns the other compile-time arguments of `multiply_rows`."""
    return {"ROWS": power_of_two(num_rows), "BLOCK_OUTPUTS": ROW_OUTPUTS, "BLOCK_SPANS": ROW_WORDS // width}


def tile_constants(tile: LinearTile, splits: int) -> dict[str, Any]:
    """Returns the other compile-time arguments of `multiply_tiles`."""
    return {"BLOCK_ROWS": tile.block_rows, "BLOCK_OUTPUTS": tile.block_outputs, "SPLITS": splits}


def _tile_options(tile: LinearTile, itemsize: int) -> dict[str, int]:
    """Returns the options of the compilation. Wider tiles of float32 fill the shared memory: they have one stage."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages if itemsize == 2 else 1}


@operator(
    "multiply_packed(Tensor x, Tensor words, Tensor scales, Tensor? bias, Tensor(a!) y, Tensor(b!)[] partial, str format, "
    "int[] layout, int[] tile, bool add)"
)
def _multiply_packed(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    y: Tensor,
    partial: Sequence[Tensor],
    format: PackedFormat,
    layout: Sequence[int],
    tile: Sequence[int],
    add: bool,
) -> None:
    """`partial`: sums and arrivals of splits. `layout`: group, width. `tile`: a `LinearTile` and splits; empty: few rows."""
    (rows, inputs), (outputs, word_stride), (group, width) = x.shape, words.shape, layout
    weight = PackedWeight(words=words, scales=scales, format=format, group=group, width=width, outputs=outputs, inputs=inputs)
    tensors = {"x": x, "words": words, "scales": scales, "bias": x if bias is None else bias, "y": y}
    sizes = {"num_rows": rows, "outputs": outputs, "inputs": inputs, "num_groups": scales.shape[1]}
    strides = {"x_stride": x.stride(0), "word_stride": word_stride, "y_stride": y.stride(0)}
    constants = constants_of(weight, has_bias=bias is not None, add=add)
    arguments = {**tensors, **sizes, **strides, **constants}
    if not tile:
        blocks = num_blocks(outputs, ROW_OUTPUTS)
        launch(kernels.multiply_rows, (blocks,), {**arguments, **row_constants(rows, width)}, num_warps=ROW_WARPS)
        return
    config, splits = LinearTile(*tile[:-1]), tile[-1]
    sums, arrivals = partial or (x, x)
    grid = (num_blocks(outputs, config.block_outputs), num_blocks(rows, config.block_rows), splits)
    arguments |= {"partial": sums, "arrivals": arrivals, **tile_constants(config, splits)}
    launch(kernels.multiply_tiles, grid, arguments, **_tile_options(config, x.element_size()))


@dataclass(frozen=True, slots=True)
class GpuShape:
    """What launches depend on."""

    num_multiprocessors: int = DEFAULT_MULTIPROCESSORS
    capability: int = 9
    """Major compute capability."""
    has_fp8: bool = True
    """Whether its tensor cores multiply e4m3."""


@cache
def read_gpu_shape() -> GpuShape:
    """Reads the current device; an H100 without one."""
    if not torch.cuda.is_available():
        return GpuShape()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    has_fp8 = torch.version.hip is None and (properties.major, properties.minor) >= (8, 9)
    return GpuShape(properties.multi_processor_count, properties.major, has_fp8)


class PackedTritonLinear:
    """`Linear` by the kernels, in one launch: few rows without tensor cores, more by tiles; few tiles split the inputs."""

    __slots__ = ("_arrivals", "_gpu", "bias", "num_bytes", "weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None, gpu: GpuShape | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._gpu = gpu or read_gpu_shape()
        most = self._gpu.num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // 2
        self._arrivals = torch.zeros(most, dtype=torch.int32, device=weight.words.device)
        self.num_bytes = weight.num_bytes + self._arrivals.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = torch.empty((x.shape[0], self.weight.outputs), dtype=x.dtype, device=x.device)
        self._multiply(x, y, add=False)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`. Rounds once."""
        self._multiply(x, residual, add=True)

    def _multiply(self, x: Tensor, y: Tensor, *, add: bool) -> None:
        weight, rows = self.weight, x.shape[0]
        if rows == 0:
            return
        x = x if x.stride(1) == 1 else x.contiguous()
        tile: tuple[int, ...] = ()
        partial: list[Tensor] = []
        if rows > MAX_ROWS[weight.bits]:
            config, splits = self._tile(rows)
            tile = (*astuple(config), splits)
            if splits > 1:
                outputs, padded = (-(-size // block) * block for size, block in ((weight.outputs, tile[0]), (rows, tile[1])))
                partial = [torch.empty(splits * outputs * padded, dtype=torch.float32, device=x.device), self._arrivals]
        _multiply_packed(
            x=x,
            words=weight.words,
            scales=weight.scales,
            bias=self.bias,
            y=y,
            partial=partial,
            format=weight.format,
            layout=(weight.group, weight.width),
            tile=tile,
            add=add,
        )

    def _tile(self, rows: int) -> tuple[LinearTile, int]:
        """Returns the tile of this many rows, and the splits of the inputs."""
        tile = tile_of(rows, self._gpu.capability)
        return tile, num_splits(tile, rows, self.weight, self._gpu.num_multiprocessors)

    def _tiles(self, rows: int) -> list[tuple[LinearTile, int]]:
        """Returns each tile with each of its numbers of splits, for `rows` and more: at last the largest tile without splits."""
        found = dict[tuple[LinearTile, int], None]()
        while (one := self._tile(rows)) != (tile_of(1 << 29, self._gpu.capability), 1):
            found[one] = None
            rows += one[0].block_rows - (rows - 1) % one[0].block_rows  # the next row that needs a further block
        return [*found, one]

    def variants(self, dtype: torch.dtype, *, add: bool) -> list[KernelVariant]:
        """Returns the variants of any number of contiguous rows of a dtype. `add`: those of `add_to`."""
        weight, most = self.weight, MAX_ROWS[self.weight.bits]
        arguments = {
            **dict.fromkeys(("x", "bias", "y"), dtype),
            "words": torch.int32,
            "scales": weight.scales.dtype,
            **dict.fromkeys(("num_rows", "outputs", "num_groups"), 1),
            "inputs": weight.inputs,
            "x_stride": weight.inputs,
            "word_stride": weight.words.shape[1],
            "y_stride": weight.outputs,
            **constants_of(weight, has_bias=self.bias is not None, add=add),
        }
        found = [
            variant_of(kernels.multiply_rows, {**arguments, **row_constants(1 << size, weight.width)}, num_warps=ROW_WARPS)
            for size in range(most.bit_length())
        ]
        for tile, splits in self._tiles(most + 1):
            partial = {"partial": torch.float32, "arrivals": torch.int32} if splits > 1 else {"partial": dtype, "arrivals": dtype}
            constants = tile_constants(tile, splits)
            options = _tile_options(tile, dtype.itemsize)
            found.append(variant_of(kernels.multiply_tiles, {**arguments, **partial, **constants}, **options))
        return found


class ArrangedLinear:
    """`Linear` that arranges x first: in the order of groups (GPTQ's activation order), or padded to whole blocks."""

    __slots__ = ("_arrange", "_linear", "num_bytes")

    def __init__(self, linear: PackedTritonLinear, arrange: Callable[[Tensor], Tensor], num_bytes: int = 0) -> None:
        """`num_bytes`: of what `arrange` holds."""
        self._linear = linear
        self._arrange = arrange
        self.num_bytes = linear.num_bytes + num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._linear(self._arrange(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        self._linear.add_to(residual, self._arrange(x))

    def variants(self, dtype: torch.dtype, *, add: bool) -> list[KernelVariant]:
        """See `PackedTritonLinear`."""
        return self._linear.variants(dtype, add=add)


def read_constants(weight: PackedWeight) -> dict[str, Any]:
    """Returns the compile-time arguments of `read_rows`."""
    constants = constants_of(weight, has_bias=False, add=False)
    return {"BLOCK_SPANS": ROW_WORDS // weight.width, **{name: constants[name] for name in ("WIDTH", "FORMAT", "GROUP")}}


@operator("read_packed(Tensor index, Tensor words, Tensor scales, Tensor(a!) out, str format, int[] layout)")
def _read_packed(index: Tensor, words: Tensor, scales: Tensor, out: Tensor, format: PackedFormat, layout: Sequence[int]) -> None:
    """`layout`: group, width."""
    (group, width), (rows, inputs) = layout, out.shape
    sizes = {"outputs": words.shape[0], "inputs": inputs}
    weight = PackedWeight(words=words, scales=scales, format=format, group=group, width=width, **sizes)
    constants = read_constants(weight)
    tensors = {"index": index, "words": words, "scales": scales, "out": out}
    strides = {"inputs": inputs, "num_groups": scales.shape[1], "word_stride": words.shape[1]}
    grid = (rows, num_blocks(inputs, constants["BLOCK_SPANS"] * weight.span))
    launch(triton_rows.read_rows, grid, {**tensors, **strides, **constants}, num_warps=ROW_WARPS)


class PackedRows:
    """Rows of a weight whose scales are those of groups, dequantised when they are read: an embedding."""

    __slots__ = ("_dtype", "weight")

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        self.weight = weight
        self._dtype = dtype

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns rows, [n, inputs]. index: [n], of rows that exist."""
        weight = self.weight
        rows = torch.empty((len(index), weight.inputs), dtype=self._dtype, device=index.device)
        if len(index):
            _read_packed(index, weight.words, weight.scales, rows, format=weight.format, layout=(weight.group, weight.width))
        return rows

    def variants(self, dtype: torch.dtype, *, add: bool) -> list[KernelVariant]:
        """Returns the variant for ids of tokens in 64 bits, as steps have them. The arguments are not used."""
        weight = self.weight
        strides = {"inputs": weight.inputs, "num_groups": weight.scales.shape[1], "word_stride": weight.words.shape[1]}
        tensors = {"words": torch.int32, "scales": weight.scales.dtype, "out": self._dtype}
        arguments = {**tensors, **strides, **read_constants(weight)}
        return [variant_of(triton_rows.read_rows, {"index": torch.int64, **arguments}, num_warps=ROW_WARPS)]
