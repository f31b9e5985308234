"""Random LoRA adapters in PEFT's format for tiny models, and checkpoints with an adapter merged into the weights."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.checkpoint.adapter import CONFIG_FILE, JOINED, LINEARS, WEIGHTS_FILE, adapter_hash

SCALE = 0.4
"""Standard deviation of the factors: enough to change most tokens."""


def save_adapter(
    folder: Path,
    base: Path,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = LINEARS,
    layers: Sequence[int] | None = None,
    **config: Any,
) -> Path:
    """Writes an adapter of some linears of all layers and returns its folder. `config`: fields of adapter_config.json."""
    weights = load_file(base / "model.safetensors")
    chance = torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        parts = name.split(".")
        if name.endswith(".weight") and parts[-2] in targets and (layers is None or int(parts[2]) in layers):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{stem}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=chance) * SCALE
            factors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=chance) * SCALE
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors, folder / WEIGHTS_FILE)
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": list(targets),
        "base_model_name_or_path": "tiny",
    }
    (folder / CONFIG_FILE).write_text(json.dumps({**fields, **config}))
    return folder


def save_joined(
    folder: Path, base: Path, merged: Path, *, is_swapped: bool = False, seed: int = 0, rank: int = 4, targets: Sequence[str]
) -> Path:
    """Writes an adapter of parameters with all experts, and the base model with it merged as PEFT does.

    Returns the adapter's folder. `is_swapped`: as PEFT before 0.19 stores it.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model, chance = auto.from_pretrained(base, dtype=torch.float32), torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        for target in targets if hasattr(block.mlp, "experts") else ():
            weight = getattr(block.mlp.experts, target).data
            takes_rows = is_swapped or model.config.model_type == "gpt_oss"  # [experts, in, out]
            experts, inputs, outputs = weight.shape if takes_rows else weight.mT.shape
            a = torch.randn(rank * experts, inputs, generator=chance) * SCALE
            b = torch.randn(outputs, rank * experts, generator=chance) * SCALE
            delta = torch.einsum("ore,eri->eio", b.view(outputs, -1, experts), a.view(experts, -1, inputs))
            weight += 2 * (delta if takes_rows else delta.mT)
            # The wrapper of the last parameter is the outermost one.
            stem = f"base_model.model.model.layers.{layer}.mlp.experts{'' if target == targets[-1] else '.base_layer'}"
            factors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(factors, folder / WEIGHTS_FILE)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": []}
    fields |= {"target_parameters": [f"mlp.experts.{target}" for target in targets]}
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    shutil.copytree(base, merged)
    model.save_pretrained(merged)
    return folder


def load_frame(folder: Path, name: str) -> wire.LoadAdapter:
    """Returns the order that loads an adapter."""
    return wire.LoadAdapter(wire.Adapter(name, adapter_hash(folder)), str(folder))


def joined(names: Sequence[str] = LINEARS) -> list[str]:
    """Returns the modules that store these linears as one."""
    return sorted({next((module for module, parts in JOINED.items() if name in parts), name) for name in names})


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes the base model with W + scale * B A as its weights and returns its folder."""
    config: Mapping[str, Any] = json.loads((adapter / CONFIG_FILE).read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    shutil.copytree(base, folder)
    weights, factors = load_file(base / "model.safetensors"), load_file(adapter / WEIGHTS_FILE)
    for name in weights:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in factors:
            a, b = (factors[f"{stem}.lora_{factor}.weight"].double() for factor in "AB")
            weights[name] = (weights[name].double() + scale * (b @ a)).float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
