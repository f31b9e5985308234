"""Runs cases in this process, with bounds that the kernel enforces: processor time per case, and memory over that of the start.

`python -m bench.fuzz.child KIND SEED FIRST COUNT PROGRESS`: the file PROGRESS has the counts, so that they survive a crash.
"""

import json
import logging
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.fuzz.targets import Kind, Target, case_random, kinds

CASE_CPU_S = 10.0
"""Processor time of one case; SIGPROF ends the process."""
CASE_BYTES = 1 << 30
"""Private memory over that of the opened target."""
PROGRESS = struct.Struct("<qqqqq")
"""Next index, accepted, refused, failed; largest resident memory of the process in KiB."""
WARM_UP = 3
MEMORY_FOLDER = Path("/dev/shm")


def run_cases(target: Target, kind: str, seed: int, first: int, count: int, progress: mmap.mmap) -> None:
    """Runs the cases and prints a line of JSON for each failure."""
    counts = {"accepted": 0, "refused": 0, "failed": 0}
    for index in range(first, first + count):
        PROGRESS.pack_into(progress, 0, index, *counts.values(), _max_resident_kib())
        signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)
        try:
            counts[target.run(case_random(kind, seed, index))] += 1
        except BaseException as error:  # Rust's panics are no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            counts["failed"] += 1
            frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            why = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps({"index": index, "why": why, "where": " ".join(frames[-4:])}), flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)
    PROGRESS.pack_into(progress, 0, first + count, *counts.values(), _max_resident_kib())


def _max_resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fast_folder() -> Path | None:
    """Returns a folder in memory for the files of cases, None on a machine without one."""
    return MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None


def limit_memory() -> None:
    """Bounds private memory to that of now and `CASE_BYTES`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + CASE_BYTES, used + CASE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(words: Sequence[str], known: Mapping[str, Kind]) -> None:
    """Opens the target and runs the cases. `words`: the command line."""
    kind, seed, first, count, path = words
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="phalanx-fuzz-", dir=fast_folder()) as folder, open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), PROGRESS.size) as progress:
            target = known[kind].open(Path(folder))
            for index in range(WARM_UP):  # loads what the target loads late
                try:
                    target.run(case_random(kind, -1, index))
                except Exception:
                    continue
            limit_memory()
            run_cases(target, kind, int(seed), int(first), int(count), progress)
            target.close()


if __name__ == "__main__":
    main(sys.argv[1:], kinds())
