"""Compares a host tier of adaptive size with fixed ones on a working set that doubles and halves, in virtual time.

    python -m bench.kv_cache.adaptive [--documents 16] [--phase 1200] [--min-gain 0.2] [--eviction lru]

Each request asks about one of a set of documents, all equally popular, which the device cannot hold; the set doubles, then
halves. A size is judged as the tier judges it: hit rate of prompt tokens in the last third of a phase - min_gain * pages / limit.
The best fixed size of a phase is the best of a grid, which is finer around it. Exits with 1 unless the adaptive tier ends each
phase within 10 % of that size. The scheduler is the engine's; steps take the time of a measured step-time function (`--cost`).
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.engine.step_grid import read_model
from bench.frame.figures import table
from bench.kv_cache.break_even import COST, PAGE
from bench.kv_cache.conversations import Conversations, paced
from bench.kv_cache.virtual_run import Machine, VirtualRun
from bench.router.replay import Arrival
from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.step_plan import PoolShape

DOCUMENT_PAGES = 32
PHASES = (1, 2, 1)
"""Working set of each phase, as a factor of the documents."""
MAX_DISTANCE = 0.10
COARSE, FINE = 1.4, 1.07
"""Ratios of neighbouring fixed sizes."""
LOAD = 0.5
COPY_RATE = 2e9
"""Bytes/s of a copy in either direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The trace, and the bounds of the tier in pages."""

    documents: int
    phase_requests: int
    device: int
    floor: int
    limit: int
    min_gain: float
    eviction: EvictionPolicy

    def value(self, hit_rate: float, pages: float) -> float:
        """Returns what a size is worth."""
        return hit_rate - self.min_gain * pages / self.limit

    @property
    def coarse_sizes(self) -> list[int]:
        """Returns sizes from floor to limit."""
        sizes, size = [], float(self.floor)
        while size < self.limit:
            sizes.append(round(size))
            size *= COARSE
        return [*sizes, self.limit]

    def sizes_near(self, size: int) -> list[int]:
        """Returns the sizes between the coarse neighbours of a size."""
        near, other = [], size / COARSE
        while other < size * COARSE:
            near.append(min(max(round(other), self.floor), self.limit))
            other *= FINE
        return near


@dataclass(frozen=True, slots=True)
class Moment:
    """Counts when a request arrives."""

    queried_tokens: int
    hit_tokens: int
    computed_tokens: int
    pages: int
    """Size of the host tier."""


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase of a run."""

    hit_rate: float
    """In its last third."""
    pages: int
    """At its end."""
    mean_pages: float
    computed_tokens: int


def make_requests(trial: Trial, seed: int = 0) -> list[Arrival]:
    """Returns the requests of all phases, unpaced."""
    draw, arrivals = random.Random(seed), list[Arrival]()
    for factor in PHASES:
        for _ in range(trial.phase_requests):
            first = draw.randrange(factor * trial.documents) * DOCUMENT_PAGES
            blocks = tuple(range(first, first + DOCUMENT_PAGES))
            arrivals.append(Arrival(float(len(arrivals)), DOCUMENT_PAGES * PAGE + 1, 1, blocks))
    return arrivals


def serve(trial: Trial, arrivals: Sequence[Arrival], machine: Machine, pool: PoolShape) -> list[PhaseResult]:
    """Runs all requests over a pool."""
    config = SchedulerConfig(eviction_policy=trial.eviction, host_min_gain=trial.min_gain)
    run = VirtualRun(machine, pool, DOCUMENT_PAGES * PAGE + 2, config=config)
    moments: list[Moment] = []

    def note() -> None:
        sharing = run.scheduler.sharing
        size = run.scheduler.pool.host.num_slots
        moments.append(Moment(sharing.queried_tokens, sharing.hit_tokens, run.outcome.computed_tokens, size))

    run.run(Conversations(list(arrivals), PAGE), note)
    note()
    count = trial.phase_requests
    return [_phase(moments[first : first + count + 1]) for first in range(0, len(moments) - 1, count)]


