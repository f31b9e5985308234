"""Copies a checkpoint into fp8, in each supported kind, and what those weights are in fp32."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Kind = Literal["block", "tensor", "autofp8", "channel", "compressed block"]
BLOCK = (32, 32)
_GROUP = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
CONFIGS: dict[Kind, dict[str, Any]] = {
    "block": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    "autofp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "tensor": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
    "channel": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
    "compressed block": {"quant_method": "compressed-tensors", "format": "float-quantized"},
}
for _kind, _strategy in (("tensor", "tensor"), ("channel", "channel"), ("compressed block", "block")):
    _weights = {**_GROUP, "strategy": _strategy, **({"block_structure": list(BLOCK)} if _strategy == "block" else {})}
    CONFIGS[_kind]["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": _weights, "input_activations": None}}  # type: ignore[index]
KINDS: tuple[Kind, ...] = tuple(CONFIGS)


def scales_of(weight: torch.Tensor, kind: Kind, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales as stored, and of each weight."""
    if kind in ("tensor", "autofp8"):
        scale = (weight.abs().max() / 448).reshape(1)
        return scale, scale.expand_as(weight)
    if kind == "channel":
        scale = weight.abs().amax(1, keepdim=True) / 448
        return scale, scale.expand_as(weight)
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // block[0]), -(-inputs // block[1])
    padded = torch.nn.functional.pad(weight, (0, columns * block[1] - inputs, 0, rows * block[0] - outputs))
    scale = padded.view(rows, block[0], columns, block[1]).abs().amax((1, 3)) / 448
    return scale, scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:outputs, :inputs]


def save_fp8(source: Path, folder: Path, exact: Path, kind: Kind, block: tuple[int, int] = BLOCK) -> None:
    """Writes `source` in fp8 to `folder`, and dequantised in fp32 to `exact`. The head stays as it is."""
    for target in (folder, exact):
        shutil.copytree(source, target)
    stored, dequantised = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not re.search(r"(proj|w[123])\.weight$", name):
            stored[name] = dequantised[name] = tensor
            continue
        scales, wide = scales_of(tensor, kind, block)
        stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv" if kind == "block" else f"{name}_scale"] = scales
        if kind == "autofp8":
            stored[name.replace(".weight", ".input_scale")] = torch.ones(1)
        dequantised[name] = stored[name].float() * wide
    save_file(stored, folder / "model.safetensors")
    save_file(dequantised, exact / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    quantization = CONFIGS[kind] | ({"weight_block_size": list(block)} if kind == "block" else {})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
