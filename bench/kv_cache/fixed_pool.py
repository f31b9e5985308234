"""Serves a trace from a pool of fixed bytes in each KV dtype, in virtual time: requests per second and preemptions.

    python -m bench.kv_cache.fixed_pool --trace CONVERSATIONS.jsonl [--requests 1000] [--length-share 0.125] [--output-factor 8]
    python -m bench.kv_cache.fixed_pool                                                   generated conversations

The pool has `--pool-tokens` tokens in bf16 pages of SmolLM2-135M's shape, and as many as fit in the same bytes in the other
dtypes. Requests arrive faster than they can be served (`--load` over 1). `--output-factor` lengthens outputs alone: a pool that
fills while requests decode preempts them. The scheduler is the engine's. All dtypes have the same step times
(`bench.kv_cache.speed` compares them), so the differences are those of the number of pages.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.engine.step_grid import read_model
from bench.frame.figures import markdown_header, markdown_row, percentile
from bench.kv_cache.break_even import PAGE, SMOLLM2
from bench.kv_cache.conversations import generate, paced, read
from bench.kv_cache.tiers import max_len
from bench.kv_cache.virtual_run import Machine, VirtualRun
from bench.simulate.machines import ANALYTIC
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.rank.memory.kv_cache import page_bytes

STEP_TOKENS = 1024
COLUMNS = ("KV dtype", "pages", "requests/s", "of bf16", "preemptions", "prompt tokens computed", "TTFT p50, s")


def pool_sizes(pool_tokens: int) -> dict[str, int]:
    """Returns the pages of each KV dtype in the bytes of `pool_tokens` tokens in bf16."""
    sizes = {"auto": page_bytes(SMOLLM2, PAGE, torch.bfloat16)}
    sizes |= {name: page_bytes(SMOLLM2, PAGE, torch.bfloat16, format) for name, format in FORMATS.items()}
    whole = pool_tokens // PAGE * sizes["auto"]
    return {name: whole // size for name, size in sizes.items()}


def parser() -> argparse.ArgumentParser:
    """Returns the flags."""
    flags = argparse.ArgumentParser("python -m bench.kv_cache.fixed_pool", description="Serve a trace in each KV dtype.")
    flags.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines with hash_ids; default: generated conversations")
    flags.add_argument("--requests", type=int, metavar="N", help="the first N of the trace")
    flags.add_argument("--length-share", type=float, default=1.0, help="factor of the trace's lengths")
    flags.add_argument("--output-factor", type=int, default=1, metavar="N", help="factor of the output lengths, after the share")
    flags.add_argument("--conversations", type=int, default=300, metavar="N", help="generated ones")
    flags.add_argument("--load", type=float, default=3.0, help="work of all requests without a cache, as a share of the time")
    flags.add_argument("--pool-tokens", type=int, default=262_144, metavar="N", help="tokens of the pool in bf16")
    flags.add_argument(
        "--cost", type=Path, metavar="FILE", help="of bench.engine.step_fit; default: analytic, of a 32B model on an H200"
    )
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    args = parser().parse_args(arguments)
    conversations = read(args.trace, args.requests, args.length_share) if args.trace else generate(args.conversations)
    outputs = (replace(each, output_tokens=each.output_tokens * args.output_factor) for each in conversations.arrivals)
    conversations = replace(conversations, arrivals=list(outputs))
    model = read_model(args.cost) if args.cost else ANALYTIC
    machine = Machine(model=model, load_page_s=0.0, store_page_s=0.0, step_tokens=STEP_TOKENS)
    conversations = replace(conversations, arrivals=paced(conversations.arrivals, machine.model, STEP_TOKENS, args.load))
    print(markdown_header(COLUMNS), flush=True)
    base = 0.0
    for name, num_pages in pool_sizes(args.pool_tokens).items():
        outcome = VirtualRun(machine, PoolShape(num_pages, PAGE), max_len(conversations)).run(conversations)
        rate = len(conversations.arrivals) / outcome.end_s
        base = base or rate
        counts = f"{outcome.preemptions:,}", f"{outcome.computed_tokens:,}", f"{percentile(outcome.ttft_s, 50):.1f}"
        print(markdown_row([name, f"{num_pages:,}", f"{rate:.3f}", f"{rate / base:.2f}", *counts]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
