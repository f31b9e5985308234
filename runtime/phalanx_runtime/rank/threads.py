"""Threads of a rank: its part of the processors that the cgroup allows the pod, never the machine's count; and how they wait."""

from collections.abc import MutableMapping

SPINS = "1000"
"""How often an OpenMP thread looks for the others before it sleeps: some 15 us. libgomp's own count takes milliseconds, in which
a thread that waits keeps the processor from the one it waits for as soon as any other process wants to run."""


def rank_threads(asked: int | None, cpu_limit: float, local_world_size: int) -> int:
    """Threads for one of `local_world_size` ranks that share `cpu_limit` processors; at least one."""
    if asked is not None:
        return asked
    return max(1, int(cpu_limit / local_world_size))


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Sets how OpenMP threads wait, where the user has not. To be called before torch is loaded, which brings OpenMP."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
