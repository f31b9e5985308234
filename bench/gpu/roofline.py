"""Predicts the time of a step on a GPU from bytes and FLOPs of its kernels: the limit that measurements are compared with.

    python -m bench.gpu.roofline [--model llama-8b | qwen3-0.6b | CONFIG.json] [--device h100 | h200] [--gap-us 0]

    time of a kernel   max(bytes / copy rate, FLOPs / matmul rate) + launch gap
    ideal of a decode  (weights + KV of all contexts, read once) / copy rate
    ideal of a prefill FLOPs of linears and attention / matmul rate

The first table shows the share of the ideal, the second one for each kernel the share of the step that exceeds its part of the
ideal. As in steps of several rows, residual and norm, rotary embedding and KV write, and gate and activation are fused; embedding
and first norm are two kernels. The merge of splits is left out, and so is that a step of one row has fewer launches.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.frame.figures import table
from phalanx_api.roofline import PRODUCTS, DeviceRates, ModelShape, shape_of, step_demand

MODELS: Mapping[str, ModelShape] = {
    "llama-8b": ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256),
    "qwen3-0.6b": ModelShape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """All launches of one kernel in a step."""

    name: str
    bytes: float
    flops: float = 0.0
    ideal_bytes: float = 0.0
    """Weights or KV that a step must read."""
    launches: int = 1

    def seconds(self, device: DeviceRates, gap_s: float = 0.0) -> float:
        """Returns the predicted time."""
        return max(self.bytes / device.copy_bytes_per_s, self.flops / device.matmul_flops_per_s) + self.launches * gap_s


def kernels(shape: ModelShape, tokens: int, contexts: Sequence[int], num_logits: int) -> list[Kernel]:
    """Returns the kernels of a step.

    tokens: rows of all linears. contexts: keys of each token's request; of a prefill chunk each token has its own number of keys.
    num_logits: rows of the head.
    """
    size, layers = shape.bytes_per_number, shape.layers
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def linear(name: str, inputs: int, outputs: int, rows: int, count: int) -> Kernel:
        weights = inputs * outputs * size
        return Kernel(
            name=name,
            bytes=count * (weights + rows * (inputs + outputs) * size),
            flops=count * 2.0 * rows * inputs * outputs,
            ideal_bytes=count * weights,
            launches=count,
        )

    def elementwise(name: str, numbers_per_token: int, count: int) -> Kernel:
        return Kernel(name=name, bytes=count * tokens * numbers_per_token * size, launches=count)

    is_prefill = num_logits < tokens
    keys = max(contexts, default=0) if is_prefill else sum(contexts)
    kv_bytes = keys * shape.kv_bytes_per_token
    return [
        elementwise("embedding", 2 * shape.hidden, 1),
        elementwise("first norm", 2 * shape.hidden, 1),
        linear("qkv", shape.hidden, q + 2 * kv, tokens, layers),
        elementwise("rotary, KV write", 2 * (q + 2 * kv), layers),
        Kernel(
            name="attention",
            bytes=kv_bytes + layers * tokens * 2 * q * size,
            flops=layers * 4.0 * q * sum(contexts),
            ideal_bytes=kv_bytes,
            launches=layers,
        ),
        linear("output", q, shape.hidden, tokens, layers),
        elementwise("residual, norm", 4 * shape.hidden, 2 * layers),
        linear("gate, up", shape.hidden, 2 * shape.intermediate, tokens, layers),
        elementwise("activation", 3 * shape.intermediate, layers),
        linear("down", shape.intermediate, shape.hidden, tokens, layers),
        linear("head", shape.hidden, shape.vocab, num_logits, 1),
        Kernel(name="sampling", bytes=2.0 * num_logits * shape.vocab * size),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time of a step."""

    seconds: float
    ideal_s: float
    lost: Mapping[str, float]
    """Share of the step by kernel that exceeds the kernel's part of the ideal."""

    @property
    def share(self) -> float:
        """Share of the ideal that is reached."""
        return self.ideal_s / self.seconds


