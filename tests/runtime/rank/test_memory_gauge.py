"""The memory that a piece of work takes at its peak is measured, also when it gave everything back."""

from pathlib import Path

import pytest
import torch

from phalanx_runtime.rank.memory.memory_profiler import CudaMemoryProfiler, HostMemoryProfiler, make_memory_profiler

MIB = 1 << 20


def allocate(mib: int) -> float:
    return float(torch.ones(mib * MIB // 4).sum())


def test_the_peak_of_work_that_freed_its_memory_is_seen() -> None:
    gauge = make_memory_profiler(torch.device("cpu"))
    allocate(1)
    assert 60 * MIB < gauge.peak(lambda: allocate(64)) < 96 * MIB
    assert gauge.peak(lambda: None) < 8 * MIB


def test_what_stays_is_held() -> None:
    gauge = make_memory_profiler(torch.device("cpu"))
    before = gauge.held()
    kept = torch.ones(64 * MIB // 4)
    assert 60 * MIB < gauge.held() - before < 96 * MIB
    assert kept[0] == 1


def test_where_the_mark_cannot_be_set_back_what_is_resident_counts(tmp_path: Path) -> None:
    (tmp_path / "clear_refs").mkdir()
    status = tmp_path / "status"
    status.write_text("VmHWM: 900 kB\nVmRSS: 100 kB\nRssAnon: 50 kB\n")
    gauge = HostMemoryProfiler(tmp_path)
    assert gauge.held() == 50 * 1024
    assert gauge.peak(lambda: status.write_text("VmHWM: 900 kB\nVmRSS: 130 kB\n")) == 30 * 1024
    with pytest.raises(OSError, match="RssAnon"):
        gauge.held()


def test_a_gpu_has_a_gauge_of_its_own() -> None:
    assert isinstance(make_memory_profiler(torch.device("cuda")), CudaMemoryProfiler)
