"""Captured decode steps of fixed sizes: which sizes are captured within a budget, and which one computes a step.

Sizes are captured from coarse to fine, so that a budget that ends early still leaves a size for every number of rows.
"""

import gc
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch

SIZE_STEP = 8
"""Distance of sizes above `SIZE_STEP`; below are powers of two."""

log = logging.getLogger(__name__)

Shortage = Literal["", "time", "memory", "failure"]
SHORTAGES: tuple[Shortage, ...] = get_args(Shortage)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the sizes of captured steps, ascending: 1, 2, 4, 8, then multiples of 8, and `max_num_seqs`."""
    sizes = {1, 2, 4, *range(SIZE_STEP, max_num_seqs, SIZE_STEP), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def capture_order(sizes: Sequence[int]) -> list[int]:
    """Returns the sizes in the order of their captures: the largest, powers of two, then the others, each descending.

    The largest needs most of the memory, which the others share. With all powers of two, padding is at most the number of rows.
    """
    descending = sorted(sizes, reverse=True)
    return sorted(descending, key=lambda size: 0 if size == descending[0] else 1 if size & (size - 1) == 0 else 2)


MAX_BYTES = 1 << 30
MAX_SHARE = 0.03
"""Of the memory that the rank may use."""
MAX_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class CaptureBudget:
    """Bounds of all captures; the capture that exceeds one is the last."""

    num_bytes: int
    seconds: float


def left_of(budget: CaptureBudget, account: "CaptureAccount") -> CaptureBudget:
    """Returns what captures left of a budget."""
    return CaptureBudget(max(0, budget.num_bytes - account.num_bytes), max(0.0, budget.seconds - account.seconds))


def default_budget(usable_bytes: int) -> CaptureBudget:
    """Returns the budget of a rank; its bytes are reserved before the page pool is sized."""
    return CaptureBudget(min(MAX_BYTES, int(MAX_SHARE * usable_bytes)), MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """Cost of one capture."""

    num_bytes: int
    seconds: float


def shortage(costs: Sequence[CaptureCost], budget: CaptureBudget) -> Shortage:
    """Returns what is spent after these captures; empty if another capture may start."""
    if sum(cost.num_bytes for cost in costs) >= budget.num_bytes:
        return "memory"
    return "time" if sum(cost.seconds for cost in costs) >= budget.seconds else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureAccount:
    """What the captures at start took."""

    captured: tuple[int, ...]
    """Sizes with a graph, ascending."""
    skipped: tuple[int, ...]
    """Sizes without one: their steps use the next larger size, or no graph."""
    num_bytes: int
    seconds: float
    """With warm-up runs."""
    shortage: Shortage
    """Why sizes were skipped."""

    def with_adapted(self, adapted: "CaptureAccount") -> "CaptureAccount":
        """Returns the account with the captures of steps with adapters; the sizes are those of steps without them."""
        return replace(
            self,
            num_bytes=self.num_bytes + adapted.num_bytes,
            seconds=self.seconds + adapted.seconds,
            shortage=self.shortage or adapted.shortage,
        )


NO_ACCOUNT = CaptureAccount(captured=(), skipped=(), num_bytes=0, seconds=0.0, shortage="")


class StepGraph(Protocol):
    """One captured function."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Runs `work`, with its collectives, as its capture needs it."""
        ...

    def capture(self, work: Callable[[], None]) -> None:
        """Records `work`, which reads nothing on the host, after its warm-up; no collective runs."""
        ...

    def replay(self) -> None:
        """Queues the captured work again."""
        ...


class CudaGraphPool:
    """Makes graphs that share memory: at most one of them runs at a time."""

    def __init__(self) -> None:
        make_stream: Any = torch.cuda.Stream
        self.stream = make_stream()
        """Captures run on this side stream."""
        self.handle: Any = torch.cuda.graph_pool_handle()

    def make_graph(self) -> "CudaGraph":
        """Returns an empty graph in this pool."""
        return CudaGraph(self)