def predict_decode(shape: ModelShape, device: DeviceRates, batch: int, context: int, gap_s: float = 0.0) -> Prediction:
    """Returns the prediction of a decode step of `batch` requests; ideal: weights and KV read once."""
    parts = kernels(shape, batch, [context] * batch, batch)
    seconds = sum(part.seconds(device, gap_s) for part in parts)
    ideal = {part.name: part.ideal_bytes / device.copy_bytes_per_s for part in parts}
    lost = {part.name: (part.seconds(device, gap_s) - ideal[part.name]) / seconds for part in parts}
    demand = step_demand(shape, tokens=batch, num_logits=batch, keys_read=batch * context, token_keys=batch * context)
    return Prediction(seconds=seconds, ideal_s=demand.bytes / device.copy_bytes_per_s, lost=lost)


def predict_prefill(shape: ModelShape, device: DeviceRates, tokens: int, gap_s: float = 0.0) -> Prediction:
    """Returns the prediction of one prompt of `tokens`; ideal: its FLOPs at the matmul rate."""
    parts = kernels(shape, tokens, range(1, tokens + 1), 1)
    seconds = sum(part.seconds(device, gap_s) for part in parts)
    ideal = {part.name: part.flops / device.matmul_flops_per_s for part in parts}
    lost = {part.name: (part.seconds(device, gap_s) - ideal[part.name]) / seconds for part in parts}
    demand = step_demand(shape, tokens=tokens, num_logits=1, keys_read=tokens, token_keys=tokens * (tokens + 1) / 2)
    return Prediction(seconds=seconds, ideal_s=demand.flops / device.matmul_flops_per_s, lost=lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """A row of the first table and a column of the second one."""

    name: str
    tokens: int
    prediction: Prediction

    @property
    def row(self) -> list[str]:
        """Cells of the first table."""
        seconds = self.prediction.seconds
        return [self.name, f"{self.tokens / seconds:,.0f}", f"{1e3 * seconds:.3f}", f"{self.prediction.share:.1%}"]


def kernel_rows(steps: Sequence[PredictedStep]) -> list[list[str]]:
    """Returns the rows of the second table: a kernel, and the share that each step loses to it."""
    return [[name, *(f"{step.prediction.lost[name]:.1%}" for step in steps)] for name in steps[0].prediction.lost]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.roofline", description="Predicts the time of a step on a GPU.")
    parser.add_argument("--model", default="llama-8b", help=f"{', '.join(MODELS)}, or a config.json")
    parser.add_argument("--device", choices=list(PRODUCTS), default="h100")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--gap-us", type=float, default=0.0, help="time between launches")
    args = parser.parse_args(argv)
    if args.model not in MODELS and not Path(args.model).is_file():
        parser.error(f"--model: {args.model} is no file and none of {', '.join(MODELS)}")
    shape = MODELS[args.model] if args.model in MODELS else shape_of(json.loads(Path(args.model).read_text()))
    device, gap_s = PRODUCTS[args.device], args.gap_us / 1e6
    steps = [
        PredictedStep(
            name=f"decode {batch} x {context}", tokens=batch, prediction=predict_decode(shape, device, batch, context, gap_s)
        )
        for context, batch in product(args.contexts, args.batches)
    ]
    steps += [
        PredictedStep(name=f"prefill {tokens}", tokens=tokens, prediction=predict_prefill(shape, device, tokens, gap_s))
        for tokens in args.prefill
    ]
    print(f"{args.model} on {device.name}, launch gap {args.gap_us:g} us: predictions, not measurements")
    print(table(["step", "tokens/s", "ms", "of ideal"], [step.row for step in steps]))
    print("\nshare of the step that is lost to each kernel")
    print(table(["kernel", *(step.name for step in steps)], kernel_rows(steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
