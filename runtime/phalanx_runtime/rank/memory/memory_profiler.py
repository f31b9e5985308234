"""Measures memory of this process: the amount in use, and the peak of a piece of work.

On CPU, freed memory is returned to the kernel first. The peak is the high-water mark, or, if its reset is forbidden, the resident
set after the work.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

_RESET_PEAK = "5"


class MemoryProfiler(Protocol):
    """Measures one device."""

    @property
    def device(self) -> torch.device:
        """The device."""
        ...

    def allocated_bytes(self) -> int:
        """Bytes in use that no file backs."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Runs `work` and returns its peak, without memory in use before."""
        ...


def make_memory_profiler(device: torch.device) -> MemoryProfiler:
    """Returns the profiler for `device`."""
    return HostMemoryProfiler() if device.type == "cpu" else CudaMemoryProfiler(device)


class CudaMemoryProfiler:
    """Reads torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._device

    def allocated_bytes(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Peak of live tensors."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self.allocated_bytes()
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class HostMemoryProfiler:
    """Reads the kernel's files in `proc`."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def allocated_bytes(self) -> int:
        """Resident anonymous bytes."""
        _trim()
        return self._read("RssAnon")

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Peak of resident bytes."""
        _trim()
        mark = "VmHWM" if self._reset() else "VmRSS"
        before = self._read("VmRSS")
        work()
        return max(0, self._read(mark) - before)

    def _reset(self) -> bool:
        try:
            (self._proc / "clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return False
        return True

    def _read(self, field: str) -> int:
        for line in (self._proc / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
        raise OSError(f"{self._proc}/status has no field {field}")


def _trim() -> None:
    """Returns freed memory to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
