"""Threads of a rank: its part of the processors that the cgroup allows the pod, never the machine's count."""


def rank_threads(asked: int | None, cpu_limit: float, local_world_size: int) -> int:
    """Threads for one of `local_world_size` ranks that share `cpu_limit` processors; at least one."""
    if asked is not None:
        return asked
    return max(1, int(cpu_limit / local_world_size))
