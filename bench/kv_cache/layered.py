"""Times steps that load pages from host memory: each layer waits for its own pages, or the step waits for all of them.

    python -m bench.kv_cache.layered [--model FOLDER] [--contexts 512,2000,8000] [--new 16,256] [--pairs 15]

One rank in this process with one thread for steps, its own kernels, and its thread of copies; the model has by default the shape
of SmolLM2-135M and random weights. A step computes the last tokens of a prompt whose first ones are in host memory. Each round
times two such steps in turn: with loads by layer, and with loads that the step waits for, as it does with a plan that changes the
size of host memory too. Printed are

    step, copies      CPU time of each thread in milliseconds, medians of steps by layer
    a core each       time with loads that the step waits for / by layer, from both CPU times, if each thread has a core: the sum
                      over the longer one and one layer of the shorter one
    measured          the same ratio of elapsed times, and its 95 % interval; over 1 means that loads by layer are faster

Elapsed times need an idle core for each thread: other load adds to them."""

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.engine.step_fit import SAMPLING
from bench.frame.figures import markdown_header, markdown_row, median_interval
from bench.frame.one_rank import load_alone
from bench.kv_cache.speed import longer
from bench.peers.checkpoint import checkpoint
from phalanx_runtime.core.step_plan import HostCopy, HostResize, NewRow, PoolShape, StepPlan, StepResult

PAGE = 16
MEMORY = 1 << 28
"""Bytes of the pool, and of host memory; only used pages occupy memory."""
COPY_THREAD = "host-pages"
COLUMNS = ("context loaded", "new tokens", "step, ms", "copies, ms", "a core each", "measured", "95 % interval")


class Runner(Protocol):
    """A rank."""

    @property
    def pool(self) -> PoolShape: ...

    def start(self, plan: StepPlan) -> None: ...

    def finish(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step: elapsed, CPU of its thread, CPU of the threads that copy."""

    elapsed: float
    step: float
    copies: float


def copy_cpu_s() -> float:
    """Returns the CPU seconds of this process's threads of copies."""
    clocks = (time.pthread_getcpuclockid(one.ident or 0) for one in threading.enumerate() if one.name == COPY_THREAD)
    return sum(map(time.clock_gettime, clocks))


class LoadingSteps:
    """Steps of a runner with one request. Page `i` of the device is in slot `i` of host memory."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._page_size = runner.pool.page_size
        self._step = 0

    def store(self, num_pages: int) -> None:
        """Copies the first pages to host memory."""
        self._run((0, 1), list(range(num_pages)), [(False, page, page) for page in range(num_pages)], by_layer=False)

    def time(self, context: int, new: int, *, by_layer: bool) -> StepTime:
        """Returns the times of a step that computes `new` tokens after `context`, whose pages it loads."""
        self._run((0, 1), list(range(-(-(context + new) // self._page_size))), [], by_layer=True)
        copies = [(True, page, page) for page in range(context // self._page_size)]
        return self._run((context, new), [], copies, by_layer=by_layer)

    def _run(self, part: tuple[int, int], pages: list[int], copies: list[HostCopy], *, by_layer: bool) -> StepTime:
        self._step += 1
        start, count = part
        plan = StepPlan(
            step=self._step,
            admitted=[NewRow(0, SAMPLING, 1)] if pages else [],
            rows=[0],
            starts=[start],
            counts=[count],
            pages=[pages],
            tokens=[7] * count,
            draws=[(0, start + count - 1)],
            host_copies=copies,
            awaits_host_copies=bool(copies),
            # To as many slots as it has: the step waits for whole pages.
            host_resize=None if by_layer else HostResize(self._runner.pool.num_host_pages),
        )
        copied_s, computed_s, started = copy_cpu_s(), time.thread_time(), time.perf_counter()
        self._runner.start(plan)
        self._runner.finish()
        elapsed_s, computed_s = time.perf_counter() - started, time.thread_time() - computed_s
        return StepTime(elapsed_s, computed_s, copy_cpu_s() - copied_s)


def gain_with_cores(step_s: float, copies_s: float, num_layers: int) -> float:
    """Returns the time with loads that the step waits for over that by layer, if each thread has a core."""
    return (step_s + copies_s) / (max(step_s, copies_s) + min(step_s, copies_s) / num_layers)


def compare(steps: LoadingSteps, context: int, new: int, num_layers: int, pairs: int) -> str:
    """Returns a row of `COLUMNS`, of interleaved steps after a pair that is not measured."""
    layered, whole = list[StepTime](), list[StepTime]()
    for turn in range(pairs + 1):
        for by_layer in (True, False) if turn % 2 else (False, True):
            seconds = steps.time(context, new, by_layer=by_layer)
            if turn:
                (layered if by_layer else whole).append(seconds)
    ratio = median_interval([slow.elapsed / fast.elapsed for slow, fast in zip(whole, layered, strict=True)])
    step_s, copies_s = statistics.median(one.step for one in layered), statistics.median(one.copies for one in layered)
    gain = gain_with_cores(step_s, copies_s, num_layers)
    cells = [f"{context:,}", str(new), f"{1000 * step_s:.1f}", f"{1000 * copies_s:.1f}", f"{gain:.2f}"]
    return markdown_row([*cells, f"{ratio.middle:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"])


def open_steps(folder: Path, tokens: int, **settings: str) -> tuple[LoadingSteps, int]:
    """Returns the steps of a rank whose host memory has the pages of `tokens` tokens, and its number of layers.

    Raises SystemExit if they do not fit.
    """
    memory: dict[str, Any] = {"kv_cache_memory_bytes": MEMORY, "host_cache_memory": MEMORY}
    runner, _, _ = load_alone(folder, 1, page_size=PAGE, max_num_seqs=1, **memory, **settings)
    num_pages = -(-tokens // PAGE)
    if num_pages > runner.pool.num_host_pages:
        raise SystemExit(f"{tokens} tokens of this model do not fit into {MEMORY} bytes: give smaller --contexts")
    steps = LoadingSteps(runner)
    steps.store(num_pages)
    return steps, len(runner.caches)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--contexts", default="512,2000,8000")
    parser.add_argument("--new", default="16,256")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args(arguments)
    contexts, counts = ([int(one) for one in text.split(",")] for text in (args.contexts, args.new))
    tokens = max(contexts) + max(counts)
    print(markdown_header(COLUMNS))
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or longer(Path(scratch), checkpoint(), tokens + PAGE)
        steps, num_layers = open_steps(folder, tokens, dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype)
        for context, new in itertools.product(contexts, counts):
            print(compare(steps, context, new, num_layers, args.pairs), flush=True)


if __name__ == "__main__":
    main()
