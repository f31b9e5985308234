"""Times decode steps, or chunks of a prompt, over compressed pages beside pages in the dtype of the weights, in turn.

    python -m bench.kv_cache.speed [--calibrated] [--contexts 2000,16000] [--requests 16] [--pairs 7] [--kv-cache-dtypes int8]
    python -m bench.kv_cache.speed --prompt 512 [--calibrated | --expanded] [--dtype float32] [--contexts 0,2000]
                                                                                        a chunk of one prompt after the context

One rank in this process with its own kernels; pages have random content, each request its own. The model has the shape of
SmolLM2-135M, random weights and more positions. With `--threads 1`, times are CPU times of the thread. A ratio over 1 means that
compressed pages are faster; intervals are of 95 %. With `--calibrated`, calibrated pages are timed beside others of their dtype;
the calibration is random. With `--expanded`, kernels are timed beside torch, which expands the pages that a chunk reads: not in
bfloat16 on processors with bf16 dot products, unless ATEN_CPU_CAPABILITY=avx2.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.engine.step_fit import Stepper
from bench.engine.step_grid import Point
from bench.frame.figures import mean_ratio, percentile
from bench.frame.one_rank import load_alone
from bench.peers.checkpoint import checkpoint
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.model.attention.calibration import CalibrationCard, write_calibration
from phalanx_runtime.model.attention.cpu import NativeAttention
from phalanx_runtime.model.attention.feedback import Feedback, KvRounding, make_feedback
from phalanx_runtime.model.attention.paged import PagedAttention
from phalanx_runtime.model.attention.registry import BACKENDS
from phalanx_runtime.model.native.library import library
from phalanx_runtime.rank.runner import ModelRunner

PAGE = 16
MARGIN_TOKENS = 64
_KV_BYTES = 30 * 3 * 2 * 64 * 2
"""Bytes of a token in bf16."""


def longer(folder: Path, source: Path, positions: int) -> Path:
    """Returns `folder` as the checkpoint `source` with more positions."""
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return folder


def fill(runner: ModelRunner) -> None:
    """Writes random numbers or codes to all pages, with small scales."""
    for cache in runner.caches:
        for part in (cache.k, cache.v):
            for page in torch.split(part, 4096):
                if part.dtype.is_floating_point:
                    page.normal_()
                else:
                    page.random_(0, 120)
        for scales in cache.tensors[2:]:
            scales.fill_(0.01)


def calibrate(folder: Path) -> None:
    """Writes a random calibration as `pages.kv`."""
    config, chance = json.loads((folder / "config.json").read_text()), torch.Generator().manual_seed(0)
    kv_heads, dim = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]

    def feedback() -> Feedback:
        mix = torch.randn(kv_heads, dim, dim, generator=chance)
        return make_feedback(torch.randn(kv_heads, dim, generator=chance), mix @ mix.transpose(1, 2))

    layers = [KvRounding(feedback(), feedback()) for _ in range(config["num_hidden_layers"])]
    write_calibration(folder / "pages.kv", CalibrationCard(model_hash=weights_hash(folder), num_tokens=0), layers)


class Expanding(NativeAttention):
    """`NativeAttention` whose chunks torch computes."""

    __slots__ = ()

    def _prefill_all(self, *args: Any, **named: Any) -> None:
        PagedAttention._prefill_all(self, *args, **named)


def open_expanding(is_batch_invariant: bool) -> Expanding:
    """Opens the kernels of this processor."""
    kernels = library()
    assert kernels is not None, "there is no compiler"
    return Expanding(kernels, is_batch_invariant)


def open_runner(
    folder: Path, kv_cache_dtype: str, requests: int, context: int, threads: int | None, dtype: str = "bfloat16", **more: str
) -> Stepper:
    """Returns a stepper over a pool for these requests. more: settings of the engine."""
    runner, _, _ = load_alone(
        folder,
        threads,
        **more,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        page_size=PAGE,
        max_num_seqs=requests,
        kv_cache_memory_bytes=requests * (context + MARGIN_TOKENS) * _KV_BYTES * getattr(torch, dtype).itemsize // 2,
    )
    fill(runner)
    return Stepper(runner, PAGE, time.thread_time if threads == 1 else time.perf_counter)


def compare(folder: Path, kv_cache_dtype: str, context: int, args: argparse.Namespace) -> str:
    """Returns a row: medians of step times in milliseconds, and the ratio of pairs in turn."""
    more: dict[str, Any] = {"kv_cache_calibration": "pages.kv"} if args.calibrated else {}
    requests = 1 if args.prompt else args.requests
    opened = partial(
        open_runner, folder, requests=requests, context=context + args.prompt, threads=args.threads, dtype=args.dtype
    )
    with patch.dict(BACKENDS, {"cpu": open_expanding} if args.expanded else {}):
        first = opened(kv_cache_dtype if args.calibrated or args.expanded else "auto")
    steppers = [first, opened(kv_cache_dtype, **more)]
    point = Point(0, 0, args.prompt, context) if args.prompt else Point(args.requests, context, 0, 0)
    times: list[list[float]] = [[], []]
    for turn in range(args.pairs + 1):
        for which in ((0, 1), (1, 0))[turn % 2]:
            seconds = steppers[which].time(point, float("inf"))
            assert seconds is not None, "there is no limit"
            if turn:
                times[which].append(seconds)
    ratio = mean_ratio(*times)
    middles = " | ".join(f"{1000 * percentile(some, 50):.1f}" for some in times)
    return f"| {kv_cache_dtype} | {context} | {middles} | {ratio.middle:.2f} | {ratio.low:.2f} to {ratio.high:.2f} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="2000,16000")
    parser.add_argument("--kv-cache-dtypes", default="int8,fp8,int4")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=0, metavar="N", help="tokens of a chunk, in place of decodes")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--calibrated", action="store_true", help="compare calibrated pages with others of their dtype")
    others.add_argument("--expanded", action="store_true", help="compare kernels with torch, which expands the pages of a chunk")
    args = parser.parse_args()
    contexts = [int(context) for context in args.contexts.split(",")]
    print("| KV dtype | context | other step, ms | step, ms | ratio | interval |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = longer(Path(scratch), checkpoint(), max(contexts) + args.prompt + MARGIN_TOKENS)
        if args.calibrated:
            calibrate(folder)
        for context in contexts:
            for kv_cache_dtype in args.kv_cache_dtypes.split(","):
                print(compare(folder, kv_cache_dtype, context, args), flush=True)


if __name__ == "__main__":
    main()
