"""CPU and memory limits of this process from its cgroups (version 1 and 2), its threads, and settings of libraries."""

import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""Version 1 reports a huge number for no limit."""


@dataclass(frozen=True, slots=True)
class System:
    """Kernel files with the limits."""

    cgroup: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")
    meminfo: Path = Path("/proc/meminfo")
    processors: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def cpu_limit(system: System) -> float:
    """Returns the CPUs of this process: the smallest quota on its cgroup path, at most its affinity mask."""
    limit = float(system.processors)
    for folder in _folders(system, "cpu"):
        quota = _cpu_v2(folder) or _cpu_v1(folder)
        if quota is not None:
            limit = min(limit, quota)
    return limit


def memory_limit(system: System) -> int:
    """Returns the smallest limit on the cgroup path, at most the machine's memory."""
    limit = _machine_memory(system)
    for folder in _folders(system, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and int(text) < UNLIMITED_BYTES:
                limit = min(limit, int(text))
    return limit


def _folders(system: System, controller: str) -> Iterator[Path]:
    """Yields cgroup folders up to the root, of version 2 or of this version 1 controller."""
    for line in _read(system.own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root = system.cgroup
        elif controller in controllers.split(","):
            root = system.cgroup / controller
        else:
            continue
        # Inside a container the path may be the host's and the mounted root the container's: skip missing folders.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _cpu_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _cpu_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _machine_memory(system: System) -> int:
    for line in _read(system.meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return UNLIMITED_BYTES


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


OPENMP_SPINS = "1000"
"""Spin of a waiting OpenMP thread before it sleeps: about 15 us. libgomp's default is milliseconds, taken from other threads."""


def rank_threads(num_threads: int | None, cpu_limit: float, local_world_size: int) -> int:
    """Returns `num_threads`, else the share of one rank; at least one."""
    if num_threads is not None:
        return num_threads
    return max(1, int(cpu_limit / local_world_size))


def limit_openmp_spin(environment: MutableMapping[str, str]) -> None:
    """Shortens the spin of OpenMP threads unless OMP_WAIT_POLICY is set. Call it before importing torch."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)


CACHED_KERNELS = "128"
"""In oneDNN's cache and in that of ideep, a part of torch. The default of both is 1,024 kernels of about 0.3 MiB."""


def limit_cached_kernels(environment: MutableMapping[str, str]) -> None:
    """Bounds the memory of kernels, one per number of rows, unless the variables are set. Call it before importing torch."""
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", CACHED_KERNELS)
    environment.setdefault("LRU_CACHE_CAPACITY", CACHED_KERNELS)  # of ideep
