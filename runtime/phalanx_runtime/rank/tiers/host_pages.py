"""Host memory of a rank for pages of its prefix cache, and the copies of plans, in a thread beside the steps."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_runtime.core.step_plan import HostCopy
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.kv_cache import lazily_zeroed
from phalanx_runtime.rank.memory.page_memory import CopyStream, CudaCopyStream, page_rows
from phalanx_runtime.rank.tiers.disk_pages import DiskPages

Rows = Tensor | NDArray[np.uint8]
"""A row of bytes per page, or per slot."""


class HostCopies(Protocol):
    """The host memory of a rank. Calls come from the thread of the steps, except `wait` and `write`."""

    def start(self, copies: Sequence[HostCopy], keys: Sequence[bytes], *, must_wait: bool) -> None:
        """Waits for the copies of earlier plans, then starts these in order. `must_wait`: returns when they are complete.

        keys: of the stored pages, in order, if a disk keeps them too.
        """
        ...

    def wait(self) -> None:
        """Returns when all copies so far are complete. Thread-safe."""
        ...

    @property
    def disk(self) -> DiskPages | None:
        """The disk that keeps stored pages too, if any."""
        ...

    def write(self, slot: int, page: memoryview) -> None:
        """Fills a slot that no copy uses. Thread-safe."""
        ...

    def take_loads(self) -> tuple[int, float]:
        """Returns the pages loaded since the last call, and the seconds that it took."""
        ...


class _NoHostPages:
    disk: DiskPages | None = None

    def start(self, copies: Sequence[HostCopy], keys: Sequence[bytes], *, must_wait: bool) -> None:
        assert not copies, "without host memory no plan has copies"

    def wait(self) -> None:
        pass

    def write(self, slot: int, page: memoryview) -> None:
        raise AssertionError("without host memory nothing is written")

    def take_loads(self) -> tuple[int, float]:
        return 0, 0.0


NO_HOST_PAGES: HostCopies = _NoHostPages()


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


class HostPages:
    """Slots with a page each, of the layers of `caches`; pinned if these are on a GPU."""

    def __init__(
        self,
        caches: list[LayerCache],
        num_slots: int,
        make_stream: Callable[[torch.device], CopyStream] = CudaCopyStream,
        disk: DiskPages | None = None,
    ) -> None:
        self.disk = disk
        tensors = page_rows(caches)
        self._device = tensors[0].device
        shapes = [((num_slots, rows.shape[1]), torch.uint8) for rows in tensors]
        self._rows: list[Rows]
        self._slots: list[Rows]
        if self._device.type == "cpu":  # torch takes longer for each row
            self._rows = [rows.numpy() for rows in tensors]
            self._slots = [slots.numpy() for slots in lazily_zeroed(shapes)]
        else:
            self._rows = list(tensors)
            self._slots = [torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for shape, _ in shapes]
        self._make_stream = make_stream
        self._orders: queue.SimpleQueue[tuple[Iterable[_CopyRun], Any]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_started = self._num_done = 0
        self._failure: BaseException | None = None
        self._loaded: tuple[int, float] = 0, 0.0
        threading.Thread(target=self._run, name="host-pages", daemon=True).start()

    def start(self, copies: Sequence[HostCopy], keys: Sequence[bytes] = (), *, must_wait: bool) -> None:
        """See `HostCopies`."""
        if self._num_done < self._num_started:
            self.wait()
        if not copies:
            return
        self._num_started += 1
        self._orders.put((copy_runs(copies, keys), self._computed_event()))
        if must_wait:
            self.wait()

    def wait(self) -> None:
        """See `HostCopies`. Raises the error of a copy."""
        with self._changed:
            last = self._num_started
            self._changed.wait_for(lambda: self._num_done >= last or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def write(self, slot: int, page: memoryview) -> None:
        """See `HostCopies`."""
        start = 0
        for part in self._parts(slot):
            part[:] = page[start : start + len(part)]
            start += len(part)

    def take_loads(self) -> tuple[int, float]:
        """See `HostCopies`."""
        with self._changed:
            taken, self._loaded = self._loaded, (0, 0.0)
        return taken

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
            runs, computed = self._orders.get()
            try:
                if computed is not None:
                    computed.synchronize()
                self._copy_all(runs, stream)
            except BaseException as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()

    def _parts(self, slot: int) -> list[memoryview]:
        rows = (slots.numpy() if isinstance(slots, Tensor) else slots for slots in self._slots)
        return [row[slot].data for row in rows]

    def _copy_all(self, runs: Iterable[_CopyRun], stream: CopyStream | None) -> None:
        for run in runs:
            started = time.perf_counter()
            if stream is None:
                self._copy(run)
            else:
                stream.run(lambda run=run: self._copy(run))  # type: ignore[misc]
            if self.disk is not None:
                for key, slot in zip(run.keys, run.slots, strict=False):
                    self.disk.put(key, self._parts(slot))
            if run.is_load:
                with self._changed:
                    pages, seconds = self._loaded
                    self._loaded = pages + len(run.pages), seconds + time.perf_counter() - started

    def _copy(self, run: _CopyRun) -> None:
        for rows, slots in zip(self._rows, self._slots, strict=True):
            for page, slot in zip(run.pages, run.slots, strict=True):
                if run.is_load:
                    _copy_row(rows, page, slots, slot)
                else:
                    _copy_row(slots, slot, rows, page)


def _copy_row(target: Rows, target_row: int, source: Rows, source_row: int) -> None:
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        target[target_row].copy_(source[source_row], non_blocking=True)
    else:
        target[target_row] = source[source_row]
