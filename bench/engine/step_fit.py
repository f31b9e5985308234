"""`python -m bench.engine.step_fit --model FOLDER --output FILE`: times a real engine's steps over a grid and fits their time.

One rank in this process, on the device that a group would use, with its real pages; what pages hold does not matter to the time.
Points come in another random order in each round, so that what else the machine does falls on all alike, and the load average
is told beside. With `--threads 1` on CPU a time is the CPU time of the one thread, which other programs hardly change.
The times are those of the ranks; the engine's loop adds its own. The JSON is what a simulation reads.
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
from typing import Protocol

import torch

from bench.engine.step_grid import Bounds, Point, fit, make_grid, report
from bench.frame.one_rank import load_alone
from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow, StepPlan, StepResult
from phalanx_runtime.rank_spec import RankReady

SAMPLING = wire.Sampling(max_tokens=1 << 20, seed=1)


class Runner(Protocol):
    """Computes steps. The runtime's `ModelRunner` does."""

    def start(self, plan: StepPlan) -> None:
        """Begins with a plan."""
        ...

    def finish(self) -> StepResult:
        """What came of it."""
        ...


class Stepper:
    """Makes plans for points and times them."""

    def __init__(self, runner: Runner, page_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self._page_size = page_size
        self._step = 0

    def time(self, point: Point, limit_s: float) -> float | None:
        """Seconds of one step, after its requests were put into rows by another and it ran once; None if that took too long."""
        pages, first = [], 0
        rows = [(point.context - 1, 1)] * point.decodes + ([(point.start, point.prompt)] if point.prompt else [])
        for start, count in rows:
            held = -(-(start + count) // self._page_size)
            pages.append(list(range(first, first + held)))
            first += held
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
        began = self._clock()
        self._runner.start(plan)
        self._runner.finish()
        return self._clock() - began


def measure(stepper: Stepper, points: Sequence[Point], rounds: int, limit_s: float, seed: int = 0) -> dict[Point, list[float]]:
    """The times of each point, one a round. A point that takes longer than `limit_s` in the first round is left out."""
    chance, times_s = random.Random(seed), {point: list[float]() for point in points}
    for turn in range(rounds):
        order = list(times_s)
        chance.shuffle(order)
        for point in order:
            took_s = stepper.time(point, limit_s if turn == 0 else math.inf)
            if took_s is None:
                del times_s[point]
            else:
                times_s[point].append(took_s)
        print(f"round {turn + 1} of {rounds}: {len(times_s)} points, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return times_s


def open_engine(arguments: argparse.Namespace) -> tuple[Runner, RankReady, dict[str, object]]:
    """A rank that has loaded the model, and what to tell of it."""
    runner, ready, device = load_alone(
        arguments.model,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        num_threads=arguments.threads,
    )
    about: dict[str, object] = {
        "model": arguments.model.name,
        "served": {"model_hash": ready.served.model_hash, "layout": ready.served.layout},
        "page_bytes": ready.served.page_bytes,
        "num_pages": ready.num_pages,
        "page_size": ready.page_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    return runner, ready, about


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the fit, and says how good it is."""
    arguments = _parse(argv)
    load_before = os.getloadavg()
    runner, ready, about = open_engine(arguments)
    limits = (arguments.max_num_seqs, arguments.max_num_batched_tokens, ready.max_model_len)
    points = make_grid(Bounds(*limits, ready.num_pages, ready.page_size))
    clock = time.thread_time if arguments.threads == 1 and about["device"] == "cpu" else time.perf_counter
    about["clock"] = "CPU time of the thread" if clock is time.thread_time else "wall"
    times_s = measure(Stepper(runner, ready.page_size, clock), points, arguments.rounds, arguments.limit_s)
    fitted = fit(times_s)
    about["load_average"] = {"before": load_before, "after": os.getloadavg()}
    about["processors"] = os.cpu_count()
    text = json.dumps(report(fitted, times_s, about), indent=1)
    if arguments.output is not None:
        arguments.output.write_text(text)
    model, held = fitted.model, fitted.held_out
    print(
        f"{about['model']}: {1e3 * model.fixed_s:.2f} ms + {1e3 * model.token_s:.4f} ms x max({model.knee_tokens}, tokens) "
        f"+ {1e3 * model.row_s:.4f} ms x decodes + {1e3 * model.prompt_s:.2f} ms with prompts "
        f"+ {1e9 * model.context_s:.1f} ns x context + {1e9 * model.attention_s:.2f} ns x attended; "
        f"{held.num_points} points, each held out once: "
        f"median error {held.median:.1%}, p95 {held.p95:.1%}, worst {held.worst:.1%}; "
        f"{'within' if fitted.is_good else 'beyond'} the bounds"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine.step_fit", description="Times steps of a real engine and fits their time."
    )
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--threads", type=int, help="as many as the CPU limit allows when not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=3.0, help="points whose step takes longer are left out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
