"""Times decode steps of a model from GGUF files in several formats beside the same model in bf16, in turn.

    python -m bench.engine.gguf_decode [--formats Q4_K_M,Q8_0] [--batches 1,16] [--layers 6] [--context 200] [--pairs 9]

The model has the layers of Qwen3-0.6B and random weights; it computes in bf16 in one thread. A step is that of a rank without a
server, from its plan to the sampled tokens: the least CPU time of three. A ratio over 1 means that packed weights are faster;
intervals are of 95 %. MB are those of the loaded weights, and their ratio to the bytes in the file.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from bench.engine.profile_step import make_plan
from bench.frame.figures import median_interval, percentile, table
from bench.frame.one_rank import load_alone
from phalanx_runtime.checkpoint.gguf.file import read_gguf
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.checkpoint.gguf_files import TABLES, Kind, TinyGguf, random_blocks

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 1024, 3072, 16, 8, 128, 32768
SHAPES = {
    "attn_q": (HEADS * DIM, HIDDEN),
    "attn_k": (KV_HEADS * DIM, HIDDEN),
    "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
METADATA: Mapping[str, object] = {
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "context_length": 1024,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": DIM,
    "rope.dimension_count": DIM,
}
BF16 = "BF16"


def kind_of(name: str, tensor: str, layer: int) -> GGMLQuantizationType:
    """Returns the format of a tensor. Q4_K_M has values and down projections of half of the layers, and the head, in Q6_K.

    The head is in Q6_K beside formats of codes, too, as llama.cpp quantises it.
    """
    if name != "Q4_K_M":
        kind = GGMLQuantizationType[name]
        return Kind.Q6_K if tensor == "token_embd" and kind in TABLES else kind
    is_wide = tensor == "token_embd" or (tensor in ("attn_v", "ffn_down") and layer % 2 == 0)
    return Kind.Q6_K if is_wide else Kind.Q4_K


def write(path: Path, name: str, layers: int) -> Path:
    """Writes the model with random weights in one format; the head is tied."""
    content: dict[str, Any] = {"output_norm.weight": np.ones(HIDDEN, np.float32)}
    formats: dict[str, GGMLQuantizationType] = {}
    shapes = [("token_embd", "token_embd", 0, (VOCABULARY, HIDDEN))]
    for layer in range(layers):
        content |= {f"blk.{layer}.{norm}.weight": np.ones(HIDDEN, np.float32) for norm in ("attn_norm", "ffn_norm")}
        shapes += [(f"blk.{layer}.{tensor}", tensor, layer, shape) for tensor, shape in SHAPES.items()]
    for full, tensor, layer, shape in shapes:
        kind = kind_of(name, tensor, layer)
        formats[f"{full}.weight"] = kind
        if kind == Kind.BF16:
            content[f"{full}.weight"] = (torch.randn(shape) / 32).bfloat16().view(torch.uint8).numpy()
        else:
            content[f"{full}.weight"] = random_blocks(kind, shape, layer)
    extra = {f"llama.{key}": value for key, value in {**METADATA, "block_count": layers}.items()}
    return TinyGguf(extra=extra, content=content, formats=formats).write(path)


def milliseconds(runner: ModelRunner, batch: int, context: int) -> float:
    """Returns the least of three CPU times of a step of `batch` decodes."""
    times = []
    for step in range(3):
        plan = make_plan(step, [(1, context)] * batch)
        start = time.thread_time()
        runner.start(plan)
        runner.finish()
        times.append((time.thread_time() - start) * 1e3)
    return min(times)


def measure(
    runners: Mapping[str, ModelRunner], sizes: Mapping[str, str], batch: int, context: int, pairs: int
) -> list[list[str]]:
    """Returns a row for each format."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(pairs + 1):
        for name, runner in runners.items():
            found = milliseconds(runner, batch, context)
            times[name] += [found] if number else []
    rows = []
    for name, own in times.items():
        ratio = median_interval([base / each for base, each in zip(times[BF16], own, strict=True)])
        figures = f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        rows.append([f"{name} x {batch}", sizes[name], f"{percentile(own, 50) / batch:.2f}", figures])
    return rows


def run(names: Sequence[str], batches: Sequence[int], layers: int, context: int, pairs: int) -> str:
    """Returns the table."""
    runners, sizes = dict[str, ModelRunner](), dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        for form in (BF16, *names):
            path = write(Path(name) / f"{form}.gguf", form, layers)
            stored = sum(tensor.raw.nbytes for tensor in read_gguf(path).tensors)
            folder = locate(str(path), cache_dir=Path(name) / "cache").dir
            runner, _, _ = load_alone(folder, 1, dtype="bfloat16", kv_cache_memory_bytes=256 << 20, max_model_len=512)
            runners[form] = runner
            sizes[form] = f"{runner.model.num_bytes / 1e6:.0f} ({runner.model.num_bytes / stored:.3f})"
    rows = [row for batch in batches for row in measure(runners, sizes, batch, context, pairs)]
    return table(["format x batch", "MB (of the file)", "CPU ms per token", "bf16 time / time"], rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="Q4_K_M,Q8_0")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=9)
    flags = parser.parse_args()
    torch.manual_seed(0)
    batches = [int(batch) for batch in flags.batches.split(",")]
    print(run(flags.formats.split(","), batches, layers=flags.layers, context=flags.context, pairs=flags.pairs))


if __name__ == "__main__":
    main()
