"""Paged attention in C++, without a gather. `PagedAttention` is the reference and computes unsupported shapes.

With bf16 dot products, one kernel computes a whole bf16 step. Otherwise, or with sinks, slopes or blocks, one computes decodes,
and one the rest over compressed pages: chunks, and decodes of any head dimension.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from phalanx_runtime.model.attention.feedback import MARGINS, Feedback
from phalanx_runtime.model.attention.page_format import FORMAT_NUMBERS, PageFormat, hadamard_size
from phalanx_runtime.model.attention.paged import (
    Attention,
    AttentionChunk,
    AttentionParams,
    DecodeBand,
    LayerCache,
    PagedAttention,
    StepBatch,
    logit_scale,
)
from phalanx_runtime.model.native.library import Library, library

MAX_GROUP = 128
"""Maximum query heads per KV head."""

_AttendSizes = ctypes.c_int64 * 7
_DecodeSizes = ctypes.c_int64 * 9
_WriteSizes = ctypes.c_int64 * 5
_HadamardSizes = ctypes.c_int64 * 5
_Pages = ctypes.c_int64 * 5
_FeedbackPart = ctypes.c_int64 * 14
_DTYPES = (torch.float32, torch.bfloat16)


def can_decode(
    library: Library, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, format: PageFormat | None = None
) -> bool:
    """Whether the decode kernel supports the shape."""
    bf16_lanes = 2 * library.lanes if format is None else library.lanes  # codes are expanded to float32
    lanes = {torch.float32: library.lanes, torch.bfloat16: bf16_lanes}.get(dtype)
    return lanes is not None and head_dim % lanes == 0 and heads // kv_heads <= MAX_GROUP


def can_attend(library: Library, page: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the step kernel supports the shape."""
    return library.has_bf16_dot and dtype == torch.bfloat16 and head_dim % 32 == 0 and page % 16 == 0


@dataclass(frozen=True, slots=True)
class StepRuns:
    """A step in the kernel's format."""

    runs: Tensor
    """[runs, 6]: start, size, length, address of page table; address of tree mask, first slot."""
    tree_masks: list[Tensor]
    """Owners of the masks' memory."""
    max_tree_size: int
    """Maximum draft tokens of a tree."""


def make_runs(batch: StepBatch) -> StepRuns:
    """Converts the step: decodes first, then chunks."""
    runs, masks = [], []
    for band in batch.bands:
        runs += _band_runs(band)
    for chunk in batch.chunks:
        base, address = chunk.length - len(chunk.parents), 0
        if chunk.parents:
            masks.append(_tree_mask(chunk, base))
            address = masks[-1].data_ptr()
        runs.append((chunk.start, chunk.size, chunk.length, chunk.table.data_ptr(), address, base))
    max_tree_size = max((len(chunk.parents) for chunk in batch.chunks), default=0)
    return StepRuns(torch.tensor(runs, dtype=torch.int64), masks, max_tree_size)


def _band_runs(band: DecodeBand) -> list[tuple[int, int, int, int, int, int]]:
    first, step = band.tables.data_ptr(), band.tables.stride(0) * band.tables.element_size()
    return [(band.start + i, 1, length, first + i * step, 0, 0) for i, length in enumerate(band.lengths)]


def _tree_mask(chunk: AttentionChunk, base: int) -> Tensor:
    """Returns position and visible slots, as bits from `base` on, of each token."""
    first, visible = chunk.length - chunk.size, list[int]()
    for node, parent in enumerate(chunk.parents):
        visible.append(1 << node | (visible[parent] if parent >= 0 else 0))
    nodes = [(base + bits.bit_count() - 1, bits) for bits in visible[max(0, first - base) :]]
    return torch.tensor([(position, 0) for position in range(first, base)] + nodes, dtype=torch.int64)


