"""Simulates a fleet under each routing policy.

    python -m bench.simulate --traces DIR [--workloads ABCDES] [--seeds 5] [--quick]

Prints a table for each workload, and the relations. `--out` writes all figures as JSON, `--plots FOLDER` a chart of each
workload. `--quick`: one seed, a tenth of each load. `--cost FILE`: the cost function that `bench.engine.step_fit` measured. A
relation that fails by less than half of the 95 % interval of its difference, seed by seed, is not distinguishable. Exits with 1
if another one fails, unless `--quick`.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.frame.figures import markdown_header, markdown_row
from bench.simulate.figures import Figures, figures
from bench.simulate.machines import read_machine
from bench.simulate.plots import write_plots
from bench.simulate.tables import relations, to_markdown
from bench.simulate.workloads import LETTERS, Run, SimulationSettings, runs
from bench.simulate.world import World

QUICK_SHARE = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    seeds, share = (1, QUICK_SHARE) if args.quick else (args.seeds, args.share)
    found: dict[str, dict[str, list[Figures]]] = {}
    machine = read_machine(args.cost)
    for seed in range(args.first_seed, args.first_seed + seeds):
        for run in runs(SimulationSettings(args.traces, machine, seed, share, args.start_s), args.workloads):
            if args.policies and not any(run.policy.startswith(name) for name in args.policies):
                continue
            found.setdefault(run.workload, {}).setdefault(run.policy, []).append(_play(run, seed))
            if args.out:
                _write(args.out, found, seeds, share, machine.about)
    print(f"{machine.about}; {seeds} seeds, {share:.0%} of each load")
    for name, cells in found.items():
        print(f"\n{to_markdown(name, cells)}")
        if args.plots:
            write_plots(args.plots, name, cells)
    checked = relations(found)
    print("\n" + markdown_header(["relation", "ours", "bound", "difference ±", "holds"]))
    for relation in checked:
        numbers = (f"{relation.ours:.4g}", f"{relation.bound:.4g}", f"{relation.half:.2g}")
        print(markdown_row([relation.text, *numbers, relation.verdict]))
    return 0 if args.quick or all(relation.verdict != "NO" for relation in checked) else 1


def _write(path: Path, found: dict[str, dict[str, list[Figures]]], seeds: int, share: float, about: str) -> None:
    workloads = {
        name: {policy: [asdict(seed) for seed in seed_figures] for policy, seed_figures in cells.items()}
        for name, cells in found.items()
    }
    path.write_text(json.dumps({"cost": about, "seeds": seeds, "share": share, "workloads": workloads}, indent=1))


def _play(run: Run, seed: int) -> Figures:
    started = time.monotonic()
    world = World(run.setting, run.make_policy(run.setting.shape, run.setting.groups), run.arrivals())
    world.run()
    result = figures(world, run.setting.shape)
    duration_s = time.monotonic() - started
    print(f"{run.workload} {run.policy}, seed {seed}: goodput {result.goodput:.3f}, {duration_s:.0f} s", file=sys.stderr)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench.simulate", description="Simulates a fleet under our routing policy and others.")
    parser.add_argument("--traces", type=Path, required=True, help="folder with the Azure and Mooncake traces")
    parser.add_argument("--workloads", default=LETTERS, type=_letters, help="letters of the workloads (default all)")
    parser.add_argument("--policies", nargs="+", default=[], help="only policies with these name prefixes")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each cell (default 5)")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first run (default 0)")
    parser.add_argument("--share", type=float, default=1.0, help="part of each load (default 1)")
    parser.add_argument("--cost", type=Path, help="file of `bench.engine.step_fit --output`: simulate the measured engine")
    parser.add_argument("--start-s", type=float, default=60.0, help="S: start time of a group (default 60)")
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of each load; no verdict")
    parser.add_argument("--out", type=Path, help="file for all figures as JSON")
    parser.add_argument("--plots", type=Path, help="folder for an SVG chart of each workload")
    return parser


def _letters(text: str) -> str:
    if not text or set(text) - set(LETTERS):
        raise argparse.ArgumentTypeError(f"{text!r}: must be letters of {LETTERS}")
    return text


if __name__ == "__main__":
    sys.exit(main())
