"""Measures the flight recorder: the time to write an entry, and its share of a step.

    python -m bench.engine.recorder [--step-ms 5] [--steps 20000]

A step of rank 0 writes two entries. Exits with 1 if they take 1 % of the step or more.
"""

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from bench.frame.figures import table
from phalanx_frontend.flight import RANK_BYTES, FileRecorder, FlightRecorder
from phalanx_runtime.core.flight_entries import Occupancy, engine_step, rank_step
from phalanx_runtime.core.step_plan import StepPlan, StepResult

ROUNDS, BOUND, REQUESTS = 7, 0.01, 64


def decode_plan() -> StepPlan:
    """Returns the plan of a decode step of 64 requests."""
    rows = list(range(REQUESTS))
    return StepPlan(
        step=1,
        admitted=[],
        rows=rows,
        starts=[100] * REQUESTS,
        counts=[1] * REQUESTS,
        pages=[[] for _ in rows],
        tokens=[0] * REQUESTS,
        draws=[(row, 1) for row in rows],
    )


def record(recorder: FlightRecorder, plan: StepPlan, result: StepResult) -> None:
    """Records a step, as rank 0 does."""
    at = time.monotonic()
    recorder.record(rank_step(plan, at - 0.005, at, waited_s=0.0))
    recorder.record(
        engine_step(
            plan,
            result,
            at=at,
            seconds=0.005,
            expected_s=0.005,
            occupancy=Occupancy(running=REQUESTS, waiting=0, free_pages=10, total_pages=1000),
        )
    )


def measure(num_steps: int) -> float:
    """Returns the mean seconds of a step's entries."""
    plan, result = decode_plan(), StepResult(step=1, tokens=[0] * REQUESTS)
    with tempfile.TemporaryDirectory() as folder, closing(FileRecorder(Path(folder) / "rank-0.ring", RANK_BYTES)) as recorder:
        started = time.perf_counter()
        for _ in range(num_steps):
            record(recorder, plan, result)
        return (time.perf_counter() - started) / num_steps


def main() -> int:
    """Runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    times = [measure(options.steps) for _ in range(ROUNDS)]
    share = statistics.median(times) / (options.step_ms / 1e3)
    row = [*(f"{seconds * 1e6:.1f}" for seconds in (statistics.median(times), min(times), max(times))), f"{share:.2%}"]
    print(table(["us per step", "least", "most", f"of {options.step_ms:g} ms"], [row]))
    return int(share >= BOUND)


if __name__ == "__main__":
    sys.exit(main())
