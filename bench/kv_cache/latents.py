"""Bytes per token, and times of steps, of latents in pages beside the keys and values of all heads.

    python -m bench.kv_cache.latents [--contexts 1000,4000,16000] [--requests 1] [--chunk 256] [--pairs 7] [--heads 16]

Sizes: of models by their published dimensions, from the function that sizes page pools. Times: a random model in bf16 of two
dense layers with DeepSeek-V2's attention and `--heads` heads, loaded twice by the model code of `transformers`, with latents and
without; one rank on one thread, CPU times, in turn. Pages have random content. A ratio over 1 means that latents are faster;
intervals are of 95 %. A chunk is the last tokens of a prompt of that context.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.engine.step_fit import Stepper
from bench.engine.step_grid import Point
from bench.frame.figures import median_interval, percentile
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.page_format import choose_format
from phalanx_runtime.model.config import read_json
from phalanx_runtime.model.generic.source import open_generic
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import KvLayout, LoadOptions
from phalanx_runtime.rank.loader import make_runner
from phalanx_runtime.rank.memory.kv_cache import make_caches, page_bytes
from phalanx_runtime.rank.step.pipeline import Pipeline

PAGE = 16
LATENT, ROTATED, NOPE, VALUE = 512, 64, 128, 128
MODELS = {
    "DeepSeek-V2-Lite": (27, 16, 0),
    "DeepSeek-V2": (60, 128, 0),
    "DeepSeek-V3, R1": (61, 128, 0),
    "DeepSeek-V3.2": (61, 128, 128),
}
"""Layers, heads and dimension of index keys; their latents have the dimensions above."""
DTYPES = ("auto", "int8", "fp8", "int4")
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def sizes() -> Iterator[str]:
    """Returns a row for each model: bytes of a token over all layers, with all heads in bf16, then as latents by KV dtype."""
    yield "| model | keys and values, bf16 | latents, " + " | ".join(("bf16", *DTYPES[1:])) + " |\n|" + "---|" * (2 + len(DTYPES))
    for name, (layers, heads, index) in MODELS.items():
        whole = KvLayout(heads, (NOPE + ROTATED,) * layers, (None,) * layers)
        latent, keys = (KvLayout(1, (dim,) * layers, (None,) * layers, is_latent=True) for dim in (LATENT + ROTATED, index))
        formats = [choose_format(dtype, latent.head_dims) for dtype in DTYPES]
        indices = [page_bytes(keys, PAGE, BF16, format) if index else 0 for format in formats]
        parts = [page_bytes(whole, PAGE, BF16), *(page_bytes(latent, PAGE, BF16, format) for format in formats)]
        parts = [size + more for size, more in zip(parts, (indices[0], *indices), strict=True)]
        yield f"| {name} | " + " | ".join(f"{size // PAGE:,}" for size in parts) + " |"


def save_model(folder: Path, heads: int, positions: int) -> Path:
    """Writes a random checkpoint and returns its folder."""
    import transformers

    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROTATED,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        "head_dim": ROTATED,
        "max_position_embeddings": positions,
    }
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(transformers.AutoConfig.for_model("deepseek_v3", **fields), dtype=BF16).save_pretrained(folder)
    return folder


def open_stepper(folder: Path, num_tokens: int, *, has_latents: bool) -> Stepper:
    """Returns a stepper over random pages for these tokens."""
    source = replace(open_generic(folder, read_json(folder)), has_latents=has_latents)
    options = LoadOptions(dtype=BF16, device=CPU, kernels=Kernels(), positions=source.max_position)
    model = source.load(SoloCollective(), options)
    assert model.kv.is_latent == has_latents
    pool = PoolShape(-(-num_tokens // PAGE), PAGE)
    caches = make_caches(model.kv, pool.num_pages, PAGE, BF16, CPU)
    for tensor in (tensor for cache in caches for tensor in cache.tensors):
        tensor.normal_()
    return Stepper(make_runner(model, caches, pool, Pipeline(SoloCollective()), BF16, CPU), PAGE, time.thread_time)


def compare(steppers: Sequence[Stepper], point: Point, pairs: int) -> str:
    """Returns medians of step times in milliseconds, expanded first, and the ratio of pairs in turn."""
    times: list[list[float]] = [[], []]
    for turn in range(pairs + 1):
        for which in ((0, 1), (1, 0))[turn % 2]:
            seconds = steppers[which].time(point, float("inf"))
            assert seconds is not None, "there is no limit"
            if turn:
                times[which].append(seconds)
    ratio = median_interval([whole / latent for whole, latent in zip(*times, strict=True)])
    middles = " | ".join(f"{1000 * percentile(some, 50):.2f}" for some in times)
    return f"{middles} | {ratio.middle:.2f} | {ratio.low:.2f} to {ratio.high:.2f} |"


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1000,4000,16000")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--heads", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(sizes()), "\n\n| step | context | expanded, ms | latents, ms | ratio | interval |\n|---|---|---|---|---|---|")
    contexts = [int(context) for context in args.contexts.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_model(Path(scratch), args.heads, max(contexts) + PAGE)
        num_tokens = args.requests * (max(contexts) + PAGE)
        steppers = [open_stepper(folder, num_tokens, has_latents=has_latents) for has_latents in (False, True)]
        for context in contexts:
            decodes, chunk = Point(args.requests, context, 0, 0), Point(0, 0, args.chunk, context - args.chunk)
            print(f"| decode of {args.requests} | {context} | {compare(steppers, decodes, args.pairs)}", flush=True)
            print(f"| chunk of {args.chunk} | {context} | {compare(steppers, chunk, args.pairs)}", flush=True)


if __name__ == "__main__":
    main()
