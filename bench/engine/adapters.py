"""Measures requests with LoRA adapters beside requests without, on one rank without a server.

    python -m bench.engine.adapters MODEL [--adapters 8] [--requests 16] [--rank 16] [--pairs 9] [--threads 1]

A run computes the prompts of all requests, 128 tokens each, then 32 decode steps of all. Runs with adapters, equally many
requests for each, and without take turns on one engine with slots for them; the adapters are random and change all linears.
Prints the rate with adapters as a share of that without, for prompts, decodes and both, with a 95 % interval of the median. Exits
with 1 if the share of both is below 0.8. The model needs 160 positions.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from bench.engine.profile_step import make_plan
from bench.frame.figures import median_interval, table
from bench.frame.one_rank import load_alone
from phalanx_runtime.checkpoint.adapter import CONFIG_FILE, LINEARS, WEIGHTS_FILE, adapter_hash
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.model.config import ModelConfig, parse_config, read_json
from phalanx_runtime.rank.runner import ModelRunner

PROMPT, OUTPUT, STEP_TOKENS = 128, 32, 512
BOUND = 0.8


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """Writes a random adapter of all linears and returns its folder."""
    chance = torch.Generator().manual_seed(seed)
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden)]
    factors = {}
    for layer in range(config.num_layers):
        for name, (inputs, outputs) in zip(LINEARS, sizes, strict=True):
            block = "self_attn" if name in LINEARS[:4] else "mlp"
            stem = f"base_model.model.model.layers.{layer}.{block}.{name}"
            factors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=chance) * 0.02
            factors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=chance) * 0.02
    folder.mkdir()
    save_file(factors, folder / WEIGHTS_FILE)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(LINEARS)}
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    return folder


def plans_of(slots: Sequence[int]) -> tuple[list[StepPlan], list[StepPlan]]:
    """Returns the steps with prompts and those with decodes. `slots`: of each request; 0: no adapter."""
    per_step = max(1, STEP_TOKENS // PROMPT)
    parts = [slots[first : first + per_step] for first in range(0, len(slots), per_step)]
    prompts = [with_slots(make_plan(0, [(PROMPT, PROMPT)] * len(part)), part) for part in parts]
    decodes = [with_slots(make_plan(0, [(1, PROMPT + index)] * len(slots)), slots) for index in range(1, OUTPUT + 1)]
    return prompts, decodes


def with_slots(plan: StepPlan, slots: Sequence[int]) -> StepPlan:
    """Returns the plan with these adapters."""
    admitted = [msgspec.structs.replace(new, adapter=slot) for new, slot in zip(plan.admitted, slots, strict=True)]
    return msgspec.structs.replace(plan, admitted=admitted)


def run(runner: ModelRunner, plans: Sequence[StepPlan], clock: Callable[[], float]) -> float:
    """Returns the seconds of these steps."""
    started = clock()
    for plan in plans:
        runner.start(plan)
        runner.finish()
    return clock() - started


def measure(runner: ModelRunner, slots: Sequence[int], pairs: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Returns the rates with adapters as shares of those without, for each pair of runs after one that is not counted."""
    shares: dict[str, list[float]] = {"prompts": [], "decodes": [], "both": []}
    both = plans_of(slots), plans_of([0] * len(slots))
    for pair in range(pairs + 1):
        times = {}
        for which in (0, 1) if pair % 2 else (1, 0):
            times[which] = [run(runner, plans, clock) for plans in both[which]]
        if pair:
            ours, plain = times[0], times[1]
            shares["prompts"].append(plain[0] / ours[0])
            shares["decodes"].append(plain[1] / ours[1])
            shares["both"].append(sum(plain) / sum(ours))
    return shares


def main() -> int:
    """Runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    runner, _, device = load_alone(
        options.model,
        options.threads,
        enable_lora=True,
        max_loras=options.adapters,
        max_lora_rank=options.rank,
        enforce_eager=True,
        max_num_seqs=options.requests,
        max_num_batched_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=1 << 30,
    )
    config = parse_config(read_json(options.model))
    with tempfile.TemporaryDirectory() as folder:
        for slot in range(1, options.adapters + 1):
            adapter = write_adapter(Path(folder) / str(slot), config, options.rank, slot)
            why = runner.adapters.load(slot, str(adapter), adapter_hash(adapter))
            assert not why, why
    slots = [1 + at % options.adapters for at in range(options.requests)]
    clock = time.process_time if options.threads == 1 and device.type == "cpu" else time.perf_counter
    shares = measure(runner, slots, options.pairs, clock)
    print(f"{device}, {runner.dtype}, {options.requests} requests on {options.adapters} adapters of rank {options.rank}")
    intervals = {name: median_interval(ratios) for name, ratios in shares.items()}
    rows = [[name, f"{one.middle:.3f}", f"{one.low:.3f} to {one.high:.3f}"] for name, one in intervals.items()]
    print(table(["rate with adapters", "share of none", "95 %"], rows))
    return int(intervals["both"].middle < BOUND)


if __name__ == "__main__":
    sys.exit(main())
