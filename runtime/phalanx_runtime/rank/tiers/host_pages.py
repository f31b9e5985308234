"""Host memory of a rank for pages of its prefix cache, and the copies of plans, in a thread beside the steps."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx_runtime.core.step_plan import HostCopy, HostResize
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.page_memory import CopyStream, CudaCopyStream, page_rows
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.slot_memory import SlotMemory, open_page_lock


class HostCopies(Protocol):
    """The host memory of a rank. Calls come from the thread of the steps, except `wait`, `write` and `read`."""

    def start(
        self, copies: Sequence[HostCopy], keys: Sequence[bytes], *, must_wait: bool, resize: HostResize | None = None
    ) -> float:
        """Waits for the copies of earlier plans, then starts these in order. `must_wait`: returns when they are complete.

        Returns the seconds of waits. keys: of the stored pages, in order, if a disk keeps them too. resize: follows the copies.
        """
        ...

    def wait(self) -> None:
        """Returns when all copies so far are complete. Thread-safe."""
        ...

    def wait_for_layer(self, layer: int) -> float:
        """Waits until the copies so far of the first `layer + 1` layers are complete. Returns the seconds."""
        ...

    @property
    def disk(self) -> DiskPages | None:
        """The disk that keeps stored pages too, if any."""
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

    def take_loads(self) -> tuple[int, float]:
        """Returns the pages of the first complete load that was not returned before, and the seconds that it took."""
        ...


class NoHostPages:
    """Host memory without slots."""

    disk: DiskPages | None = None
    has_layers = True

    def start(
        self, copies: Sequence[HostCopy], keys: Sequence[bytes], *, must_wait: bool, resize: HostResize | None = None
    ) -> float:
        """See `HostCopies`."""
        assert not copies and resize is None, "without host memory no plan has copies"
        return 0.0

    def wait(self) -> None:
        """See `HostCopies`."""

    def wait_for_layer(self, layer: int) -> float:
        """See `HostCopies`."""
        return 0.0

    def write(self, slot: int, page: memoryview) -> None:
        """See `HostCopies`."""
        raise AssertionError("without host memory nothing is written")

    def read(self, slot: int) -> list[memoryview]:
        """See `HostCopies`."""
        raise AssertionError("without host memory nothing is read")

    def take_loads(self) -> tuple[int, float]:
        """See `HostCopies`."""
        return 0, 0.0


class _NoRows(NoHostPages):
    """Of a pipeline stage whose layers have no such pages."""

    has_layers = False

    def start(
        self, copies: Sequence[HostCopy], keys: Sequence[bytes], *, must_wait: bool, resize: HostResize | None = None
    ) -> float:
        return 0.0

    def write(self, slot: int, page: memoryview) -> None:
        pass

    def read(self, slot: int) -> list[memoryview]:
        return []


NO_HOST_PAGES: HostCopies = NoHostPages()
NO_ROWS: HostCopies = _NoRows()


@dataclass(frozen=True, slots=True)
class _CopyRun:
    """Consecutive copies in one direction, to different places. keys: of stored pages, if a disk keeps them."""

    is_load: bool
    pages: list[int]
    slots: list[int]
    keys: list[bytes]


def copy_runs(copies: Sequence[HostCopy], stored: Sequence[bytes] = ()) -> Iterator[_CopyRun]:
    """Divides copies into runs of one direction that have each target once: a disk gets the slots after the run.

    stored: keys of the stores, if a disk keeps them.
    """
    run = _CopyRun(False, [], [], [])
    targets: set[int] = set()
    keys = iter(stored)
    for is_load, page, slot in copies:
        target = page if is_load else slot
        if run.pages and (is_load != run.is_load or target in targets):
            yield run
            run = _CopyRun(is_load, [], [], [])
            targets = set()
        if not run.pages:
            run = _CopyRun(is_load, [], [], [])
        if stored and not is_load:
            run.keys.append(next(keys))
        run.pages.append(page)
        run.slots.append(slot)
        targets.add(target)
    if run.pages:
        yield run


MAX_UNREPORTED = 64
"""Loads whose times are kept until a report: rank 0 reports one with each step, other ranks none."""


class HostPages:
    """Slots with a page each, of the layers of `caches`; pinned if these are on a GPU."""

    has_layers = True

    def __init__(
        self,
        caches: list[LayerCache],
        num_slots: int,
        make_stream: Callable[[torch.device], CopyStream] = CudaCopyStream,
        disk: DiskPages | None = None,
        limit: int | None = None,
    ) -> None:
        """num_slots: at first. limit: their largest number, by default as many."""
        self.disk = disk
        tensors = page_rows(caches)
        self._device = tensors[0].device
        is_cpu = self._device.type == "cpu"
        self._rows: list[Any] = [rows.numpy() for rows in tensors] if is_cpu else list(tensors)
        lock = None if is_cpu else open_page_lock()
        self._slots = SlotMemory([rows.shape[1] for rows in tensors], num_slots, limit or num_slots, lock)
        self._make_stream = make_stream
        self._orders: queue.SimpleQueue[tuple[Iterable[_CopyRun], Any, HostResize | None]] = queue.SimpleQueue()
        self._first_row = [0, *accumulate(len(cache.tensors) for cache in caches)]
        """Of each layer in `_rows`, and their number."""
        self._changed = threading.Condition()
        self._num_started = self._num_done = 0
        self._layers_done = 0
        """Of the order in progress, if it copies layer by layer."""
        self._failure: BaseException | None = None
        self._loaded: deque[tuple[int, float]] = deque(maxlen=MAX_UNREPORTED)
        threading.Thread(target=self._run, name="host-pages", daemon=True).start()

    @property
    def num_slots(self) -> int:
        """The present number of slots, once all copies so far are complete."""
        return self._slots.num_slots

    def start(
        self, copies: Sequence[HostCopy], keys: Sequence[bytes] = (), *, must_wait: bool, resize: HostResize | None = None
    ) -> float:
        """See `HostCopies`."""
        waited_s = self._wait_timed()
        if copies:
            # A rank whose folder cannot be used stores in memory only.
            self._start(copy_runs(copies, keys if self.disk is not None else ()), self._computed_event(), None)
        if must_wait:
            waited_s += self._wait_timed()
        if resize is not None:
            self._start((), None, resize)
        return waited_s

    def wait(self) -> None:
        """See `HostCopies`. Raises the error of a copy."""
        with self._changed:
            last = self._num_started
            self._changed.wait_for(lambda: self._num_done >= last or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def wait_for_layer(self, layer: int) -> float:
        """See `HostCopies`. Raises the error of a copy."""
        if self._num_done == self._num_started and self._failure is None:
            return 0.0
        started = time.perf_counter()
        with self._changed:
            last = self._num_started

            def is_ready() -> bool:
                is_last = self._num_done == last - 1
                return self._num_done >= last or (is_last and self._layers_done > layer) or self._failure is not None

            self._changed.wait_for(is_ready)
        if self._failure is not None:
            raise self._failure
        return time.perf_counter() - started

    def _wait_timed(self) -> float:
        """Waits if a copy is in progress, and returns the seconds."""
        if self._num_done == self._num_started and self._failure is None:
            return 0.0
        started = time.perf_counter()
        self.wait()
        return time.perf_counter() - started

    def write(self, slot: int, page: memoryview) -> None:
        """See `HostCopies`."""
        start = 0
        for part in self._slots.parts(slot):
            part[:] = page[start : start + len(part)]
            start += len(part)

    def read(self, slot: int) -> list[memoryview]:
        """See `HostCopies`."""
        return self._slots.parts(slot)

    def take_loads(self) -> tuple[int, float]:
        """See `HostCopies`."""
        with self._changed:
            return self._loaded.popleft() if self._loaded else (0, 0.0)

    def _start(self, runs: Iterable[_CopyRun], computed: Any, resize: HostResize | None) -> None:
        self._num_started += 1
        self._orders.put((runs, computed, resize))

    def _computed_event(self) -> Any:
        """Returns an event after the steps so far, if a device computes them."""
        if self._device.type != "cuda":
            return None
        make_event: Any = torch.cuda.Event
        event = make_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _run(self) -> None:
        stream = self._make_stream(self._device) if self._device.type == "cuda" else None
        while True:
            runs, computed, resize = self._orders.get()
            try:
                if computed is not None:
                    computed.synchronize()
                self._copy_all(runs, stream)
                if resize is not None:
                    self._slots.move(resize.moves)
                    self._slots.resize(resize.num_slots)
            except BaseException as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._num_done += 1
                self._layers_done = 0
                self._changed.notify_all()

    def _copy_all(self, runs: Iterable[_CopyRun], stream: CopyStream | None) -> None:
        """Copies layer by layer, so that a step can use the first layers early, and then gives stored pages to the disk.

        If a slot has two stores, for the pages of each: run by run, since the second page takes the place of the first.
        """
        all_runs, load_s = list(runs), 0.0
        stored = [(key, slot) for run in all_runs for key, slot in zip(run.keys, run.slots, strict=False)]
        if len({slot for _, slot in stored}) == len(stored):
            for layer in range(len(self._first_row) - 1):
                for run in all_runs:
                    load_s += self._copy_timed(run, layer, layer + 1, stream)
                with self._changed:
                    self._layers_done = layer + 1
                    self._changed.notify_all()
            self._put(stored)
        else:
            for run in all_runs:
                load_s += self._copy_timed(run, 0, len(self._first_row) - 1, stream)
                self._put(zip(run.keys, run.slots, strict=False))
        num_loaded = sum(len(run.pages) for run in all_runs if run.is_load)
        if num_loaded:
            with self._changed:
                self._loaded.append((num_loaded, load_s))

    def _put(self, stored: Iterable[tuple[bytes, int]]) -> None:
        """Gives stored pages to the disk."""
        for key, slot in stored:
            assert self.disk is not None, "keys are for the disk"
            self.disk.put(key, self._slots.parts(slot))

    def _copy_timed(self, run: _CopyRun, first: int, end: int, stream: CopyStream | None) -> float:
        """Copies layers from `first` to `end`, and returns the seconds of a load."""
        started = time.perf_counter()
        if stream is None:
            self._copy(run, first, end)
        else:
            # The order waited for the steps before it; the step that it loads for may run already.
            stream.run(lambda: self._copy(run, first, end))
        return time.perf_counter() - started if run.is_load else 0.0

    def _copy(self, run: _CopyRun, first: int, end: int) -> None:
        for row in range(self._first_row[first], self._first_row[end]):
            rows = self._rows[row]
            for page, slot in zip(run.pages, run.slots, strict=True):
                stored = self._slots.row(row, slot)
                if run.is_load:
                    _copy_row(rows, page, stored)
                elif isinstance(stored, Tensor):
                    stored.copy_(rows[page], non_blocking=True)
                else:
                    stored[:] = rows[page]


def _copy_row(rows: Any, page: int, stored: Any) -> None:
    if isinstance(stored, Tensor):
        rows[page].copy_(stored, non_blocking=True)
    else:
        rows[page] = stored