class CudaGraph:
    """A graph of `torch.cuda`."""

    def __init__(self, pool: CudaGraphPool) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Runs `work` once on the side stream, where libraries allocate their memory."""
        stream, current = self._pool.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
        current.wait_stream(stream)

    def capture(self, work: Callable[[], None]) -> None:
        """Records `work` on the side stream."""
        capture: Any = torch.cuda.graph
        # Other threads may use the device meanwhile, for example to copy pages.
        with capture(self._graph, pool=self._pool.handle, stream=self._pool.stream, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        """Queues the graph on the current stream."""
        self._graph.replay()


class DecodeGraphs:
    """Decode steps of fixed sizes. `compute`: computes a step of this size, with padding rows for missing ones."""

    def __init__(self, sizes: Sequence[int], compute: Callable[[int], None], make_graph: Callable[[], StepGraph]) -> None:
        self.num_replays: Counter[int] = Counter()
        """By size."""
        self._sizes = sizes
        self.compute = compute
        self._make_graph = make_graph
        self._graphs: dict[int, StepGraph] = {}
        self._captured: list[int] = []

    def capture(
        self,
        budget: CaptureBudget,
        clock: Callable[[], float],
        used_bytes: Callable[[], int] = lambda: 0,
        agree: Callable[[Shortage], Shortage] | None = None,
    ) -> CaptureAccount:
        """Captures sizes until the budget is spent. `used_bytes`: memory of the device in use.

        All batch rows must be padding. All sizes run before the first capture, which compiles their kernels; the budget does not
        cover that time. A capture that fails is the last: its steps are computed without a graph. `agree`: the first shortage of
        all ranks, so that they capture equal sizes; each rank calls it before and after each capture. With it an error of a
        warm-up is raised: the peers have queued collectives that this rank has not, and would pair them with its next ones.
        """
        has_peers, agree = agree is not None, agree or _own
        start, costs = clock(), list[CaptureCost]()
        lack: Shortage = ""
        for size in sorted(self._sizes, reverse=True):
            self.compute(size)
        with _no_collection():
            for size in capture_order(self._sizes):
                lack = agree(shortage(costs, budget))
                if lack:
                    break
                before, began = used_bytes(), clock()
                graph = self._make_graph()
                lack = agree(_capture(graph, partial(self.compute, size), has_peers))
                if lack:
                    break
                self._graphs[size] = graph
                costs.append(CaptureCost(max(0, used_bytes() - before), clock() - began))
        self._captured = sorted(self._graphs)
        if lack:
            log.warning("not all decode steps are captured", extra={"why": lack, "captured": self._captured})
        return CaptureAccount(
            captured=tuple(self._captured),
            skipped=tuple(size for size in self._sizes if size not in self._graphs),
            num_bytes=sum(cost.num_bytes for cost in costs),
            seconds=clock() - start,
            shortage=lack,
        )

    def size_for(self, num_rows: int) -> int | None:
        """Returns the smallest captured size that holds the rows, if any."""
        at = bisect_left(self._captured, num_rows)
        return self._captured[at] if at < len(self._captured) else None

    def run(self, num_rows: int) -> int | None:
        """Replays the smallest size that holds the rows and returns it; does nothing without such a size."""
        size = self.size_for(num_rows)
        if size is not None:
            self._graphs[size].replay()
            self.num_replays[size] += 1
        return size


@contextmanager
def _no_collection() -> Iterator[None]:
    """Frees unused objects of a GPU first, and none within: a graph that is freed during a capture makes it fail."""
    was_enabled = gc.isenabled()
    if torch.cuda.is_available():
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _own(lack: Shortage) -> Shortage:
    return lack


def _capture(graph: StepGraph, work: Callable[[], None], has_peers: bool) -> Shortage:
    if has_peers:
        graph.warm_up(work)
        return _lack_of(lambda: graph.capture(work))
    return _lack_of(lambda: graph.warm_up(work)) or _lack_of(lambda: graph.capture(work))


def _lack_of(phase: Callable[[], None]) -> Shortage:
    try:
        phase()
    except torch.OutOfMemoryError:
        return "memory"
    except RuntimeError as error:
        log.warning("decode steps run without a CUDA graph", extra={"why": str(error)})
        return "failure"
    return ""
