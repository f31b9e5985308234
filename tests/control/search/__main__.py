"""Runs worlds against the operator: `make search HOURS=n`, or one script again.

python -m tests.control.search --hours 1                     searches on all cores; exit code 1 after a counterexample
python -m tests.control.search --seed 7 --worlds 200         one seed
python -m tests.control.search --script "start 2 0 1 20 0; wait 4; scale 1"
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

from bench import totals
from tests.control.search import history, machine, steps

BATCH = 50
"""Worlds of a seed; hypothesis repeats itself less with a new one."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--worlds", type=int, default=0)
    parser.add_argument("--script", default="", help="steps, separated by ';'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-shorten", action="store_true", help="report the first counterexample as it was found")
    options = parser.parse_args(arguments)
    logging.getLogger("phalanx_operator").setLevel(logging.CRITICAL)
    if options.script:
        return replay(options.script)
    if not options.hours:
        worlds = options.worlds or BATCH
        return report(options.seed, machine.run(options.seed, worlds, shorten=not options.no_shorten), worlds)
    return search(options.hours * 3600, options.seed, options.jobs)


def replay(text: str) -> int:
    """Runs a script. Returns 1 if it violates an invariant."""
    try:
        world = steps.run(history.parse(text))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"no violation in {len(world.looks)} looks, {world.t:.0f} s of virtual time")
    return 0


def report(seed: int, tally: machine.Tally, worlds: int = BATCH) -> int:
    """Prints and records a batch. Returns 1 with a counterexample. worlds: how many it should have."""
    counts = {"worlds": tally.worlds, "looks": tally.looks, "virtual hours": tally.virtual_s / 3600}
    replays = [f"--seed {seed} --worlds {worlds}"] if tally.failure is not None else []
    totals.record(
        "operator search",
        counts,
        wall_s=tally.wall_s,
        cpu_s=tally.cpu_s,
        failures=len(replays),
        seed=seed,
        replays=replays,
    )
    print(f"seed {seed}: {tally.worlds} worlds, {tally.looks} looks", flush=True)
    if tally.failure is None:
        return 0
    script = "; ".join(str(tally.failure.script).splitlines())
    print(tally.failure.violation)
    print(f'python -m tests.control.search --script "{script}"', flush=True)
    return 1


def search(seconds: float, seed: int, jobs: int) -> int:
    """Searches in `jobs` processes until the time is over. Returns 1 if any found a counterexample."""
    end = time.monotonic() + seconds
    seeds = (seed + number for number in range(1_000_000))
    worlds = looks = failures = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        running = [(next_seed := next(seeds), pool.apply_async(machine.run, (next_seed, BATCH))) for _ in range(jobs)]
        while running:
            for entry in list(running):
                if not entry[1].ready():
                    continue
                running.remove(entry)
                tally = entry[1].get()
                failures += report(entry[0], tally)
                worlds, looks = worlds + tally.worlds, looks + tally.looks
                if time.monotonic() < end:
                    following = next(seeds)
                    running.append((following, pool.apply_async(machine.run, (following, BATCH))))
            time.sleep(0.2)
    print(f"{worlds} worlds, {looks} looks, {failures} counterexamples")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
