"""Times work on a device: by CUDA events, or by the host's clock on CPU."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch

Work = Callable[[], object]
TARGET_S = 0.03
"""Duration of one sample of a captured computation."""
SAMPLES = 5
MAX_CALLS = 50


class Clock(Protocol):
    """Times work on one device."""

    def captured_s(self, work: Work) -> float:
        """Returns the seconds of `work` without launches by the host: many calls in one CUDA graph. Median of `SAMPLES`."""
        ...

    def queued_s(self, work: Work, count: int) -> float:
        """Returns the seconds of each of `count` calls that are queued at once."""
        ...

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        ...


class GpuClock:
    """By CUDA events."""

    def captured_s(self, work: Work) -> float:
        """See `Clock`."""
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels; libraries allocate
                work()
        torch.cuda.synchronize()
        calls = max(1, min(MAX_CALLS, round(TARGET_S / max(1e-6, self.queued_s(work, 3)))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                work()
        graph.replay()
        return median(self.queued_s(graph.replay, 1) for _ in range(SAMPLES)) / calls

    def queued_s(self, work: Work, count: int) -> float:
        """See `Clock`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    def synchronize(self) -> None:
        """See `Clock`."""
        torch.cuda.synchronize()


class HostClock:
    """By the host's clock, for work that ends before its call returns."""

    def captured_s(self, work: Work) -> float:
        """See `Clock`; one call after another."""
        return self.queued_s(work, 1)

    def queued_s(self, work: Work, count: int) -> float:
        """See `Clock`."""
        started = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - started) / count

    def synchronize(self) -> None:
        """See `Clock`."""


def open_clock(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return GpuClock() if device.type == "cuda" else HostClock()


Interval = tuple[float, float]


def busy_share(intervals: Sequence[Interval]) -> float:
    """Returns the share of the time from the first start to the last end that at least one interval covers; 0 without any."""
    if not intervals:
        return 0.0
    covered, until = 0.0, min(start for start, _ in intervals)
    first = until
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - first) if until > first else 0.0


def profiled_busy(work: Work, device: torch.device) -> float:
    """Returns the share of time in which kernels run while `work` does, by torch's profiler; tracing lengthens short kernels."""
    from torch.profiler import ProfilerActivity, profile

    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as trace:
        work()
        if is_gpu:
            torch.cuda.synchronize()
    events: Any = trace.events()
    wanted = "CUDA" if is_gpu else "CPU"
    return busy_share([(one.time_range.start, one.time_range.end) for one in events if one.device_type.name == wanted])