def _phase(moments: Sequence[Moment]) -> PhaseResult:
    start, third, end = moments[0], moments[-len(moments) // 3], moments[-1]
    rate = (end.hit_tokens - third.hit_tokens) / (end.queried_tokens - third.queried_tokens)
    mean = sum(moment.pages for moment in moments) / len(moments)
    return PhaseResult(rate, end.pages, mean, end.computed_tokens - start.computed_tokens)


def best_sizes(trial: Trial, runs: dict[int, list[PhaseResult]]) -> list[int]:
    """Returns the best fixed size of each phase; of equal ones the smallest."""
    return [max(runs, key=lambda size: (trial.value(runs[size][phase].hit_rate, size), -size)) for phase in range(len(PHASES))]


def fixed_runs(trial: Trial, arrivals: Sequence[Arrival], machine: Machine) -> dict[int, list[PhaseResult]]:
    """Returns the phases of fixed sizes: of a coarse grid, and of a finer one around the best of each phase."""
    runs: dict[int, list[PhaseResult]] = {}

    def add(sizes: Sequence[int]) -> None:
        for size in sizes:
            if size not in runs:
                runs[size] = serve(trial, arrivals, machine, PoolShape(trial.device, PAGE, size))

    add(trial.coarse_sizes)
    for size in sorted(set(best_sizes(trial, runs))):
        add(trial.sizes_near(size))
    return runs


def rows(
    trial: Trial, adaptive: Sequence[PhaseResult], runs: dict[int, list[PhaseResult]], best: Sequence[int]
) -> list[list[str]]:
    """Returns the cells of the table: the adaptive tier and fixed ones, by phase."""
    shown = {"adaptive": list(adaptive)} | {f"{size:,} pages": runs[size] for size in sorted({*best, trial.floor, trial.limit})}
    result = []
    for name, phases in shown.items():
        cells = [name]
        for phase in phases:
            value = trial.value(phase.hit_rate, phase.pages)
            cells += [f"{phase.pages:,}", f"{phase.hit_rate:.1%}", f"{value:.3f}"]
        tokens, mean = sum(phase.computed_tokens for phase in phases), sum(phase.mean_pages for phase in phases) / len(phases)
        result.append([*cells, f"{tokens:,}", f"{mean:,.0f}"])
    return result


def parser() -> argparse.ArgumentParser:
    """Returns the flags."""
    flags = argparse.ArgumentParser(
        "python -m bench.kv_cache.adaptive", description="Compare adaptive and fixed sizes of the host tier."
    )
    flags.add_argument("--documents", type=int, default=16, metavar="N", help=f"of {DOCUMENT_PAGES} pages, in the first phase")
    flags.add_argument("--phase", type=int, default=1200, metavar="N", help="requests of a phase")
    flags.add_argument("--min-gain", type=float, default=0.2, help="hit rate that the limit must add")
    flags.add_argument("--eviction", choices=EVICTION_POLICIES, default="lru", help="policy of both tiers")
    flags.add_argument("--cost", type=Path, default=COST, metavar="FILE", help="of bench.engine.step_fit")
    flags.add_argument("--output", type=Path, metavar="FILE", help="file for the figures as JSON")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison."""
    args = parser().parse_args(arguments)
    pages = args.documents * DOCUMENT_PAGES
    trial = Trial(
        documents=args.documents,
        phase_requests=args.phase,
        device=pages // 4,
        floor=pages // 4,
        limit=3 * pages,
        min_gain=args.min_gain,
        eviction=args.eviction,
    )
    model, size = read_model(args.cost), int(json.loads(args.cost.read_text())["page_bytes"])
    machine = Machine(model=model, load_page_s=size / COPY_RATE, store_page_s=size / COPY_RATE)
    arrivals = paced(make_requests(trial), model, machine.step_tokens, LOAD)
    adaptive = serve(trial, arrivals, machine, PoolShape(trial.device, PAGE, trial.limit, trial.floor))
    runs = fixed_runs(trial, arrivals, machine)
    best = best_sizes(trial, runs)
    distances = [phase.pages / size - 1 for phase, size in zip(adaptive, best, strict=True)]
    columns = [f"{name}, phase {phase}" for phase in range(1, 1 + len(PHASES)) for name in ("pages", "hit rate", "value")]
    print(f"{len(arrivals):,} requests, {trial.device:,} pages on the device, host memory of {trial.floor:,} to {trial.limit:,}")
    print(table(["host tier", *columns, "prompt tokens computed", "mean pages"], rows(trial, adaptive, runs, best)))
    for number, (phase, size, distance) in enumerate(zip(adaptive, best, distances, strict=True), 1):
        print(f"phase {number} ends with {phase.pages:,} pages, the best fixed size is {size:,}: {distance:+.1%}")
    if args.output:
        figures = {"adaptive": [asdict(phase) for phase in adaptive], "best": best, "distances": distances}
        args.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if max(map(abs, distances)) <= MAX_DISTANCE else 1


if __name__ == "__main__":
    sys.exit(main())
