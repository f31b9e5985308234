"""Samples the memory (PSS) of a program and all its descendants."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.frame.programs import descendants

_SAMPLE_S = 0.5


def pss_bytes(pid: int) -> int:
    return sum(_field(Path(f"/proc/{process}/smaps_rollup"), "Pss:") for process in {pid, *descendants(pid)})


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # it has exited
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def pool_bytes(pid: int, size: int) -> int:
    """Returns the resident part of mappings of about `size` bytes (within 1 %); `size` without such a mapping."""
    found = [
        resident
        for process in {pid, *descendants(pid)}
        for mapped, resident in _mappings(Path(f"/proc/{process}/smaps"))
        if size * 0.99 <= mapped <= size * 1.01
    ]
    return sum(found) if found else size


def _mappings(path: Path) -> list[tuple[int, int]]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    fields = [[int(line.split()[1]) << 10 for line in lines if line.startswith(name)] for name in ("Size:", "Pss:")]
    return list(zip(*fields, strict=True))


@dataclass(slots=True)
class Peak:
    pss_bytes: int = 0


@contextmanager
def sampled_peak(pid: int) -> Iterator[Peak]:
    """Samples until the block ends."""
    peak, has_ended = Peak(), threading.Event()

    def sample() -> None:
        while True:
            peak.pss_bytes = max(peak.pss_bytes, pss_bytes(pid))
            if has_ended.wait(_SAMPLE_S):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        has_ended.set()
        thread.join()
