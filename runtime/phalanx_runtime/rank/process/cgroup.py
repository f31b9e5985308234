"""CPU and memory limits of this process from its cgroups (version 1 and 2), at most the machine's own size."""

import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""Version 1 has a huge number where there is no limit."""


@dataclass(frozen=True, slots=True)
class System:
    """Files of the kernel with the limits. Tests pass their own folders."""

    cgroup: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")
    meminfo: Path = Path("/proc/meminfo")
    processors: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def cpu_limit(system: System) -> float:
    """Returns the processors that this process may use: the smallest quota on its path, at most its affinity mask."""
    limit = float(system.processors)
    for folder in _folders(system, "cpu"):
        quota = _cpu_v2(folder) or _cpu_v1(folder)
        if quota is not None:
            limit = min(limit, quota)
    return limit


def memory_limit(system: System) -> int:
    """Returns the bytes that this process may use: the smallest limit on its path, at most the machine's memory."""
    limit = _machine_memory(system)
    for folder in _folders(system, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and int(text) < UNLIMITED_BYTES:
                limit = min(limit, int(text))
    return limit


def _folders(system: System, controller: str) -> Iterator[Path]:
    """Yields the cgroup folders from this process's up to the root, for a controller of version 1 or for version 2."""
    for line in _read(system.own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root = system.cgroup
        elif controller in controllers.split(","):
            root = system.cgroup / controller
        else:
            continue
        # Inside a container the path may be the host's while the mounted root is already the container's: missing folders are
        # skipped.
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
    """Returns the file's text without the line end; empty if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# Threads of a rank: its share of the pod's processors, never the machine's count; and how they wait.

SPINS = "1000"
"""Iterations of an OpenMP thread's spin before it sleeps: about 15 us. libgomp's default takes milliseconds, in which a waiting
thread keeps the processor from the thread that it waits for if other processes run."""


def rank_threads(asked: int | None, cpu_limit: float, local_world_size: int) -> int:
    """Returns the threads of one of `local_world_size` ranks that share `cpu_limit` processors; at least one."""
    if asked is not None:
        return asked
    return max(1, int(cpu_limit / local_world_size))


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Sets how OpenMP threads wait, unless the user did. Call it before torch, which brings OpenMP, is imported."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
