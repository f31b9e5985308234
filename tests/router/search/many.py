"""Runs the fleets of many seeds, and prints each.

run_seed   one seed; records it, shortens a counterexample and prints the command that repeats it
run_many   seeds on several processes until the time is over
"""

import gc
import logging
import multiprocessing
import time

from bench import totals
from tests.router.search import plan, search
from tests.router.search.search import Outcome


def prepare_collector() -> None:
    """Lets the garbage collector run rarely: each fleet begins with a collection."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def describe(seed: int, outcome: Outcome) -> str:
    """Returns one line about a fleet."""
    counts = f"{outcome.faults} faults, {outcome.streams} streams, {outcome.tokens} tokens"
    counts += f", {outcome.resumed} resumed, {outcome.moved} moved, {outcome.restarted} started again"
    counts += f", {outcome.fetched} pages from disk" if outcome.fetched else ""
    return f"seed {seed}: {outcome.virtual_s / 3600:.2f} h, {counts}, {len(outcome.violations)} violations"


def run_seed(seed: int, shorten: bool = True) -> tuple[Outcome, int]:
    """Runs a fleet, and prints it. Returns also 1 with a violation."""
    logging.getLogger().addHandler(logging.NullHandler())
    chosen = plan.draw(seed)
    outcome = search.run(chosen)
    print(describe(seed, outcome), flush=True)
    record(seed, outcome)
    if not outcome.violations:
        return outcome, 0
    shown = outcome
    if shorten:
        chosen, shown = search.shorten(chosen)
        shown = shown if shown.violations else outcome
    print(*shown.violations[:5], sep="\n")
    faults = "; ".join(str(fault) for fault in chosen.faults)
    print(f'python -m tests.router.search --seed {seed} --parts {len(chosen.parts)} --faults "{faults}"', flush=True)
    return outcome, 1


def record(seed: int, outcome: Outcome) -> None:
    """Adds a fleet to the totals of all runs."""
    counts = {"fleets": 1, "virtual hours": outcome.virtual_s / 3600, "streams": outcome.streams, "tokens": outcome.tokens}
    counts |= {"faults": outcome.faults, "moved": outcome.moved, "pages from disk": outcome.fetched}
    replays = [f"--seed {seed}"] if outcome.violations else []
    totals.record(
        "fleet search",
        counts,
        wall_s=outcome.wall_s,
        cpu_s=outcome.cpu_s,
        failures=len(replays),
        seed=seed,
        replays=replays,
    )


def run_many(seconds: float, seed: int, jobs: int) -> int:
    """Searches in `jobs` processes until the time is over. Returns 1 if any found a counterexample."""
    end, following = time.monotonic() + seconds, iter(range(seed, seed + 10_000_000))
    fleets = failures = 0
    total = Outcome()
    with multiprocessing.get_context("spawn").Pool(jobs, prepare_collector, maxtasksperchild=50) as pool:
        running = [pool.apply_async(run_seed, (next(following),)) for _ in range(jobs)]
        while running:
            for done in [done for done in running if done.ready()]:
                running.remove(done)
                outcome, has_failed = done.get()
                fleets, failures = fleets + 1, failures + has_failed
                total.virtual_s += outcome.virtual_s
                total.streams += outcome.streams
                total.tokens += outcome.tokens
                total.faults += outcome.faults
                if time.monotonic() < end:
                    running.append(pool.apply_async(run_seed, (next(following),)))
            time.sleep(0.2)
    hours = total.virtual_s / 3600
    counts = f"{total.faults} faults, {total.streams} streams, {total.tokens} tokens"
    print(f"{fleets} fleets, {hours:.1f} fleet hours, {counts}, {failures} counterexamples")
    return 1 if failures else 0
