"""Simulates a fleet under every policy: `python -m bench.simulate --traces DIR [--workloads ABCDES] [--seeds 5] [--quick]`.

Prints a table for each workload and the relations that are to hold; writes all figures as JSON with `--out`, and a picture of
each workload with `--plots FOLDER`. `--quick`: one seed, a tenth of each load. `--cost FILE`: the cost function that
`bench.engine.step_fit` measured. A relation that fails by less than half of the 95 % interval of its difference, seed by seed,
is not distinguishable. Exits 1 when another one fails and the run is not quick.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.simulate.figures import Figures, figures
from bench.simulate.machines import read_machine
from bench.simulate.plots import write_plots
from bench.simulate.shown import relations, table
from bench.simulate.workloads import LETTERS, Choice, Run, runs
from bench.simulate.world import World

QUICK_SHARE = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it. Gives the exit status."""
    given = _parser().parse_args(arguments)
    seeds, share = (1, QUICK_SHARE) if given.quick else (given.seeds, given.share)
    found: dict[str, dict[str, list[Figures]]] = {}
    machine = read_machine(given.cost)
    for seed in range(given.first_seed, given.first_seed + seeds):
        for run in runs(Choice(given.traces, machine, seed, share, given.start_s), given.workloads):
            if given.policies and not any(run.policy.startswith(name) for name in given.policies):
                continue
            found.setdefault(run.workload, {}).setdefault(run.policy, []).append(_play(run, seed))
            if given.out:
                _write(given.out, found, seeds, share, machine.about)
    print(f"{machine.about}; {seeds} seeds, {share:.0%} of each load")
    for name, cells in found.items():
        print(f"\n{table(name, cells)}")
        if given.plots:
            write_plots(given.plots, name, cells)
    held = relations(found)
    print("\n| relation | ours | bound | difference ± | holds |\n|---|---|---|---|---|")
    for one in held:
        print(f"| {one.text} | {one.ours:.4g} | {one.bound:.4g} | {one.half:.2g} | {one.verdict} |")
    return 0 if given.quick or all(one.verdict != "NO" for one in held) else 1


def _write(path: Path, found: dict[str, dict[str, list[Figures]]], seeds: int, share: float, about: str) -> None:
    """All figures so far."""
    told = {name: {policy: [asdict(one) for one in each] for policy, each in cells.items()} for name, cells in found.items()}
    path.write_text(json.dumps({"cost": about, "seeds": seeds, "share": share, "workloads": told}, indent=1))


def _play(run: Run, seed: int) -> Figures:
    began = time.monotonic()
    world = World(run.setting, run.make(run.setting.shape, run.setting.groups), run.arrivals())
    world.run()
    one = figures(world, run.setting.shape)
    print(
        f"{run.workload} {run.policy}, seed {seed}: goodput {one.goodput:.3f}, {time.monotonic() - began:.0f} s", file=sys.stderr
    )
    return one


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench.simulate", description="A fleet in virtual time, under ours and other policies.")
    parser.add_argument("--traces", type=Path, required=True, help="folder with the Azure and Mooncake traces")
    parser.add_argument("--workloads", default=LETTERS, type=_letters, help="which of A to E and S (default all)")
    parser.add_argument("--policies", nargs="+", default=[], help="only those whose names begin so")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each cell (default 5)")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first run (default 0)")
    parser.add_argument("--share", type=float, default=1.0, help="part of each load that is played (default all)")
    parser.add_argument(
        "--cost", type=Path, help="the file of `bench.engine.step_fit --output`: groups are the engine that it measured"
    )
    parser.add_argument("--start-s", type=float, default=60.0, help="S: from a group's creation until it serves (default 60)")
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of each load; no verdict")
    parser.add_argument("--out", type=Path, help="write all figures as JSON there")
    parser.add_argument("--plots", type=Path, help="write a picture of each workload into this folder, as SVG")
    return parser


def _letters(text: str) -> str:
    if not text or set(text) - set(LETTERS):
        raise argparse.ArgumentTypeError(f"{text!r}: give letters of {LETTERS}")
    return text


if __name__ == "__main__":
    sys.exit(main())