class NativeAttention(PagedAttention):
    """`PagedAttention` by the kernels; `is_batch_invariant` slows decodes.

    `num_decoded`, `num_prefilled`: tokens computed by a kernel, per layer.
    """

    __slots__ = ("_runs", "is_batch_invariant", "library", "num_decoded", "num_prefilled")

    def __init__(self, library: Library, is_batch_invariant: bool = False) -> None:
        super().__init__()
        self.library = library
        self.is_batch_invariant = is_batch_invariant
        self._runs: list[tuple[StepBatch, StepRuns]] = []
        """Of the latest batches: one, or two if layers with a window use other pages."""
        self.num_decoded = 0
        self.num_prefilled = 0

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        batch: StepBatch,
        params: AttentionParams,
        is_written: bool = False,
    ) -> Tensor:
        """See `Attention`."""
        (kv_heads, page), dim = cache.k.shape[1:3], q.shape[2]
        is_supported = params.sinks is None and not params.has_bias and can_attend(self.library, page, dim, q.dtype)
        if not is_supported or batch.has_images_within or not _is_packed(q):
            return super().__call__(q, k, v, cache=cache, batch=batch, params=params, is_written=is_written)
        step = self.runs_of(batch)
        if params.window is not None and params.window < step.max_tree_size:  # the kernel has no window within a tree
            return super().__call__(q, k, v, cache=cache, batch=batch, params=params, is_written=is_written)
        if not is_written:
            q, k, v = self._transform(q, k, v, cache)
            self._write(k, v, cache, batch.slots)
        out = torch.empty((q.shape[0], q.shape[1] * dim), dtype=q.dtype)
        self.library.functions.phalanx_attend(
            *(
                q.data_ptr(),
                page_addresses(cache),
                step.runs.data_ptr(),
                len(step.runs),
                out.data_ptr(),
                _AttendSizes(*(q.shape[1], kv_heads, dim, page, q.stride(0), params.window or 0, self.is_batch_invariant)),
                logit_scale(params, dim),
                params.softcap or 0.0,
            ),
        )
        self.count(batch, q.shape[0])
        return self._restored(out.view(q.shape), cache).view(out.shape)

    def count(self, batch: StepBatch, num_tokens: int, num_layers: int = 1) -> None:
        """Adds the tokens of a step to `num_decoded` and `num_prefilled`, once for each of these layers."""
        decoded = sum(band.size for band in batch.bands)
        self.num_decoded += decoded * num_layers
        self.num_prefilled += (num_tokens - decoded) * num_layers

    def runs_of(self, batch: StepBatch) -> StepRuns:
        """Returns the runs of a step, made once for all its layers."""
        for known, runs in self._runs:
            if known is batch:
                return runs
        runs = make_runs(batch)
        self._runs = [*self._runs[-1:], (batch, runs)]
        return runs

    def _hadamard(self, x: Tensor) -> Tensor:
        if x.dtype not in _DTYPES or not _is_packed(x):
            return super()._hadamard(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = _HadamardSizes(*x.shape, hadamard_size(x.shape[2]), x.stride(0))
        self.library.functions.phalanx_hadamard(x.dtype == torch.bfloat16, x.data_ptr(), out.data_ptr(), sizes)
        return out

    def _write(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        size, dim = k.element_size(), k.shape[2]
        v = k if cache.is_latent else v  # of latents the kernels write each slot twice
        if not _is_packed(k) or not _is_packed(v) or (cache.format is not None and k.dtype not in _DTYPES):
            return super()._write(k, v, cache, slots)
        if cache.rounding is not None:
            return self._write_with_feedback(k, v, cache, slots)
        if cache.format is not None:
            sizes = _WriteSizes(k.shape[0], k.shape[1], dim, k.stride(0), v.stride(0))
            is_bf16 = k.dtype == torch.bfloat16
            self.library.functions.phalanx_encode(
                *(is_bf16, k.data_ptr(), v.data_ptr(), page_addresses(cache), slots.data_ptr(), sizes)
            )
            return
        sizes = _WriteSizes(k.shape[0], k.shape[1], dim * size, k.stride(0) * size, v.stride(0) * size)
        addresses = (part.data_ptr() for part in (k, v, cache.k, cache.v, slots))
        self.library.functions.phalanx_write(*addresses, sizes)

    def _write_with_feedback(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        rounding, format = cache.rounding, cache.format
        assert rounding is not None and format is not None, "the pages are calibrated"
        assert cache.k_scales is not None and cache.v_scales is not None, "a format has scales"
        writes = ((k, cache.k, cache.k_scales, rounding.keys), (v, cache.v, cache.v_scales, rounding.values))
        for x, codes, scales, feedback in writes:
            part = _feedback_part(x, codes, scales, feedback=feedback, slots=slots, margins=_margins(format.name))
            is_bf16 = x.dtype == torch.bfloat16
            self.library.functions.phalanx_encode_with_feedback(is_bf16, FORMAT_NUMBERS[format], part)

    def _decode(self, q: Tensor, cache: LayerCache, band: DecodeBand, params: AttentionParams, out: Tensor) -> None:
        (kv_heads, page), dim = cache.k.shape[1:3], q.shape[2]
        is_supported = params.chosen is None and can_decode(self.library, q.shape[1], kv_heads, dim, q.dtype, format=cache.format)
        if not is_supported and not _can_attend_codes(q, cache, params):
            return super()._decode(q, cache, band, params, out)
        self.num_decoded += band.size
        if not is_supported:
            return self._attend_codes(q, cache, torch.tensor(_band_runs(band), dtype=torch.int64), params=params, out=out)
        biases = _biases(params)
        numbers = (band.size, q.shape[1], kv_heads, dim, page, band.tables.shape[1], q.stride(0))
        sizes = _DecodeSizes(*numbers, params.window or 0, params.block or 0)
        self.library.functions.phalanx_decode(
            *(
                q.dtype == torch.bfloat16,
                q.data_ptr() + band.start * q.stride(0) * q.element_size(),
                page_addresses(cache),
                band.tables.data_ptr(),
                band.device_lengths.data_ptr(),
                out.data_ptr() + band.start * out.stride(0) * out.element_size(),
                sizes,
                logit_scale(params, dim),
                params.softcap or 0.0,
                *map(_address, biases),
            ),
        )

    def _prefill_all(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: StepBatch, params: AttentionParams, out: Tensor
    ) -> None:
        if not batch.chunks or batch.has_images_within or not _can_attend_codes(q, cache, params):
            return super()._prefill_all(q, k, v, cache=cache, batch=batch, params=params, out=out)
        self.num_prefilled += sum(chunk.size for chunk in batch.chunks)
        self._attend_codes(q, cache, self.runs_of(batch).runs[-len(batch.chunks) :], params=params, out=out)

    def _attend_codes(self, q: Tensor, cache: LayerCache, runs: Tensor, params: AttentionParams, out: Tensor) -> None:
        (kv_heads, page), dim, biases = cache.k.shape[1:3], q.shape[2], _biases(params)
        self.library.functions.phalanx_attend_codes(
            *(
                q.dtype == torch.bfloat16,
                q.data_ptr(),
                page_addresses(cache),
                runs.data_ptr(),
                len(runs),
                out.data_ptr(),
                _AttendSizes(*(q.shape[1], kv_heads, dim, page, q.stride(0), params.window or 0, params.block or 0)),
                logit_scale(params, dim),
                params.softcap or 0.0,
                *map(_address, biases),
            )
        )


def _can_attend_codes(q: Tensor, cache: LayerCache, params: AttentionParams) -> bool:
    """Whether the kernel of floats over codes supports the layer; in steps with images, only decodes."""
    return cache.format is not None and q.dtype in _DTYPES and params.chosen is None and _is_packed(q)


def _biases(params: AttentionParams) -> list[Tensor | None]:
    """Returns sinks and slopes as kernels take them."""
    return [None if part is None else part.float().contiguous() for part in (params.sinks, params.slopes)]


def _address(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()


def _is_packed(x: Tensor) -> bool:
    """Whether the heads of a token are contiguous."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def page_addresses(cache: LayerCache) -> ctypes.Array[ctypes.c_int64]:
    """Returns the layer's format and addresses: keys, values, their scales."""
    scales = (cache.k_scales, cache.v_scales)
    addresses = (0 if part is None else part.data_ptr() for part in scales)
    return _Pages(FORMAT_NUMBERS[cache.format], cache.k.data_ptr(), cache.v.data_ptr(), *addresses)


def _feedback_part(
    x: Tensor, codes: Tensor, scales: Tensor, *, feedback: Feedback, slots: Tensor, margins: Tensor
) -> ctypes.Array[ctypes.c_int64]:
    """Returns keys or values, their pages and how they are rounded, as `phalanx_encode_with_feedback` takes them."""
    tables = (slots, feedback.order, feedback.shift, feedback.triangle, feedback.weights, margins)
    addresses = (table.data_ptr() for table in tables)
    return _FeedbackPart(x.data_ptr(), *x.shape, x.stride(0), codes.data_ptr(), scales.data_ptr(), *addresses, len(margins))


@cache
def _margins(name: str) -> Tensor:
    return torch.tensor(MARGINS[name], dtype=torch.float32)


def open_cpu_attention(is_batch_invariant: bool) -> Attention:
    """Opens the kernels, or the reference where they cannot compile."""
    compiled = library()
    return PagedAttention() if compiled is None else NativeAttention(compiled, is_batch_invariant)
