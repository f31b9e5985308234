"""Counts the requests that a fixed page pool holds at once if each drops the pages before its sliding window, and if none does.

    python -m bench.kv_cache.windows [--window 4096] [--prompts 2048 8192 32768] [--pool-tokens 65536] [--full-of 6]

The scheduler is the engine's; it has more requests than fit, each with a prompt of its own, and every token counts as computed
once its step is planned. Counts, not times: a repetition gives the same figures. A row averages over the steps in which requests
wait. Both pools have the same bytes. `--full-of N`: one of N layers attends to all tokens, and the others have parts of pages,
between which the memory is divided as the engine divides it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from bench.frame.figures import markdown_header, markdown_row
from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.page_window import PageDivision, PageWindow
from phalanx_runtime.core.scheduling.config import make_scheduler
from phalanx_runtime.core.step_plan import PoolShape, StepResult

PAGE = 16
MAX_SEQS = 512
COLUMNS = (
    "prompt",
    "tokens held per request, all pages",
    "with the window",
    "requests at once, all pages",
    "with the window",
    "ratio",
    "preemptions, all pages",
    "with the window",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Equal requests, and the tokens of a step."""

    prompt: int
    output: int
    requests: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """Means over the steps in which requests wait, and the preemptions of the run."""

    requests: float
    tokens: float
    """In the pages of one request, with slots that are still empty."""
    preemptions: int


def held_pages(report: wire.Load, full_of: int) -> float:
    """Returns the pages that requests hold, in pages of all layers."""
    pages, parts = report.total_pages - report.free_pages, report.total_parts - report.free_parts
    return (pages + parts * (full_of - 1)) / full_of if report.total_parts else pages


def mixed_pool(num_pages: int, window: int, full_of: int, load: Load, longest: int) -> PoolShape:
    """Returns the pool with parts in the memory of `num_pages`. `longest`: `max_model_len` of the engine."""
    division = PageDivision(
        page_bytes=1, part_bytes=full_of - 1, longest=longest, max_num_seqs=MAX_SEQS, max_new_tokens=load.step_tokens
    )
    pages, parts = division.divide(num_pages, PageWindow(window, PAGE))
    return PoolShape(pages, PAGE, window=window if parts else 0, num_parts=parts)


def hold(pool: PoolShape, load: Load, full_of: int = 1) -> Held | None:
    """Serves the load from an empty pool; returns nothing if a request is longer than the pool allows."""
    length = load.prompt + load.output
    limits = Limits(max_model_len=length, max_num_seqs=MAX_SEQS, max_num_batched_tokens=max(load.step_tokens, MAX_SEQS))
    scheduler = make_scheduler(limits, pool)
    if scheduler.limits.max_model_len < length:
        return None
    for handle in range(load.requests):
        prompt = [(handle * 7919 + at) % 50_021 for at in range(load.prompt)]
        sampling = wire.Sampling(max_tokens=load.output, seed=handle)
        scheduler.submit(handle, wire.Request(id=str(handle), epoch=0, prompt=prompt, delivered=[], sampling=sampling))
    steps, running, held = 0, 0, 0.0
    while (plan := scheduler.schedule()) is not None:
        report = scheduler.load()
        if report.waiting:
            steps, running = steps + 1, running + report.running
            held += held_pages(report, full_of) * pool.page_size
        scheduler.commit(StepResult(step=plan.step, tokens=[1] * len(plan.draws)))
    assert scheduler.is_idle(), "a request did not end"
    return Held(running / max(1, steps), held / max(1, running), scheduler.num_preemptions)


def row(pool_tokens: int, window: int, load: Load, full_of: int = 0, longest: int = 0) -> list[str]:
    """Returns the cells of `COLUMNS`."""
    num_pages = pool_tokens // PAGE
    shape = mixed_pool(num_pages, window, full_of, load, longest) if full_of else PoolShape(num_pages, PAGE, window=window)
    every, windowed = hold(PoolShape(num_pages, PAGE), load), hold(shape, load, full_of)
    assert windowed is not None, "the pool holds a window"
    if every is None:
        return [f"{load.prompt:,}", "does not fit", f"{windowed.tokens:,.0f}", "0", f"{windowed.requests:.1f}", "-", "-", "0"]
    return [
        f"{load.prompt:,}",
        f"{every.tokens:,.0f}",
        f"{windowed.tokens:,.0f}",
        f"{every.requests:.1f}",
        f"{windowed.requests:.1f}",
        f"{windowed.requests / every.requests:.2f}",
        f"{every.preemptions}",
        f"{windowed.preemptions}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table with a row per length of prompt."""
    flags = argparse.ArgumentParser("python -m bench.kv_cache.windows", description="Count requests in a pool with a window.")
    flags.add_argument("--window", type=int, default=4096, metavar="TOKENS", help="of every layer")
    flags.add_argument(
        "--prompts", type=int, nargs="+", default=[2048, 8192, 32_768], metavar="TOKENS", help="lengths of prompts"
    )
    flags.add_argument("--full-of", type=int, default=0, metavar="N", help="one of N layers attends to all tokens")
    flags.add_argument("--longest", type=int, default=131_072, metavar="TOKENS", help="max_model_len, with --full-of")
    flags.add_argument("--output", type=int, default=256, metavar="TOKENS", help="of each request")
    flags.add_argument("--requests", type=int, default=64, metavar="N", help="of each length")
    flags.add_argument("--pool-tokens", type=int, default=65_536, metavar="TOKENS", help="of the page pool")
    flags.add_argument("--step-tokens", type=int, default=2048, metavar="TOKENS", help="of a step")
    args = flags.parse_args(argv)
    print(markdown_header(COLUMNS))
    for prompt in args.prompts:
        load = Load(prompt=prompt, output=args.output, requests=args.requests, step_tokens=args.step_tokens)
        print(markdown_row(row(args.pool_tokens, args.window, load, args.full_of, args.longest)))


if __name__ == "__main__":
    main()
