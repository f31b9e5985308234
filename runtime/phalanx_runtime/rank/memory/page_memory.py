"""Pages of a rank as bytes: for each page the keys and then the values of every layer, layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx_runtime.model.attention.paged import LayerCache


class Pages(Protocol):
    """Pages that one connection reads or writes. Not for two threads at once."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of this rank."""
        ...

    def read(self, page: int) -> list[memoryview]:
        """The bytes of a page, in parts, valid until the next call."""
        ...

    def write(self, page: int, data: memoryview) -> None:
        """Fills a page. When it returns, steps that begin later read what was written."""
        ...


@dataclass(frozen=True, slots=True)
class DraftPages:
    """Pages with the layers of a draft behind the target's. `name` tells its weights apart."""

    name: bytes
    open: Callable[[], Pages]


def no_draft() -> DraftPages | None:
    """None: no draft has pages."""
    return None


def open_pages(caches: list[LayerCache], is_still: bool = True) -> Pages:
    """The pages of these caches, for one connection. is_still: nothing is written into a page that is being read."""
    if caches and caches[0].k.device.type == "cuda":
        return _DevicePages(caches)
    return _HostPages(caches, is_still)


def _rows(caches: list[LayerCache]) -> list[Tensor]:
    """The caches as bytes: a row for each page. Views."""
    tensors = [tensor for cache in caches for tensor in (cache.k, cache.v)]
    return [tensor.view(torch.uint8).view(tensor.shape[0], -1) for tensor in tensors]


class _HostPages:
    """Pages in this process's memory: read where they lie, if they lie still."""

    def __init__(self, caches: list[LayerCache], is_still: bool) -> None:
        self._is_still = is_still
        self._rows = [rows.numpy() for rows in _rows(caches)]
        self.page_bytes = sum(rows.shape[1] for rows in self._rows)

    def read(self, page: int) -> list[memoryview]:
        return [rows[page].data if self._is_still else memoryview(rows[page].tobytes()) for rows in self._rows]

    def write(self, page: int, data: memoryview) -> None:
        start = 0
        for rows in self._rows:
            target = rows[page].data
            target[:] = data[start : start + len(target)]
            start += len(target)


class _DevicePages:
    """Pages on a GPU: over pinned memory, on a stream of their own, after what the computing stream was given before."""

    def __init__(self, caches: list[LayerCache]) -> None:
        self._rows = _rows(caches)
        self.page_bytes = sum(rows.shape[1] for rows in self._rows)
        self._device = self._rows[0].device
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(self._device)
        self._pinned = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)
        self._bytes = memoryview(self._pinned.numpy().data)
        self._parts = torch.split(self._pinned, [rows.shape[1] for rows in self._rows])

    def read(self, page: int) -> list[memoryview]:
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, rows in zip(self._parts, self._rows, strict=True):
                part.copy_(rows[page], non_blocking=True)
        self._stream.synchronize()
        return [self._bytes]

    def write(self, page: int, data: memoryview) -> None:
        self._bytes[:] = data
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, rows in zip(self._parts, self._rows, strict=True):
                rows[page].copy_(part, non_blocking=True)
        self._stream.synchronize()
