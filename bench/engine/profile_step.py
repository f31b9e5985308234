"""Measures the time of a step by part, on one rank without a server.

    python -m bench.engine.profile_step MODEL [--dtype bfloat16] [--quantization fp8] [--steps 10] [--threads 1] [--shapes decode]

Steps have the shapes of served load. Prints one row per shape: milliseconds of the fastest step, and the mean time of each part
under cProfile, which makes steps with many small calls a few percent longer. Parts are those of single operations, also where all
layers are one call: they may exceed the step, and `bench.engine.step_layers` compares both. The model needs 544 positions. Times
are CPU times with `--threads 1`, otherwise wall times.
"""

import argparse
import cProfile
import pathlib
import time
from collections.abc import Callable, Sequence
from pstats import Stats
from typing import Any

from bench.frame.figures import markdown_header, markdown_row
from bench.frame.one_rank import load_alone
from phalanx_api import wire
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.rank.runner import ModelRunner

Clock = Callable[[], float]
PAGE = 16
PARTS: dict[str, list[tuple[str, ...]]] = {
    "qkv": [("_run_attention", "__call__", "model/linear/")],
    "attention": [("_attend", "__call__", "model/attention/")],
    "o, down": [("_add", "add_to"), ("_add", "__call__")],
    "gate-up": [("run_layers", "__call__", "model/linear/")],
    "norms": [("_norm", "norm"), ("add_norm", "norm")],
    "rotary": [("prepare_heads", "rotate")],
    "head": [("", "logits", "decoder/decoder.py")],
    "sampling": [("", "sample", "sampling/sampler.py")],
    "tensors": [("", "tensors", "step/batch.py"), ("", "update", "step/batch.py")],
}
"""Calls that make up each part: caller (any if empty), callee, and a piece of the callee's path."""
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
"""Tokens computed and context length of each request; verifying requests have draft tokens after their own."""


def make_plan(step: int, shape: Sequence[tuple[int, int]], has_drafts: bool = False) -> StepPlan:
    """Returns a step of greedy requests with this shape, each on pages of its own. Page content is arbitrary."""
    pages, first = [], 0
    for _, length in shape:
        count = -(-length // PAGE)
        pages.append(list(range(first, first + count)))
        first += count
    rows = list(range(len(shape)))
    new = [NewRow(row, wire.Sampling(max_tokens=1, seed=1, temperature=0.0)) for row in rows]
    counts = [count for count, _ in shape]
    tokens = [300 + index * 7 % 30000 for index in range(sum(counts))]
    starts = [length - count for count, length in shape]
    paths = [DraftPath(request=row, depth=count - 1) for row, count in enumerate(counts)] if has_drafts else []
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


def measure(
    runner: ModelRunner, shape: Sequence[tuple[int, int]], steps: int, clock: Clock, has_drafts: bool = False
) -> tuple[float, dict[str, float]]:
    """Returns milliseconds of the fastest step, and the mean milliseconds of each part; `rest` is the remainder."""
    times = [_run(runner, make_plan(step, shape, has_drafts), clock) for step in range(steps + 1)]
    model = runner.model
    if isinstance(model, Decoder):
        layers, model.step_layers = model.step_layers, None
    profile = cProfile.Profile(clock)
    profile.enable()
    total = sum(_run(runner, make_plan(step, shape, has_drafts), clock) for step in range(steps)) / steps
    profile.disable()
    if isinstance(model, Decoder):
        model.step_layers = layers
    calls: dict[Any, Any] = Stats(profile).stats  # type: ignore[attr-defined]
    parts = {name: sum(_within(calls, *edge) for edge in edges) / steps for name, edges in PARTS.items()}
    parts["rest"] = total - sum(parts.values())
    return min(times[1:]) * 1e3, {name: seconds * 1e3 for name, seconds in parts.items()}


def _run(runner: ModelRunner, plan: StepPlan, clock: Clock) -> float:
    started = clock()
    runner.start(plan)
    runner.finish()
    return clock() - started


def _within(calls: dict[Any, Any], caller: str, callee: str, path_part: str = "") -> float:
    found = 0.0
    for (path, _, name), (*_, callers) in calls.items():
        if name == callee and path_part in path:
            found += sum(edge[3] for (_, _, name), edge in callers.items() if caller in ("", name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.profile_step", description="Measures the time of a step by part."
    )
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--quantization", default=None, choices=["int4", "int8", "fp8"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shapes", default="", help="only shapes whose names contain this text")
    parser.add_argument("--threads", type=int)
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    settings = {"dtype": args.dtype, "page_size": PAGE, "num_threads": args.threads, "kv_cache_memory_bytes": 1 << 30}
    settings["quantization"] = args.quantization
    runner = load_alone(args.model, **settings)[0]
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print(markdown_header(["step", "ms", *PARTS, "rest"]))

    for name, shape in SHAPES.items():
        if args.shapes not in name:
            continue
        best, parts = measure(runner, shape, args.steps, clock, "verif" in name)
        print(markdown_row([name, f"{best:.1f}", *(f"{part:.1f}" for part in parts.values())]), flush=True)


if __name__ == "__main__":
    main()
