"""`python -m bench.fuzz --requests N --sockets N --files N --seed S`; `--replay KIND:SEED:INDEX` repeats one case.

--files is the number of cases for each kind of file. Each kind runs in a process of its own; a case that kills it, takes more
than ten seconds of processor time or one GiB of memory is a failure. The exit status is 1 after a failure.
`python -m bench.totals` prints the sums of all runs.
"""

import argparse
import resource
import sys
import time

from bench import totals as all_runs
from bench.fuzz.runner import Totals, run_kind
from bench.fuzz.targets import kinds

BATCH = 20_000
"""Cases of a process, after which they are recorded."""


def main() -> int:
    """Runs the cases and prints totals and failures."""
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    for group in ("requests", "sockets", "files"):
        parser.add_argument(f"--{group}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time, so that runs differ")
    parser.add_argument("--kinds", default=",".join(kinds()), help="comma-separated; all without the flag")
    parser.add_argument("--replay", help="KIND:SEED:INDEX, as a failure is printed")
    flags = parser.parse_args()
    if flags.replay:
        kind, seed, index = flags.replay.split(":")
        runs = [run_and_show(kind, int(seed), 1, first=int(index))]
    else:
        chosen = [kinds()[name] for name in flags.kinds.split(",")]
        counts = [(kind.name, getattr(flags, kind.group)) for kind in chosen]
        parts = [(name, first, min(BATCH, count - first)) for name, count in counts for first in range(0, count, BATCH)]
        runs = [run_and_record(name, flags.seed, count, first) for name, first, count in parts]
    print(f"{sum(totals.cases for totals in runs)} cases, {sum(len(totals.failures) for totals in runs)} failures")
    return int(any(totals.failures for totals in runs))


def run_and_record(kind: str, seed: int, count: int, first: int) -> Totals:
    """Runs one kind, prints it, and adds it to the totals of all runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    totals = run_and_show(kind, seed, count, first)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    record_cases(totals, seed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return totals


def record_cases(totals: Totals, seed: int, cpu_s: float) -> None:
    """Adds the cases of one kind to the totals of all runs, with the flags that repeat failures."""
    counts = {"cases": totals.cases, "accepted": totals.accepted}
    all_runs.record(
        f"fuzz {totals.kind}",
        counts,
        wall_s=totals.seconds,
        cpu_s=cpu_s,
        failures=len(totals.failures),
        seed=seed,
        replays=[f"--replay {failure.replay}" for failure in totals.failures],
        peak_mib=totals.max_resident_kib >> 10,
    )


def run_and_show(kind: str, seed: int, count: int, first: int = 0) -> Totals:
    """Runs one kind and prints its line and its failures."""
    totals = run_kind(kind, seed, count, first)
    print(
        f"{kind:12} {totals.cases:9} cases {totals.accepted:9} accepted {totals.refused:9} refused "
        f"{len(totals.failures):5} failures {totals.seconds:8.1f} s {totals.max_resident_kib >> 10:6} MiB",
        flush=True,
    )
    for failure in totals.failures:
        print(f"--replay {failure.replay}\n    {failure.why}\n    {failure.where}", flush=True)
    return totals


if __name__ == "__main__":
    sys.exit(main())
