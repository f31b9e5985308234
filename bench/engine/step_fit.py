"""Times steps of a real engine over a grid and fits the step-time function.

    python -m bench.engine.step_fit --model FOLDER --output FILE

Runs one rank in this process, on its real device and pages (their content does not matter). Each round times all points in a new
random order, so that other load affects all points alike. With `--threads 1` on CPU, times are CPU times of the thread. Times of
the engine loop are not included. Prints the function and its errors; `bench.simulate --cost FILE` reads the JSON.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, get_args

import torch

from bench.engine.step_grid import EngineLimits, Point, fit, make_grid, report
from bench.frame.one_rank import load_alone
from phalanx_api import wire
from phalanx_api.engine_config import Quantization
from phalanx_runtime.core.step_plan import NewRow, StepPlan, StepResult
from phalanx_runtime.rank_spec import RankReady

SAMPLING = wire.Sampling(max_tokens=1 << 20, seed=1)


class Runner(Protocol):
    def start(self, plan: StepPlan) -> None: ...

    def finish(self) -> StepResult: ...


class Stepper:
    def __init__(self, runner: Runner, page_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self._page_size = page_size
        self._step = 0

    def time(self, point: Point, limit_s: float) -> float | None:
        """Returns the seconds of one step after a warm-up step; `None` if the warm-up took longer than `limit_s`."""
        pages, first = [], 0
        rows = [(point.context - 1, 1)] * point.decodes + ([(point.start, point.prompt)] if point.prompt else [])
        for start, count in rows:
            num_pages = -(-(start + count) // self._page_size)
            pages.append(list(range(first, first + num_pages)))
            first += num_pages
        self._run([(0, 1)] * len(rows), pages, [NewRow(row, SAMPLING, 1) for row in range(len(rows))])
        if self._run(rows, [[] for _ in rows], []) > limit_s:
            return None
        return self._run(rows, [[] for _ in rows], [])

    def _run(self, rows: list[tuple[int, int]], pages: list[list[int]], admitted: list[NewRow]) -> float:
        self._step += 1
        starts, counts = [start for start, _ in rows], [count for _, count in rows]
        draws = [(row, start + count - 1) for row, (start, count) in enumerate(rows)]
        plan = StepPlan(
            step=self._step,
            admitted=admitted,
            rows=list(range(len(rows))),
            starts=starts,
            counts=counts,
            pages=pages,
            tokens=[7] * sum(counts),
            draws=draws,
        )
        started = self._clock()
        self._runner.start(plan)
        self._runner.finish()
        return self._clock() - started


def measure(stepper: Stepper, points: Sequence[Point], rounds: int, limit_s: float, seed: int = 0) -> dict[Point, list[float]]:
    """Returns the times of each point, one per round; drops points that take longer than `limit_s` in the first round."""
    rng, times_s = random.Random(seed), {point: list[float]() for point in points}
    for turn in range(rounds):
        order = list(times_s)
        rng.shuffle(order)
        for point in order:
            time_s = stepper.time(point, limit_s if turn == 0 else math.inf)
            if time_s is None:
                del times_s[point]
            else:
                times_s[point].append(time_s)
        print(f"round {turn + 1} of {rounds}: {len(times_s)} points, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return times_s


def open_engine(arguments: argparse.Namespace) -> tuple[Runner, RankReady, dict[str, object]]:
    """Loads the model; returns the runner and facts for the report."""
    runner, ready, device = load_alone(
        arguments.model,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        num_threads=arguments.threads,
    )
    facts: dict[str, object] = {
        "model": arguments.model.name,
        "served": {"model_hash": ready.served.model_hash, "layout": ready.served.layout},
        "page_bytes": ready.served.page_bytes,
        "num_pages": ready.num_pages,
        "page_size": ready.page_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    return runner, ready, facts


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    load_before = os.getloadavg()
    runner, ready, facts = open_engine(arguments)
    bounds = (arguments.max_num_seqs, arguments.max_num_batched_tokens, ready.max_model_len)
    points = make_grid(EngineLimits(*bounds, ready.num_pages, ready.page_size))
    clock = time.thread_time if arguments.threads == 1 and facts["device"] == "cpu" else time.perf_counter
    facts["clock"] = "CPU time of the thread" if clock is time.thread_time else "wall"
    times_s = measure(Stepper(runner, ready.page_size, clock), points, arguments.rounds, arguments.limit_s)
    result = fit(times_s)
    facts["load_average"] = {"before": load_before, "after": os.getloadavg()}
    facts["processors"] = os.cpu_count()
    text = json.dumps(report(result, times_s, facts), indent=1)
    if arguments.output is not None:
        arguments.output.write_text(text)
    model, errors = result.model, result.held_out
    print(
        f"{facts['model']}: {1e3 * model.fixed_s:.2f} ms + {1e3 * model.token_s:.4f} ms x max({model.knee_tokens}, tokens) "
        f"+ {1e3 * model.row_s:.4f} ms x decodes + {1e3 * model.prompt_s:.2f} ms with prompts "
        f"+ {1e9 * model.context_s:.1f} ns x context + {1e9 * model.attention_s:.2f} ns x attended; "
        f"{errors.num_points} points, each held out once: "
        f"median error {errors.median:.1%}, p95 {errors.p95:.1%}, worst {errors.worst:.1%}; "
        f"{'within' if result.is_good else 'beyond'} the bounds"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine.step_fit", description="Times steps of a real engine and fits the step-time function."
    )
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--output", type=Path, help="file for the fit as JSON")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--quantization", choices=get_args(Quantization))
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--threads", type=int, help="default: the CPU limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=3.0, help="drop points with longer steps")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
