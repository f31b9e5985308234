"""Searches whole fleets in virtual time: `make search HOURS=n`, or one fleet again.

python -m tests.router.search --hours 1                 searches on all cores; exit code 1 after a counterexample
python -m tests.router.search --seed 7                  one fleet
python -m tests.router.search --seed 7 --faults "24.80 lose:router 3 8 0.58"
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence

from tests.router.search import plan, search
from tests.router.search.many import describe, prepare_collector, run_many, run_seed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--fleets", type=int, default=1, help="seeds from --seed on")
    parser.add_argument("--faults", default=None, help="faults in place of those of the seed, separated by ';'")
    parser.add_argument("--parts", type=int, default=0, help="with --faults: parts of the fleet's life, 0 until the last fault")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-shorten", action="store_true", help="print a counterexample with all its faults")
    options = parser.parse_args(arguments)
    logging.getLogger().addHandler(logging.NullHandler())
    if options.hours:
        return run_many(options.hours * 3600, options.seed, options.jobs)
    if options.faults is not None:
        return replay(options.seed, options.faults, options.parts)
    seeds = range(options.seed, options.seed + options.fleets)
    return 1 if sum(run_seed(seed, shorten=not options.no_shorten)[1] for seed in seeds) else 0


def replay(seed: int, faults: str, parts: int = 0) -> int:
    """Runs the fleet of a seed with these faults. Returns 1 if it violates an invariant."""
    outcome = search.run(plan.draw(seed).replayed(plan.parse(faults), parts))
    print(*outcome.violations, sep="\n")
    print(describe(seed, outcome))
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    prepare_collector()
    sys.exit(main())
