"""Measures the engine on a GPU and compares it with its bounds and with `bench.gpu.roofline`, in at most eight minutes.

    python -m bench.gpu [--only PART ...] [--json FILE] [--seconds 480]
    python -m bench.gpu --device cpu

Random weights of published shapes; nothing is downloaded. Prints a table and one line of JSON. Exits with 1 if a part fails or a
bound is missed, with 2 without a device, else with 3 if a part was skipped for lack of time. A bound that is missed while a
router, the group's HTTP server or a client uses a whole core is `limited` and does not count. `--device cpu` runs the same code
with tiny models in Triton's interpreter, without bounds: a test of the benchmark, no measurement; `trace` and `router` run there
only if `--only` names them.

    large      decode and prefill of Llama-3.1-8B's shape: shares of the copy and matmul rates, gap between steps, busy share
    small      decode of Qwen3-0.6B's shape at batch 1; graphs and eager steps, lag 0 and 1
    kernels    each kernel alone: time, share of the copy rate
    packed     linears with weights in each packed format, and adapters, the same way; only if `--only` names it
    attention  our attention and torch's
    generate   `generate` of transformers
    kv         decode attention and decode steps of the large model over pages of each KV dtype; only if `--only` names it
    profile    the kernels of whole steps of the large model by their time; only if `--only` names it
    trace      TTFT and ITL under a conversation trace at 80 % of the capacity, by a router and a group
    router     1,000 requests of 32 tokens in and 16 out per second on a 135M model through routers

A part that does not fit the rest of the time is skipped and listed with the reason.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.bounds import Figure, Outcome, exit_code
from bench.gpu.report import Part, run_parts, to_json, to_text

if TYPE_CHECKING:
    from bench.gpu.steps import Bench

BUDGET_S = 480.0
PARTS: Mapping[str, tuple[float, str]] = {
    "large": (120.0, "bench.gpu.steps:large_model"),
    "small": (45.0, "bench.gpu.steps:small_model"),
    "kernels": (30.0, "bench.gpu.kernel_table:kernel_figures"),
    "packed": (60.0, "bench.gpu.packed_table:packed_figures"),
    "attention": (10.0, "bench.gpu.others:attention_figures"),
    "trace": (75.0, "bench.gpu.serving:trace_figures"),
    "router": (60.0, "bench.gpu.serving:router_figures"),
    "generate": (40.0, "bench.gpu.others:generate_figures"),
    "kv": (300.0, "bench.gpu.kv_dtypes:kv_figures"),
    "profile": (30.0, "bench.gpu.profile:profile_figures"),
}
"""By name: seconds at full size, and the function, which is imported when the part runs: a missing package fails one part."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's import
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu: no CUDA device; --device cpu runs the same code with tiny models, without bounds", file=sys.stderr)
        return 2
    started_s = time.monotonic()
    bench, rates = open_bench(args.device)
    scale = 1.0 if bench.sizes.is_bounded else 0.0
    extra = {"kv", "packed", "profile"} if bench.sizes.is_bounded else {"kv", "packed", "profile", "trace", "router"}
    names = args.only or [name for name in PARTS if name not in extra]
    parts = [Part(name, scale * PARTS[name][0], partial(_measure, PARTS[name][1], bench)) for name in PARTS if name in names]
    first = Outcome(part="rates", figures=rates, seconds=time.monotonic() - started_s)
    outcomes = list[Outcome]()
    for outcome in chain([first], run_parts(parts, args.seconds, started_s=started_s)):
        print(f"{outcome.part}: {outcome.failed or outcome.skipped or f'{outcome.seconds:.0f} s'}", file=sys.stderr, flush=True)
        outcomes.append(outcome)
        if args.json is not None:  # after each part, so that a killed run leaves what it has
            args.json.write_text(json.dumps(to_json(outcomes, facts_of(bench)), indent=1) + "\n")
    print(to_text(outcomes))
    print(json.dumps(to_json(outcomes, facts_of(bench))))
    return exit_code(outcomes)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny models in the interpreter, no bounds"
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help="measure only these parts")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="time of rates and parts (default %(default)g)")
    parser.add_argument("--json", type=Path, help="file for the figures as JSON, written after each part")
    return parser.parse_args(argv)


def open_bench(device_type: str) -> "tuple[Bench, list[Figure]]":
    """Measures the rates of the device; returns what all parts need, and the rates as figures."""
    import torch

    from bench.gpu.clock import open_clock
    from bench.gpu.sizes import TINY, Sizes
    from bench.gpu.steps import Bench
    from bench.gpu.yardsticks import figures, measure_device

    device, sizes = torch.device(device_type), Sizes() if device_type == "cuda" else TINY
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    clock = open_clock(device)
    rates = measure_device(device, clock, sizes)
    return Bench(device=device, clock=clock, rates=rates, sizes=sizes), figures(rates)


def facts_of(bench: "Bench") -> dict[str, object]:
    """Returns what the figures depend on."""
    import torch
    import triton

    return {
        "device": bench.rates.name,
        "is_bounded": bench.sizes.is_bounded,
        "copy_bytes_per_s": bench.rates.copy_bytes_per_s,
        "matmul_flops_per_s": bench.rates.matmul_flops_per_s,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "processors": os.cpu_count(),
    }


def _measure(path: str, bench: "Bench") -> Iterator[Figure]:
    from bench.gpu.steps import release

    module, _, name = path.partition(":")
    measure: Callable[[Bench], Iterator[Figure]] = getattr(import_module(module), name)
    try:
        yield from measure(bench)
    finally:
        release()


if __name__ == "__main__":
    sys.exit(main())
