"""Runs one kind of cases in child processes: a child that dies is a failure of its case, and a new child continues after it."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.fuzz.child import PROGRESS

STALL_S = 120.0
"""Time without progress in which a child sleeps, after which it counts as hanging. A child that waits for the processor of a busy
machine does not sleep."""
POLL_S = 0.05
MAX_FAILURES = 200
"""Of one kind; the run of the kind ends there."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One case with a wrong answer."""

    replay: str
    why: str
    where: str = ""


@dataclass(slots=True)
class Totals:
    """The cases of one kind."""

    kind: str
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    max_resident_kib: int = 0
    """Of the largest process."""
    failures: list[Failure] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """All cases."""
        return self.accepted + self.refused + len(self.failures)


def run_kind(kind: str, seed: int, count: int, first: int = 0, child: str = "bench.fuzz.child") -> Totals:
    """Runs `count` cases and returns their totals. `child`: the module that runs them."""
    totals, start_s, end = Totals(kind), time.monotonic(), first + count
    while first < end and len(totals.failures) < MAX_FAILURES:
        first = _run_child(totals, (child, kind, seed, first, end - first))
    totals.seconds = time.monotonic() - start_s
    return totals


def _run_child(totals: Totals, words: tuple[str, str, int, int, int]) -> int:
    """Returns the index after the last case of this child. `words`: module, kind, seed, first index and number of cases."""
    _, kind, seed, first, count = words
    with tempfile.TemporaryDirectory(prefix="phalanx-fuzz-") as folder:
        progress, out, errors = (Path(folder) / name for name in ("progress", "out", "errors"))
        progress.write_bytes(PROGRESS.pack(first, 0, 0, 0, 0))
        command = [sys.executable, "-W", "ignore", "-m", *map(str, words), str(progress)]
        with (
            out.open("wb") as stdout,
            errors.open("wb") as stderr,
            subprocess.Popen(command, stdout=stdout, stderr=stderr) as child,
        ):
            has_stalled = _wait(child, progress)
        index, accepted, refused, _, resident_kib = PROGRESS.unpack(progress.read_bytes())
        totals.max_resident_kib = max(totals.max_resident_kib, resident_kib)
        totals.accepted += accepted
        totals.refused += refused
        for line in out.read_text().splitlines():
            failure = json.loads(line)
            totals.failures.append(Failure(f"{kind}:{seed}:{failure['index']}", failure["why"], failure["where"]))
        if index == first + count and child.returncode == 0:
            return int(index)
        last = errors.read_text(errors="replace").strip().splitlines()[-1:]
        why = "hangs" if has_stalled else _death(child.returncode)
        totals.failures.append(Failure(f"{kind}:{seed}:{index}", f"{why} {' '.join(last)[:300]}".strip()))
        return int(index) + 1


def _wait(child: "subprocess.Popen[bytes]", progress: Path) -> bool:
    """Waits for the child and returns whether it stalled, and was killed."""
    seen, slept_s, last_s = b"", 0.0, time.monotonic()
    while child.poll() is None:
        now_s, content = time.monotonic(), progress.read_bytes()
        slept_s = slept_s + now_s - last_s if content == seen and sleeps(child.pid) else 0.0
        seen, last_s = content, now_s
        if slept_s > STALL_S:
            child.kill()
            child.wait()
            return True
        time.sleep(POLL_S)
    return False


def sleeps(pid: int) -> bool:
    """Returns whether each thread of a process and of its children sleeps: none runs, or waits for a processor or a disk."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state in "RD" or not all(sleeps(int(child)) for child in (task / "children").read_text().split()):
                return False
    except OSError:  # a thread or process has ended
        return False
    return True


def _death(status: int) -> str:
    if status == -signal.SIGPROF:
        return "takes too much processor time"
    return f"the process ends with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
