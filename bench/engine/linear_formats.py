"""Times the linears of decode steps with packed weights beside those of bf16 weights, in turn.

    python -m bench.engine.linear_formats [--batches 1,16] [--pairs 9] [--threads 1] [--layers 8] [--formats int8,int4,...]

The layers have the shape of Qwen3-0.6B's and random weights, more of them than a cache holds. Formats: `int8`, `int4` and `fp8`
as `--quantization` rounds them; `w4 32` to `w4 128` as checkpoints with groups of 32 to 128 inputs, zero points and half
scales, `w8 128` the same in 8 bits, `mxfp4`, `nvfp4` and `nf4` with their tables and scales, `w8a8` with a scale per output and
inputs in int8, `w4a8 64` in groups and inputs in int8; `Q4_K`, `Q8_0` and others as GGUF files have them. Times are the least
of three for all layers: CPU times with one thread, else wall times. A ratio over 1 means that packed weights are faster;
intervals are of 95 %.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from bench.frame.figures import median_interval, percentile, table
from phalanx_runtime.model.ggml.weight import GgmlPart, GgmlWeight
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from tests.runtime.checkpoint.gguf_files import random_blocks

HIDDEN, QKV, HEADS, INNER = 1024, 4096, 2048, 3072
SHAPES = ((QKV, HIDDEN), (HIDDEN, HEADS), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""Outputs and inputs of qkv, o, gate above up, and down."""
Step = Callable[[], None]


def random_codes(shape: tuple[int, int], bits: int, group: int) -> IntWeight:
    """Returns a weight of a checkpoint in groups."""
    groups = torch.arange(shape[1]) // group
    size = (shape[0], shape[1] // group)
    return IntWeight(
        codes=torch.randint(2**bits, shape, dtype=torch.uint8),
        scales=torch.rand(size).half() / 100,
        zeros=torch.randint(2**bits, size, dtype=torch.uint8),
        groups=groups,
        bits=bits,
        dtype=torch.bfloat16,
    )


TABLES = {"mxfp4": (32, torch.float8_e8m0fnu), "nvfp4": (16, torch.float8_e4m3fn), "nf4": (64, torch.float32)}
"""Inputs of a group, and dtype of its scale."""


def random_table_codes(shape: tuple[int, int], name: str) -> IntWeight:
    """Returns a weight whose codes have values of their own."""
    group, dtype = TABLES[name]
    plain = random_codes(shape, 4, group)
    scales = torch.full(plain.scales.shape, 2**-7).to(dtype)
    return replace(plain, scales=scales, zeros=None, table=torch.linspace(-1, 1, 16), factors=torch.ones(shape[0]))


def random_ggml(shape: tuple[int, int], name: str) -> GgmlWeight:
    """Returns a weight as a GGUF file has it."""
    kind = GGMLQuantizationType[name]
    raw = torch.from_numpy(random_blocks(kind, shape, 0))
    return GgmlWeight(parts=(GgmlPart(kind, raw),), inputs=shape[1], dtype=torch.bfloat16)


def make_step(name: str, batch: int, layers: int) -> tuple[Step, int]:
    """Returns a step over the linears of all layers, and their bytes."""
    precision: Any = name if name in ("int8", "int4", "fp8") else "bf16"
    kernels = Kernels(compiled=True, precision=precision)

    def weight(shape: tuple[int, int]) -> Tensor | IntWeight | GgmlWeight:
        if name in GGMLQuantizationType.__members__:
            return random_ggml(shape, name)
        if name == "w8a8":
            plain = random_codes(shape, 8, shape[1])
            return replace(plain, zeros=None, rounds_inputs=True)
        if name in TABLES:
            return random_table_codes(shape, name)
        if name.startswith("w4a8 "):
            return replace(random_codes(shape, 4, int(name[5:])), zeros=None, rounds_inputs=True)
        if name.startswith("w"):
            bits, group = name[1:].split(" ")
            return random_codes(shape, int(bits), int(group))
        return torch.randn(shape, dtype=torch.bfloat16) / 32

    made = []
    for _ in range(layers):
        qkv, o, gate_up, down = (weight(shape) for shape in SHAPES)
        linears = [make_linear(part, None, kernels) for part in (qkv, o, down)]
        made.append((linears, make_gated(gate_up, None, "silu", kernels)))
    x, heads = torch.randn(batch, HIDDEN, dtype=torch.bfloat16), torch.randn(batch, HEADS, dtype=torch.bfloat16)

    def step() -> None:
        for (qkv, o, down), gate_up in made:
            qkv(x)
            o.add_to(x.clone(), heads)
            down.add_to(x.clone(), gate_up(x))

    return step, sum(gated.num_bytes + sum(part.num_bytes for part in linears) for linears, gated in made)


def seconds(step: Step) -> float:
    """Returns the least of three times."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(3):
        start = clock()
        step()
        times.append(clock() - start)
    return min(times)


def measure(names: Sequence[str], batch: int, layers: int, pairs: int) -> list[list[str]]:
    """Returns a row for each format: bytes, milliseconds and the ratio to bf16."""
    steps = {name: make_step(name, batch, layers) for name in ("bf16", *names)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step, _ in steps.values():
        step()
    for _ in range(pairs):
        for name, (step, _) in steps.items():
            times[name].append(seconds(step))
    rows = []
    for name, (_, num_bytes) in steps.items():
        ratio = median_interval([base / own for base, own in zip(times["bf16"], times[name], strict=True)])
        figures = f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        rows.append([f"{name} x {batch}", f"{num_bytes / 1e6:.0f}", f"{percentile(times[name], 50) * 1e3:.2f}", figures])
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--formats", default="int8,int4,w4 32,w4 128,w8 128,w8a8")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    names = flags.formats.split(",")
    rows = [row for batch in flags.batches.split(",") for row in measure(names, int(batch), flags.layers, flags.pairs)]
    print(table(["format x batch", "MB", "ms", "bf16 time / time"], rows))


if __name__ == "__main__":
    main()
