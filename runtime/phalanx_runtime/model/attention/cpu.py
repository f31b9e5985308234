"""Paged attention that reads the pages in place. `PagedAttention` is the reference and the fallback for unsupported shapes.

On processors with bf16 dot products, one kernel computes a whole bf16 step, decoding requests and prompt chunks. Elsewhere, and
for float, a kernel computes the decodes and the reference computes the chunks.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.attention.paged import (
    Attention,
    AttentionChunk,
    AttentionForm,
    DecodeBand,
    LayerCache,
    PagedAttention,
    StepBatch,
)
from phalanx_runtime.model.native.library import Library, library

MAX_GROUP = 64
"""Largest number of query heads per KV head."""

Seven = ctypes.c_int64 * 7
Sizes = ctypes.c_int64 * 8
Strides = ctypes.c_int64 * 5


def decodes(library: Library, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the decode kernel supports this shape and dtype."""
    lanes = {torch.float32: library.lanes, torch.bfloat16: 2 * library.lanes}.get(dtype)
    return lanes is not None and head_dim % lanes == 0 and heads // kv_heads <= MAX_GROUP


def attends(library: Library, page: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the whole-step kernel supports this shape and dtype."""
    return library.has_runs and dtype == torch.bfloat16 and head_dim % 32 == 0 and page % 16 == 0


@dataclass(frozen=True, slots=True)
class Runs:
    """A step in the kernel's format."""

    runs: Tensor
    """[runs, 6]: start, size, length, address of the page table; for a tree, address of its mask rows and its first slot."""
    lines: list[Tensor]
    """Mask rows of the trees; keeps their memory alive."""
    longest: int
    """Draft tokens of the largest tree."""


def runs_of(batch: StepBatch) -> Runs:
    """The step's runs: decoding requests first, then chunks."""
    runs, lines = [], []
    for band in batch.bands:
        first, step = band.tables.data_ptr(), band.tables.stride(0) * band.tables.element_size()
        runs += [(band.start + i, 1, length, first + i * step, 0, 0) for i, length in enumerate(band.lengths)]
    for chunk in batch.chunks:
        base, address = chunk.length - len(chunk.parents), 0
        if chunk.parents:
            lines.append(_lines(chunk, base))
            address = lines[-1].data_ptr()
        runs.append((chunk.start, chunk.size, chunk.length, chunk.table.data_ptr(), address, base))
    longest = max((len(chunk.parents) for chunk in batch.chunks), default=0)
    return Runs(torch.tensor(runs, dtype=torch.int64), lines, longest)


def _lines(chunk: AttentionChunk, base: int) -> Tensor:
    """For each token of a tree: its position, and a bit mask of the slots from `base` on that it sees."""
    first, seen = chunk.length - chunk.size, list[int]()
    for node, parent in enumerate(chunk.parents):
        seen.append(1 << node | (seen[parent] if parent >= 0 else 0))
    told = [(at, 0) for at in range(first, base)] + [(base + bits.bit_count() - 1, bits) for bits in seen[max(0, first - base) :]]
    return torch.tensor(told, dtype=torch.int64)


class NativeAttention(PagedAttention):
    """`PagedAttention` without its gather, where the kernels support the shape.

    num_decoded, num_prefilled: tokens that a kernel computed, counted once per layer. is_fixed: a token's result does not depend
    on the rest of its step where the whole-step kernel is used (see `invariant`), at slower decoding.
    """

    __slots__ = ("_batch", "_is_fixed", "_library", "_runs", "num_decoded", "num_prefilled")

    def __init__(self, library: Library, is_fixed: bool = False) -> None:
        super().__init__()
        self._library = library
        self._is_fixed = is_fixed
        self._batch: StepBatch | None = None
        self._runs = Runs(torch.empty(0), [], 0)
        self.num_decoded = 0
        self.num_prefilled = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: StepBatch, form: AttentionForm) -> Tensor:
        """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]. Returns [tokens, heads * dim]."""
        kv_heads, page, dim = cache.k.shape[1:]
        if not attends(self._library, page, dim, q.dtype) or q.stride(1) != dim or q.stride(2) != 1:
            return super().__call__(q, k, v, cache=cache, batch=batch, form=form)
        if self._batch is not batch:  # the layers of a step share it
            self._batch, self._runs = batch, runs_of(batch)
        if form.window is not None and form.window < self._runs.longest:  # the kernel applies no window within a tree
            return super().__call__(q, k, v, cache=cache, batch=batch, form=form)
        self._write(k, v, cache, batch.slots)
        out = torch.empty((q.shape[0], q.shape[1] * dim), dtype=q.dtype)
        self._library.functions.phalanx_attend(
            *(
                q.data_ptr(),
                cache.k.data_ptr(),
                cache.v.data_ptr(),
                self._runs.runs.data_ptr(),
                len(self._runs.runs),
                out.data_ptr(),
                Seven(*(q.shape[1], kv_heads, dim, page, q.stride(0), form.window or 0, self._is_fixed)),
                dim**-0.5 if form.scale is None else form.scale,
                form.softcap or 0.0,
            ),
        )
        decoded = sum(band.size for band in batch.bands)
        self.num_decoded += decoded
        self.num_prefilled += q.shape[0] - decoded
        return out

    def _write(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        size, dim = k.element_size(), k.shape[2]
        if any(part.stride(2) != 1 or part.stride(1) != dim for part in (k, v)):
            return super()._write(k, v, cache, slots)
        sizes = Strides(k.shape[0], k.shape[1], dim * size, k.stride(0) * size, v.stride(0) * size)
        places = (part.data_ptr() for part in (k, v, cache.k, cache.v, slots))
        self._library.functions.phalanx_write(*places, sizes)

    def _decode(self, q: Tensor, cache: LayerCache, band: DecodeBand, form: AttentionForm, out: Tensor) -> None:
        kv_heads, page, dim = cache.k.shape[1:]
        if not decodes(self._library, q.shape[1], kv_heads, dim, q.dtype):
            return super()._decode(q, cache, band, form, out)
        self.num_decoded += band.size
        sizes = Sizes(*(band.size, q.shape[1], kv_heads, dim, page, band.tables.shape[1], q.stride(0), form.window or 0))
        self._library.functions.phalanx_decode(
            *(
                q.dtype == torch.bfloat16,
                q.data_ptr() + band.start * q.stride(0) * q.element_size(),
                cache.k.data_ptr(),
                cache.v.data_ptr(),
                band.tables.data_ptr(),
                band.ends.data_ptr(),
                out.data_ptr() + band.start * out.stride(0) * out.element_size(),
                sizes,
                dim**-0.5 if form.scale is None else form.scale,
                form.softcap or 0.0,
            ),
        )


def open_cpu_attention(is_fixed: bool) -> Attention:
    """Returns the compiled kernels' attention, or the torch reference where no kernel compiles."""
    compiled = library()
    return PagedAttention() if compiled is None else NativeAttention(compiled, is_fixed)
