"""Paged attention whose decoding reads the pages in place; prefill chunks go the way of `PagedAttention`, its twin."""

import ctypes

import torch
from torch import Tensor

from phalanx_runtime.model.attention import Attention, AttentionForm, DecodeGroup, LayerCache, PagedAttention
from phalanx_runtime.model.native.library import Library, library

MAX_GROUP = 64
"""Query heads that may share a KV head."""

Sizes = ctypes.c_int64 * 8
Strides = ctypes.c_int64 * 5


def decodes(library: Library, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel attends in this shape and dtype."""
    lanes = {torch.float32: library.lanes, torch.bfloat16: 2 * library.lanes}.get(dtype)
    return lanes is not None and head_dim % lanes == 0 and heads // kv_heads <= MAX_GROUP


class NativeAttention(PagedAttention):
    """`PagedAttention` without its gather for decoding requests; shapes that the kernel does not know are still gathered.

    num_decoded counts the tokens that the kernel attended for, once per layer.
    """

    __slots__ = ("_library", "num_decoded")

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library
        self.num_decoded = 0

    def _write(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        size, dim = k.element_size(), k.shape[2]
        if any(part.stride(2) != 1 or part.stride(1) != dim for part in (k, v)):
            return super()._write(k, v, cache, slots)
        sizes = Strides(k.shape[0], k.shape[1], dim * size, k.stride(0) * size, v.stride(0) * size)
        places = (part.data_ptr() for part in (k, v, cache.k, cache.v, slots))
        self._library.functions.phalanx_write(*places, sizes)

    def _decode(self, q: Tensor, cache: LayerCache, group: DecodeGroup, form: AttentionForm, out: Tensor) -> None:
        kv_heads, page, dim = cache.k.shape[1:]
        if not decodes(self._library, q.shape[1], kv_heads, dim, q.dtype):
            return super()._decode(q, cache, group, form, out)
        self.num_decoded += group.size
        sizes = Sizes(group.size, q.shape[1], kv_heads, dim, page, group.tables.shape[1], q.stride(0), form.window or 0)
        self._library.functions.phalanx_decode(
            q.dtype == torch.bfloat16,
            q.data_ptr() + group.start * q.stride(0) * q.element_size(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            group.tables.data_ptr(),
            group.ends.data_ptr(),
            out.data_ptr() + group.start * out.stride(0) * out.element_size(),
            sizes,
            dim**-0.5 if form.scale is None else form.scale,
            form.softcap or 0.0,
        )


def choose_attention(device: torch.device) -> Attention:
    """The fastest attention that this machine has."""
    made = library() if device.type == "cpu" else None
    return PagedAttention() if made is None else NativeAttention(made)
