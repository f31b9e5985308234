"""Memory of a program and all its children as the kernel shares it out (PSS), sampled while it works."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.frame.programs import descendants

_SAMPLE_S = 0.5


def pss_bytes(pid: int) -> int:
    """Proportional set size of the process and its descendants."""
    return sum(_field(Path(f"/proc/{one}/smaps_rollup"), "Pss:") for one in {pid, *descendants(pid)})


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # it has left
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def pool_bytes(pid: int, size: int) -> int:
    """What a pool of this size occupies: the resident part of mappings of that size, within a hundredth; else all of it."""
    found = [
        held
        for one in {pid, *descendants(pid)}
        for mapped, held in _mappings(Path(f"/proc/{one}/smaps"))
        if size * 0.99 <= mapped <= size * 1.01
    ]
    return sum(found) if found else size


def _mappings(path: Path) -> list[tuple[int, int]]:
    """Size and proportional share of each mapping."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    fields = [[int(line.split()[1]) << 10 for line in lines if line.startswith(name)] for name in ("Size:", "Pss:")]
    return list(zip(*fields, strict=True))


@dataclass(slots=True)
class Peak:
    """The most that was seen."""

    pss_bytes: int = 0


@contextmanager
def sampled(pid: int) -> Iterator[Peak]:
    """The peak of all samples until the block is left."""
    peak, over = Peak(), threading.Event()

    def sample() -> None:
        while True:
            peak.pss_bytes = max(peak.pss_bytes, pss_bytes(pid))
            if over.wait(_SAMPLE_S):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
