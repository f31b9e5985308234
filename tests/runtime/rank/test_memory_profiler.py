"""Peak memory of a piece of work is measured, also if it frees everything."""

from pathlib import Path

import pytest
import torch

from phalanx_runtime.rank.memory.memory_profiler import CudaMemoryProfiler, HostMemoryProfiler, make_memory_profiler

MIB = 1 << 20


def allocate(mib: int) -> float:
    return float(torch.ones(mib * MIB // 4).sum())


def test_peak_of_freed_memory_is_measured() -> None:
    profiler = make_memory_profiler(torch.device("cpu"))
    allocate(1)
    assert 60 * MIB < profiler.peak_bytes(lambda: allocate(64)) < 96 * MIB
    assert profiler.peak_bytes(lambda: None) < 8 * MIB


def test_remaining_memory_is_counted() -> None:
    profiler = make_memory_profiler(torch.device("cpu"))
    before = profiler.allocated_bytes()
    kept = torch.ones(64 * MIB // 4)
    assert 60 * MIB < profiler.allocated_bytes() - before < 96 * MIB
    assert kept[0] == 1


def test_resident_memory_counts_without_a_resettable_peak(tmp_path: Path) -> None:
    (tmp_path / "clear_refs").mkdir()
    status = tmp_path / "status"
    status.write_text("VmHWM: 900 kB\nVmRSS: 100 kB\nRssAnon: 50 kB\n")
    profiler = HostMemoryProfiler(tmp_path)
    assert profiler.allocated_bytes() == 50 * 1024
    assert profiler.peak_bytes(lambda: status.write_text("VmHWM: 900 kB\nVmRSS: 130 kB\n")) == 30 * 1024
    with pytest.raises(OSError, match="RssAnon"):
        profiler.allocated_bytes()


def test_gpu_has_its_own_profiler() -> None:
    assert isinstance(make_memory_profiler(torch.device("cuda")), CudaMemoryProfiler)
