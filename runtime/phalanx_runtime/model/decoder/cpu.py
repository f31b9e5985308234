"""`DecoderOps` in C++, in one pass each, and all layers of a step in one call."""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from weakref import ref

import torch
from torch import Tensor

from phalanx_runtime.model.attention.cpu import NativeAttention, can_attend, can_decode, page_addresses
from phalanx_runtime.model.attention.page_format import hadamard_size
from phalanx_runtime.model.attention.paged import Attention, LayerCache, StepBatch
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.decoder.decoder import Layer, StepLayers
from phalanx_runtime.model.layers import DecoderOps, HeadNorm, Heads, QkNorm, TorchOps, rms_norm
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear
from phalanx_runtime.model.native.library import Library, library
from phalanx_runtime.model.rope import Angles, Rope, rotate

_NormSizes = ctypes.c_int64 * 3
_HeadSizes = ctypes.c_int64 * 4
_RotateSizes = ctypes.c_int64 * 5
_BUFFERS, _ALIGNMENT = 6, 64
"""Of a step's scratch memory, in bytes."""
_MAX_STACKS = 8
"""Parts of the layers whose tables are kept: a self-draft computes the first layers alone, and Qwen3-VL adds to images between
the first ones."""
_DTYPES = (torch.float32, torch.bfloat16)


