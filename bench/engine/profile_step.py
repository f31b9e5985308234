"""Where the time of a step goes: one rank without a server, on plans of the shapes that serving makes.

    python -m bench.engine.profile_step MODEL [--dtype bfloat16] [--steps 10] [--threads 1]

Milliseconds of a step, the best of some, and what each part of it took on average under the interpreter's profiler, which makes
steps of many small calls a few percent longer. A part is what one place of the decoder calls, whatever serves it there. One
thread is measured by its own time on the processor, so that neighbours hardly count.
"""

import argparse
import cProfile
import pathlib
import time
from collections.abc import Callable, Sequence
from pstats import Stats
from typing import Any

from bench.frame.one_rank import load_alone
from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow, Path, StepPlan
from phalanx_runtime.rank.runner import ModelRunner

Clock = Callable[[], float]
PAGE = 16
PARTS: dict[str, list[tuple[str, ...]]] = {
    "qkv": [("_heads", "__call__")],
    "attention": [("_block", "__call__", "attention.py")],
    "o, down": [("_add", "add_to"), ("_add", "__call__")],
    "gate-up": [("_block", "__call__", "linear.py")],
    "norms": [("_norm", "norm")],
    "rotary": [("_heads", "turned")],
    "head": [("_scores", "scores")],
    "draw": [("", "draw", "sampler.py")],
    "tensors": [("", "tensors", "batch.py"), ("", "update", "batch.py")],
}
"""Of each part the calls that make it: caller (any where none is named), callee, and its file where names do not tell."""
SHAPES = {
    "1 decodes after 200": [(1, 200)],
    "16 decode after 340": [(1, 340)] * 16,
    "64 decode after 340": [(1, 340)] * 64,
    "1 verifies 4 after 200": [(5, 204)],
    "16 verify 4 after 340": [(5, 344)] * 16,
    "prompt of 128": [(128, 128)],
    "prompt of 512": [(512, 512)],
    "7 prompts of 288": [(288, 288)] * 7,
    "15 decode, prompt of 288": [(1, 340)] * 15 + [(288, 288)],
    "64 prompts, 32 new after 512": [(32, 544)] * 64,
}
"""Of each request the tokens that the step computes, and its context then. One that verifies has proposals behind the first."""


def plan_of(step: int, shape: Sequence[tuple[int, int]], proposes: bool = False) -> StepPlan:
    """A step of this shape, of greedy requests on pages of their own; what lies before it is whatever the pages hold."""
    pages, first = [], 0
    for _, length in shape:
        count = -(-length // PAGE)
        pages.append(list(range(first, first + count)))
        first += count
    rows = list(range(len(shape)))
    new = [NewRow(row, wire.Sampling(max_tokens=1, seed=1, temperature=0.0)) for row in rows]
    counts = [count for count, _ in shape]
    tokens = [300 + at * 7 % 30000 for at in range(sum(counts))]
    starts = [length - count for count, length in shape]
    paths = [Path(request=row, depth=count - 1) for row, count in enumerate(counts)] if proposes else []
    return StepPlan(
        step=step,
        admitted=new,
        rows=rows,
        starts=starts,
        counts=counts,
        pages=pages,
        tokens=tokens,
        draws=[(row, 0) for row in rows],
        paths=paths,
    )


def measured(
    runner: ModelRunner, shape: Sequence[tuple[int, int]], steps: int, clock: Clock, proposes: bool = False
) -> tuple[float, dict[str, float]]:
    """Milliseconds of the best step, and of each part on average; the rest is last."""
    times = [_run(runner, plan_of(step, shape, proposes), clock) for step in range(steps + 1)]
    profile = cProfile.Profile(clock)
    profile.enable()
    whole = sum(_run(runner, plan_of(step, shape, proposes), clock) for step in range(steps)) / steps
    profile.disable()
    calls: dict[Any, Any] = Stats(profile).stats  # type: ignore[attr-defined]
    parts = {name: sum(_within(calls, *edge) for edge in edges) / steps for name, edges in PARTS.items()}
    parts["rest"] = whole - sum(parts.values())
    return min(times[1:]) * 1e3, {name: seconds * 1e3 for name, seconds in parts.items()}


def _run(runner: ModelRunner, plan: StepPlan, clock: Clock) -> float:
    began = clock()
    runner.start(plan)
    runner.finish()
    return clock() - began


def _within(calls: dict[Any, Any], caller: str, callee: str, file: str = "") -> float:
    """Seconds in calls of one from the other, with all that they call."""
    found = 0.0
    for (path, _, name), (*_, callers) in calls.items():
        if name == callee and path.endswith(file):
            found += sum(edge[3] for (_, _, by), edge in callers.items() if caller in ("", by))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.profile_step", description="Where the time of a step goes.")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int)
    show(parser.parse_args())


def show(args: argparse.Namespace) -> None:
    """Loads the model and prints a line of the table for each shape."""
    told = {"dtype": args.dtype, "page_size": PAGE, "num_threads": args.threads, "kv_cache_memory_bytes": 1 << 30}
    runner = load_alone(args.model, **told)[0]
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print("| step | ms | " + " | ".join([*PARTS, "rest"]) + " |")
    print("|---" * (len(PARTS) + 3) + "|")
    for name, shape in SHAPES.items():
        best, parts = measured(runner, shape, args.steps, clock, "verif" in name)
        print(f"| {name} | {best:.1f} | " + " | ".join(f"{part:.1f}" for part in parts.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
