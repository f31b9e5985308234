"""Pages as bytes: keys, values, and their scales with a page format, of each layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx_runtime.core.migration.page_orders import DiskReport, FetchPages
from phalanx_runtime.model.attention.paged import LayerCache


class Pages(Protocol):
    """Pages for one connection. Not thread-safe. No step that may be queued uses them: see `PageAccess.wait_for`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        ...

    def read(self, page: int) -> list[memoryview]:
        """Returns a page in parts, valid until the next call."""
        ...

    def write(self, page: int, data: memoryview) -> None:
        """Fills a page; steps that start afterwards read it."""
        ...


@dataclass(frozen=True, slots=True)
class DraftPages:
    """Pages with the target's layers, then a draft model's."""

    name: bytes
    """Identifies the draft's weights."""
    open: Callable[[], Pages]


def no_draft() -> DraftPages | None:
    """No draft has pages."""
    return None


def no_parts() -> Pages | None:
    """No page has a part."""
    return None


def _no_wait(step: int) -> None:
    pass


class PageDisk(Protocol):
    """Pages on disk. Thread-safe."""

    def start(self, report: Callable[[DiskReport], None]) -> None:
        """Reports all keys before it returns, and from now on each change. `report`: thread-safe."""
        ...

    def fetch(
        self,
        order: FetchPages,
        wait_for: Callable[[int], None],
        write: Callable[[int, memoryview], None],
        report: Callable[[DiskReport], None],
    ) -> None:
        """Reads pages later and gives each to `write` with its slot, once `wait_for` returns for the order's step."""
        ...


class HostSlots(Protocol):
    """Host memory for pages, with a disk below it."""

    @property
    def disk(self) -> PageDisk | None:
        """The disk, if any."""
        ...

    @property
    def has_layers(self) -> bool:
        """Whether layers of this rank have such pages; else it has its share of each."""
        ...

    def write(self, slot: int, page: memoryview) -> None:
        """Fills a slot that no copy uses. Thread-safe."""
        ...

    def read(self, slot: int) -> list[memoryview]:
        """Returns the page of a slot that no copy changes, in pieces. Thread-safe."""
        ...


class StateRows(Protocol):
    """States of rows as bytes. Thread-safe."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of a row."""
        ...

    def read(self, row: int, num_tokens: int) -> bytes:
        """Returns the states of a row. Raises ValueError if they are not those of `num_tokens` tokens."""
        ...

    def write(self, row: int, num_tokens: int, data: memoryview) -> None:
        """Sets the states of a row that no step computes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAccess:
    """A rank's pages for KV transfer."""

    page_size: int
    """Tokens per page."""
    open: Callable[[], Pages]
    """The target's pages, for one connection."""
    open_parts: Callable[[], Pages | None] = no_parts
    """The parts of pages (`core.window_parts`), if pages have parts; then `open` has the other layers."""
    open_draft: Callable[[], DraftPages | None] = no_draft
    """The same with a draft's layers, while it can draft."""
    wait_for: Callable[[int], None] = _no_wait
    """Returns once the rank has computed this step."""
    host: HostSlots | None = None
    """Its host memory, if any."""
    host_parts: HostSlots | None = None
    """The same for parts of pages."""
    states: StateRows | None = None
    """States of its layers that keep one per request, if any."""


class CopyStream(Protocol):
    """Copies between host and device, concurrent with steps."""

    def run(self, copies: Callable[[], None]) -> None:
        """Queues copies and waits for them."""
        ...


class CudaCopyStream:
    """A stream of `torch.cuda` for one thread."""

    def __init__(self, device: torch.device) -> None:
        make_stream: Any = torch.cuda.Stream
        torch.cuda.set_device(device)  # of this thread, or its other calls of CUDA make a context on the first GPU
        self._stream = make_stream(device)

    def run(self, copies: Callable[[], None]) -> None:
        """See `CopyStream`."""
        with torch.cuda.stream(self._stream):
            copies()
        self._stream.synchronize()


def await_steps(device: torch.device) -> None:
    """Waits until a GPU has computed the steps that were queued before; other devices queue none."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.default_stream(device).synchronize()


def open_pages(
    caches: list[LayerCache], is_still: bool = True, make_stream: Callable[[torch.device], CopyStream] = CudaCopyStream
) -> Pages:
    """Opens pages for one connection. is_still: no page is written while it is read. `make_stream`: for pages of a GPU."""
    if caches and caches[0].k.device.type == "cuda":
        return _DevicePages(caches, make_stream(caches[0].k.device))
    return _HostPages(caches, is_still)


def page_rows(caches: list[LayerCache]) -> list[Tensor]:
    """Returns views of all keys, values and scales as bytes, one row per page."""
    tensors = [tensor for cache in caches for tensor in cache.tensors]
    return [tensor.view(torch.uint8).view(tensor.shape[0], -1) for tensor in tensors]


class _HostPages:
    """Host memory, read in place if `is_still`."""

    def __init__(self, caches: list[LayerCache], is_still: bool) -> None:
        self._is_still = is_still
        self._rows = [rows.numpy() for rows in page_rows(caches)]
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
    """GPU pages, copied through pinned memory."""

    def __init__(self, caches: list[LayerCache], stream: CopyStream) -> None:
        self._rows = page_rows(caches)
        self.page_bytes = sum(rows.shape[1] for rows in self._rows)
        self._stream = stream
        pinned = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._bytes = memoryview(pinned.numpy().data)
        self._parts = torch.split(pinned, [rows.shape[1] for rows in self._rows])

    def read(self, page: int) -> list[memoryview]:
        def copy() -> None:
            for part, rows in zip(self._parts, self._rows, strict=True):
                part.copy_(rows[page], non_blocking=True)

        self._stream.run(copy)
        return [self._bytes]

    def write(self, page: int, data: memoryview) -> None:
        def copy() -> None:
            for part, rows in zip(self._parts, self._rows, strict=True):
                rows[page].copy_(part, non_blocking=True)

        self._bytes[:] = data
        self._stream.run(copy)
