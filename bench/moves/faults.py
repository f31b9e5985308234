"""Moves in virtual time with a fault at each step: no index is missing or doubled, no stream hangs, no page leaks.

    python -m bench.moves.faults [--runs 1000] [--processes 2] [--only "freeze / source"] [--json FILE]

Eight steps of a move x source, target, router x killed, hung, dropped, delayed, corrupted. A run counts when its move got to the
step. Routers, links, leaders, engines, schedulers and pages are the real ones (`bench.virtual`); a seed gives the same run again.
Exits 1 when anything was wrong, or a step was hardly ever reached.
"""

import argparse
import itertools
import logging
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.virtual.clock import run_virtual
from bench.virtual.world import FAULTS, STEPS, WHO, Cell, Machines, World
from phalanx_router.moves.records import TransferMode

TRIES = 4
"""Runs for each that counts, at most."""
HOWS: tuple[TransferMode, ...] = ("stop", "precopy")
WITHOUT_PAGES = frozenset({"propose", "decode", "release"})
"""Steps that a move without pages has too."""


@dataclass(slots=True)
class Result:
    """Runs of one cell. `struck`: those whose move got to the step. `resumed`: streams that the next router found. `wrong`: seed
    and what was wrong."""

    cell: str
    runs: int = 0
    struck: int = 0
    resumed: int = 0
    wrong: list[tuple[int, list[str]]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


def cells(only: str = "") -> list[Cell]:
    """The whole product, or the cells whose name contains this."""
    product = itertools.product(range(len(STEPS)), WHO, FAULTS)
    return [cell for cell in (Cell(*parts) for parts in product) if only in str(cell)]


def run_cell(cell: Cell, count: int, first_seed: int = 0, machines: Machines | None = None, leave_share: float = 0.15) -> Result:
    """Runs until the fault has struck so many times."""
    result = Result(str(cell))
    base = first_seed + 1_000_000 * (cell.step * 100 + WHO.index(cell.who) * 10 + FAULTS.index(cell.fault))
    hows: tuple[TransferMode, ...] = (*HOWS, "recompute") if STEPS[cell.step] in WITHOUT_PAGES else HOWS
    for seed in range(base, base + TRIES * count):
        outcome = run_virtual(World(seed, cell, machines=machines, leave_share=leave_share).run(hows[seed % len(hows)]))
        result.runs += 1
        result.struck += outcome.has_struck
        result.resumed += outcome.resumed
        result.ends.update(outcome.ends)
        if outcome.wrong:
            result.wrong.append((seed, outcome.wrong))
        if result.struck == count:
            break
    return result


def _run(asked: tuple[Cell, int, int]) -> Result:
    logging.getLogger().addHandler(logging.NullHandler())
    return run_cell(*asked)


def _show(result: Result) -> None:
    ends = ", ".join(f"{count} {end}" for end, count in result.ends.most_common())
    struck = f"{result.struck:5} of {result.runs:5} struck"
    resumed = f"; {result.resumed} resumed" if result.resumed else ""
    print(f"{result.cell:36} {struck}, {len(result.wrong):3} wrong; moves: {ends}{resumed}", flush=True)
    for seed, wrong in result.wrong[:3]:
        print(f"    seed {seed}: {wrong[:3]}")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when anything was wrong."""
    made = argparse.ArgumentParser(prog="python -m bench.moves.faults", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--runs", type=int, default=1000, help="for each cell, that get to its step")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--only", default="", help="only cells whose name contains this")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, default=None, help="write the results here too")
    args = made.parse_args(argv)
    began, asked = time.monotonic(), [(cell, args.runs, args.seed) for cell in cells(args.only)]
    results = []
    with multiprocessing.Pool(args.processes) as pool:
        for result in pool.imap(_run, asked):
            results.append(result)
            _show(result)
    runs, wrong = sum(result.runs for result in results), sum(len(result.wrong) for result in results)
    short = [result.cell for result in results if result.struck < args.runs]
    print(f"{len(results)} cells, {runs} runs, {wrong} wrong, {time.monotonic() - began:.0f} s; too few: {short or 'none'}")
    if args.json is not None:
        args.json.write_bytes(msgspec.json.encode(results))
    return 1 if wrong or short else 0


if __name__ == "__main__":
    sys.exit(main())