class NativeOps(TorchOps):
    """`DecoderOps` with kernels for norm and rotation; unsupported dtypes and strides use torch."""

    __slots__ = ("_functions",)

    def __init__(self, library: Library) -> None:
        self._functions = library.functions

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps`."""
        if x.dtype not in _DTYPES or weight.dtype not in (x.dtype, torch.float32) or x.dim() != 2 or x.stride(1) != 1:
            return rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = _NormSizes(x.shape[0], x.shape[1], x.stride(0))
        is_bf16 = (x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16)
        self._functions.phalanx_norm(*is_bf16, x.data_ptr(), weight.data_ptr(), out.data_ptr(), sizes, eps)
        return out

    def prepare_heads(self, qkv: Tensor, norm: QkNorm | None, angles: Angles | None, cache: LayerCache, slots: Tensor) -> Heads:
        """See `DecoderOps`; writes no pages."""
        if isinstance(norm, HeadNorm) and self._can_norm_heads(qkv, norm):
            kv_heads = cache.k.shape[1]
            heads = qkv.shape[1] - 2 * kv_heads
            for part, weight in ((qkv[:, :heads], norm.q), (qkv[:, heads : heads + kv_heads], norm.k)):
                sizes = _HeadSizes(*part.shape, part.stride(0))
                is_bf16 = (part.dtype == torch.bfloat16, weight.dtype == torch.bfloat16)
                self._functions.phalanx_norm_heads(*is_bf16, part.data_ptr(), weight.data_ptr(), sizes, norm.eps)
            norm = None
        return super().prepare_heads(qkv, norm, angles, cache, slots)

    def _can_norm_heads(self, qkv: Tensor, norm: HeadNorm) -> bool:
        is_packed = qkv.stride(2) == 1 and qkv.stride(1) == qkv.shape[2]
        return is_packed and qkv.dtype in _DTYPES and {norm.q.dtype, norm.k.dtype} <= {qkv.dtype, torch.float32}

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Applies the rotary embedding to [tokens, heads, dim], in place."""
        cos, sin = angles
        if x.dtype not in _DTYPES or cos.dtype != x.dtype or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            return rotate(x, angles)
        sizes = _RotateSizes(*x.shape, cos.shape[-1], x.stride(0))
        self._functions.phalanx_rotate(x.dtype == torch.bfloat16, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), sizes)
        return x


def open_cpu_ops() -> DecoderOps:
    """Opens the kernels, or torch's operations where they cannot compile."""
    compiled = library()
    return TorchOps() if compiled is None else NativeOps(compiled)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers as `phalanx_layers` reads them."""

    layers: Sequence[Layer]
    table: Tensor | None
    """int64 [layers, words]; None: a layer is not supported."""
    numbers: Tensor
    """float64 [layers, 2]: scale and softcap of attention."""
    ropes: Sequence[Rope]
    """Distinct ones, in the order of their indexes in the table."""
    smallest_window: int | None


@dataclass(frozen=True, slots=True)
class _AttentionParts:
    """The requests of a step as a kernel of attention reads them."""

    table: Tensor
    has_runs: bool
    """Runs of the step kernel; else bands of the decode kernel."""


class NativeLayers:
    """`StepLayers` by the kernels of `NativeLinear`, `NativeGated`, `NativeOps` and `NativeAttention`, in the decoder's order.

    Supported are layers with norms before both halves and silu: any step where the step kernel of attention is, else decodes.
    """

    __slots__ = ("_attention", "_config", "_pages", "_stacks", "num_computed")

    def __init__(self, attention: NativeAttention, config: ModelConfig) -> None:
        self._attention = attention
        self._config = config
        self._stacks: list[_Stack] = []
        self._pages: tuple[list[ref[Tensor]], ctypes.Array[ctypes.c_int64]] = [], _words(())
        self.num_computed = 0
        """Layers, each counted once in a step."""

    def run(
        self,
        x: Tensor,
        batch: StepBatch,
        layers: Sequence[Layer],
        caches: Sequence[LayerCache],
        angles: Mapping[Rope, Angles],
    ) -> bool:
        """See `StepLayers`."""
        stack = self._stack_of(layers)
        if stack.table is None or not x.is_contiguous() or not _is_plain(batch, caches):
            return False
        parts = self._attention_parts(x, batch, stack, caches[0])
        if parts is None:
            return False
        (kv_heads, page), config = caches[0].k.shape[1:3], self._config
        heads, dim, inner = config.num_heads, config.head_dim, config.intermediate_size
        width = x.shape[1] + 3 * (heads + kv_heads) * dim + inner  # of `Memory` in layers.cpp
        scratch = torch.empty(len(x) * width * x.element_size() + _BUFFERS * _ALIGNMENT, dtype=torch.uint8)
        rotations = _words(number for rope in stack.ropes for number in _rotation(angles[rope]))
        step = _words(
            (
                *(x.dtype == torch.bfloat16, *x.shape, heads, kv_heads, dim, page, inner, hadamard_size(dim)),
                *(self._attention.is_batch_invariant, x.data_ptr(), scratch.data_ptr(), batch.slots.data_ptr()),
                *(parts.table.data_ptr(), len(parts.table), parts.has_runs, ctypes.addressof(rotations)),
            )
        )
        tables = (step, stack.table.data_ptr(), self._pages_of(caches), stack.numbers.data_ptr())
        self._attention.library.functions.phalanx_layers(*tables, len(layers), config.rms_norm_eps)
        self._attention.count(batch, len(x), len(layers))
        self.num_computed += len(layers)
        return True

    def _attention_parts(self, x: Tensor, batch: StepBatch, stack: _Stack, cache: LayerCache) -> _AttentionParts | None:
        """Returns runs of the step kernel or bands of the decode kernel; None if neither supports the step."""
        library, config, (kv_heads, page) = self._attention.library, self._config, cache.k.shape[1:3]
        if can_attend(library, page, config.head_dim, x.dtype):
            step = self._attention.runs_of(batch)
            is_narrow = stack.smallest_window is not None and stack.smallest_window < step.max_tree_size
            return None if is_narrow else _AttentionParts(step.runs, True)
        shape = (config.num_heads, kv_heads, config.head_dim, x.dtype)
        if batch.chunks or not can_decode(library, *shape, format=cache.format):
            return None
        bands = [
            (band.start, band.size, band.tables.data_ptr(), band.tables.shape[1], band.device_lengths.data_ptr())
            for band in batch.bands
        ]
        return _AttentionParts(torch.tensor(bands, dtype=torch.int64), False)

    def _pages_of(self, caches: Sequence[LayerCache]) -> ctypes.Array[ctypes.c_int64]:
        """Returns the addresses of the layers' pages, read once. The caches stay free to be dropped."""
        known, words = self._pages
        if len(known) != len(caches) or any(keys() is not cache.k for keys, cache in zip(known, caches, strict=True)):
            words = _words(number for cache in caches for number in page_addresses(cache))
            self._pages = [ref(cache.k) for cache in caches], words
        return words

    def _stack_of(self, layers: Sequence[Layer]) -> _Stack:
        """Returns the table of the layers, made once."""
        for known in self._stacks:
            if len(known.layers) == len(layers) and all(map(is_, known.layers, layers)):
                return known
        made = _make_stack(layers, self._config)
        self._stacks = [*self._stacks[1 - _MAX_STACKS :], made]
        return made


def _is_plain(batch: StepBatch, caches: Sequence[LayerCache]) -> bool:
    """Whether all layers use the same pages, not calibrated nor being copied, and no token attends to later ones."""
    is_causal = batch.await_pages is None and batch.windowed is None and not batch.has_images_within
    return is_causal and all(cache.rounding is None for cache in caches)


def _make_stack(layers: Sequence[Layer], config: ModelConfig) -> _Stack:
    ropes = list(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
    rows, numbers = [], []
    for layer in layers:
        linears, norms = _linear_words(layer), _norm_words(layer)
        if linears is None or norms is None:
            return _Stack(list(layers), None, torch.empty(0), ropes, None)
        rotation = -1 if layer.rope is None else ropes.index(layer.rope)
        rows.append([*norms, *linears, rotation, layer.params.window or 0])
        scale = config.head_dim**-0.5 if layer.params.scale is None else layer.params.scale
        numbers.append([scale, layer.params.softcap or 0.0])
    windows = [layer.params.window for layer in layers if layer.params.window is not None]
    tables = torch.tensor(rows, dtype=torch.int64), torch.tensor(numbers, dtype=torch.float64)
    return _Stack(list(layers), *tables, ropes, min(windows, default=None))


def _linear_words(layer: Layer) -> list[int] | None:
    """Returns the arguments of the linears' kernels with the outputs of each; None if one is not supported."""
    has_norms_after = layer.attention_out is not None or layer.mlp_out is not None
    if has_norms_after or layer.params.sinks is not None or layer.params.has_bias or not isinstance(layer.gate_up, NativeGated):
        return None
    words: list[int] = []
    for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
        if not isinstance(linear, NativeLinear | NativeGated) or (arguments := linear.blocks.arguments) is None:
            return None
        words += [*arguments, 2 * linear.outputs if isinstance(linear, NativeGated) else linear.blocks.outputs]
    return words


def _norm_words(layer: Layer) -> list[int] | None:
    """Returns address and kind of the norms before both halves, of queries and of keys; None if they are not supported."""
    norm = layer.qk_norm
    if layer.attention_in is None or layer.mlp_in is None or not (norm is None or isinstance(norm, HeadNorm)):
        return None
    heads = (None, None) if norm is None else (norm.q, norm.k)
    weights = (layer.attention_in, layer.mlp_in, *heads)
    return [number for weight in weights for number in ((0, 0) if weight is None else _weight(weight))]


def _weight(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight.dtype == torch.bfloat16


def _words(numbers: Iterable[int]) -> ctypes.Array[ctypes.c_int64]:
    listed = list(numbers)
    return (ctypes.c_int64 * len(listed))(*listed)


def _rotation(angles: Angles) -> tuple[int, int, int]:
    cos, sin = angles
    return cos.data_ptr(), sin.data_ptr(), cos.shape[-1]


def open_step_layers(attention: Attention, ops: DecoderOps, config: ModelConfig, world_size: int) -> StepLayers | None:
    """Opens all layers in one call, where a rank alone computes them with the kernels."""
    if world_size > 1 or not isinstance(attention, NativeAttention) or not isinstance(ops, NativeOps):
        return None
    return NativeLayers(attention, config)
