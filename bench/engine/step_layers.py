"""Times decode steps with all layers in one C++ call beside one operation after the other, in turn.

    python -m bench.engine.step_layers MODEL [MODEL ...] [--batches 1,16] [--context 200] [--pairs 9] [--threads 1]

A step is that of a rank without a server, from its plan to the sampled tokens. Each figure is the median over the pairs of the
least of three steps: CPU time with one thread, else wall time. A ratio over 1 means that one call is faster; intervals are of
95 %. Exits with 1 if a model's layers are not computed in one call.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.engine.profile_step import PAGE, make_plan
from bench.frame.figures import median_interval, percentile, table
from bench.frame.one_rank import load_alone
from phalanx_runtime.model.decoder.cpu import NativeLayers
from phalanx_runtime.model.decoder.decoder import Decoder, StepLayers
from phalanx_runtime.rank.runner import ModelRunner

WARM_UP = 2
"""Pairs that are not counted."""


def milliseconds(runner: ModelRunner, layers: StepLayers | None, batch: int, context: int) -> float:
    """Returns the least of three times of a step of `batch` decodes."""
    assert isinstance(runner.model, Decoder)
    runner.model.step_layers = layers
    clock, times = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter, []
    for step in range(3):
        plan = make_plan(step, [(1, context)] * batch)
        start = clock()
        runner.start(plan)
        runner.finish()
        times.append((clock() - start) * 1e3)
    return min(times)


def measure(runner: ModelRunner, name: str, batches: Sequence[int], context: int, pairs: int) -> list[list[str]]:
    """Returns a row for each batch: milliseconds of both ways, and their ratio. Raises ValueError without a call."""
    layers = runner.model.step_layers if isinstance(runner.model, Decoder) else None
    if not isinstance(layers, NativeLayers):
        raise ValueError(f"{name}: its layers are not computed in one call")
    rows = []
    for batch in batches:
        single, whole, before = list[float](), list[float](), layers.num_computed
        for _ in range(pairs + WARM_UP):
            single.append(milliseconds(runner, None, batch, context))
            whole.append(milliseconds(runner, layers, batch, context))
        if layers.num_computed == before:
            raise ValueError(f"{name}: steps of {batch} are not computed in one call")
        ratio = median_interval([a / b for a, b in zip(single[WARM_UP:], whole[WARM_UP:], strict=True)])
        figures = f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        times = (f"{percentile(each[WARM_UP:], 50):.2f}" for each in (single, whole))
        rows.append([f"{name} x {batch}", *times, figures])
    return rows


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.step_layers", description="Times layers in one call.")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--dtype", default="bfloat16", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--context", type=int, default=200, help="tokens of each request")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    batches = [int(batch) for batch in flags.batches.split(",")]
    rows = []
    for folder in flags.models:
        settings = {"dtype": flags.dtype, "page_size": PAGE, "kv_cache_memory_bytes": 1 << 28, "max_num_seqs": max(batches)}
        runner = load_alone(folder, flags.threads, **settings)[0]
        try:
            rows += measure(runner, folder.name, batches, flags.context, flags.pairs)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    print(table(["model x batch", "operations, ms", "one call, ms", "ratio"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
