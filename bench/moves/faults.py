"""Checks moves in virtual time with a fault at each step: no missing or doubled index, no hung stream, no leaked page.

    python -m bench.moves.faults [--runs 1000] [--processes 2] [--only "freeze / source"] [--json FILE]

Cells: eight steps of a move x source, target, router x killed, hung, dropped, delayed, corrupted. A run counts if its move
reached the step. Routers, links, leaders, engines, schedulers and pages are real (`bench.virtual`); a seed repeats its run
exactly. Exits with 1 on a violation, or if a step was reached in too few runs.
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
from bench.virtual.world import FAULTS, ROLES, STEPS, Cell, Machines, World
from phalanx_router.moves.records import TransferMode

TRIES = 4
"""Maximum runs per counted run."""
MODES: tuple[TransferMode, ...] = ("stop", "precopy")
WITHOUT_PAGES = frozenset({"propose", "decode", "release"})
"""Steps that exist in moves without pages."""


@dataclass(slots=True)
class Result:
    cell: str
    runs: int = 0
    struck: int = 0  # runs with a move that reached the step
    resumed: int = 0  # streams that the next router found
    violations: list[tuple[int, list[str]]] = field(default_factory=list)  # with the seed
    ends: Counter[str] = field(default_factory=Counter)  # outcomes of moves


def cells(only: str = "") -> list[Cell]:
    """Returns all cells, or those with `only` in their name."""
    product = itertools.product(range(len(STEPS)), ROLES, FAULTS)
    return [cell for cell in (Cell(*parts) for parts in product) if only in str(cell)]


def run_cell(
    cell: Cell, count: int, first_seed: int = 0, machines: Machines | None = None, disconnect_share: float = 0.15
) -> Result:
    """Runs a cell until the fault has struck `count` times."""
    result = Result(str(cell))
    base = first_seed + 1_000_000 * (cell.step * 100 + ROLES.index(cell.role) * 10 + FAULTS.index(cell.fault))
    modes: tuple[TransferMode, ...] = (*MODES, "recompute") if STEPS[cell.step] in WITHOUT_PAGES else MODES
    for seed in range(base, base + TRIES * count):
        world = World(seed, cell, machines=machines, disconnect_share=disconnect_share)
        outcome = run_virtual(world.run(modes[seed % len(modes)]))
        result.runs += 1
        result.struck += outcome.has_struck
        result.resumed += outcome.resumed
        result.ends.update(outcome.ends)
        if outcome.violations:
            result.violations.append((seed, outcome.violations))
        if result.struck == count:
            break
    return result


def _run(arguments: tuple[Cell, int, int]) -> Result:
    logging.getLogger().addHandler(logging.NullHandler())
    return run_cell(*arguments)


def _print(result: Result) -> None:
    ends = ", ".join(f"{count} {end}" for end, count in result.ends.most_common())
    struck = f"{result.struck:5} of {result.runs:5} struck"
    resumed = f"; {result.resumed} resumed" if result.resumed else ""
    print(f"{result.cell:36} {struck}, {len(result.violations):3} with violations; moves: {ends}{resumed}", flush=True)
    for seed, violations in result.violations[:3]:
        print(f"    seed {seed}: {violations[:3]}")


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="python -m bench.moves.faults", description=(__doc__ or "").split("\n")[0])
    flags.add_argument("--runs", type=int, default=1000, help="runs per cell that reach its step")
    flags.add_argument("--processes", type=int, default=1)
    flags.add_argument("--only", default="", help="only cells with this in their name")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, default=None, help="file for the results as JSON")
    args = flags.parse_args(argv)
    started, arguments = time.monotonic(), [(cell, args.runs, args.seed) for cell in cells(args.only)]
    results = []
    with multiprocessing.Pool(args.processes) as pool:
        for result in pool.imap(_run, arguments):
            results.append(result)
            _print(result)
    runs, num_wrong = sum(result.runs for result in results), sum(len(result.violations) for result in results)
    short = [result.cell for result in results if result.struck < args.runs]
    duration_s = time.monotonic() - started
    print(f"{len(results)} cells, {runs} runs, {num_wrong} with violations, {duration_s:.0f} s; too few runs: {short or '-'}")
    if args.json is not None:
        args.json.write_bytes(msgspec.json.encode(results))
    return 1 if num_wrong or short else 0


if __name__ == "__main__":
    sys.exit(main())
