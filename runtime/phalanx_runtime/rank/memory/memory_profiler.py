"""How much memory of its device this process holds, and the most that a piece of work takes beside it. Measured, not computed.

On a GPU the allocator counts. On CPU the kernel does: before each look the C library gives back what it keeps of freed memory,
and the high-water mark of the resident set is set back; where that is forbidden, what is resident after the work stands for it.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

_RESET_PEAK = "5"


class MemoryProfiler(Protocol):
    """Measures this process's memory on one device."""

    @property
    def device(self) -> torch.device:
        """The device."""
        ...

    def held(self) -> int:
        """Bytes that are held now and that no file backs."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes that the work took at its peak, beside what was held before."""
        ...


def make_memory_profiler(device: torch.device) -> MemoryProfiler:
    """The gauge of this device."""
    return HostMemoryProfiler() if device.type == "cpu" else CudaMemoryProfiler(device)


class CudaMemoryProfiler:
    """Asks torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._device

    def held(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self, work: Callable[[], object]) -> int:
        """Most bytes of live tensors during the work, less those before."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self.held()
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class HostMemoryProfiler:
    """Asks the kernel. `proc` is where it tells of this process."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def held(self) -> int:
        """Resident anonymous bytes."""
        _trim()
        return self._read("RssAnon")

    def peak(self, work: Callable[[], object]) -> int:
        """Most resident bytes during the work, less those before."""
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
        raise OSError(f"{self._proc}/status tells no {field}")


def _trim() -> None:
    """Gives freed memory back to the kernel, where the C library can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
