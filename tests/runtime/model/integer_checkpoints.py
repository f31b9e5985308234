"""Copies a checkpoint into integer codes, in each supported kind, and what those weights are in fp32.

The packing follows the formats' descriptions, one field after the other, and shares no code with the runtime.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of a word, lowest field first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a checkpoint is quantised."""

    layout: Literal["pack-quantized", "int-quantized", "awq", "gptq"]
    bits: int = 4
    group: int = -1
    symmetric: bool = True
    strategy: str = "channel"
    is_ordered: bool = False
    is_v2: bool = False
    has_plain_zeros: bool = False
    """Zero points of compressed-tensors in int8."""
    rounds_inputs: bool = False
    """Whether it names activations of 8 bits, as `int-quantized` always does."""

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config`."""
        if self.layout == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        if self.layout == "gptq":
            form = {"checkpoint_format": "gptq_v2" if self.is_v2 else "gptq", "desc_act": self.is_ordered, "sym": self.symmetric}
            return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, **form}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "strategy": self.strategy}
        weights |= {"group_size": None if self.group < 0 else self.group, "actorder": "group" if self.is_ordered else None}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs if self.rounds_inputs or self.layout == "int-quantized" else None,
        }
        return {"quant_method": "compressed-tensors", "format": self.layout, "config_groups": {"group_0": group}}


KINDS: Mapping[str, Kind] = {
    "w4 groups": Kind(layout="pack-quantized", group=32, strategy="group"),
    "w4 zeros": Kind(layout="pack-quantized", group=32, strategy="group", symmetric=False),
    "w4 plain zeros": Kind(layout="pack-quantized", group=32, strategy="group", symmetric=False, has_plain_zeros=True),
    "w4 order": Kind(layout="pack-quantized", group=32, strategy="group", is_ordered=True),
    "w4 channel": Kind(layout="pack-quantized"),
    "w8 groups": Kind(layout="pack-quantized", bits=8, group=32, strategy="group", symmetric=False),
    "w8 channel": Kind(layout="pack-quantized", bits=8),
    "int8 channel": Kind(layout="int-quantized", bits=8),
    "int8 tensor": Kind(layout="int-quantized", bits=8, strategy="tensor"),
    "int8 zeros": Kind(layout="int-quantized", bits=8, symmetric=False),
    "awq": Kind(layout="awq", group=32, symmetric=False),
    "gptq": Kind(layout="gptq", group=32),
    "gptq order": Kind(layout="gptq", group=32, is_ordered=True, symmetric=False),
    "gptq v2": Kind(layout="gptq", group=32, symmetric=False, is_v2=True),
    "gptq 8 bits": Kind(layout="gptq", bits=8),
}


@dataclass(frozen=True, slots=True)
class Quantised:
    """Codes of a weight and their meaning."""

    codes: Tensor
    """int64 [outputs, inputs], 0 to 2^bits - 1."""
    scales: Tensor
    """[outputs, groups]."""
    zeros: Tensor
    """int64 [outputs, groups]."""
    groups: Tensor
    """[inputs]."""

    @property
    def exact(self) -> Tensor:
        """The weight in fp32."""
        return (self.codes - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def quantise(weight: Tensor, kind: Kind) -> Quantised:
    """Rounds [outputs, inputs] to nearest in the groups of the kind."""
    outputs, inputs = weight.shape
    size = inputs if kind.group < 0 else kind.group
    groups = torch.arange(inputs) // size
    if kind.is_ordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    most, num_groups = 2**kind.bits - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(outputs, num_groups), torch.full((outputs, num_groups), 2 ** (kind.bits - 1))
    for group in range(num_groups):
        part = weight if kind.strategy == "tensor" else weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if kind.strategy == "tensor":
            low, high = low.min().expand(outputs), high.max().expand(outputs)
        if kind.symmetric:
            scales[:, group] = torch.maximum(high, -low) / (most // 2)
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, most).long()
    stored = scales.to(torch.float16 if kind.layout in ("awq", "gptq") else torch.bfloat16)
    codes = (weight / stored.float()[:, groups]).round() + zeros[:, groups]
    return Quantised(codes.clamp(0, most).long(), stored, zeros, groups)


def pack(values: Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> Tensor:
    """Returns int32 words along an axis: field i has value i of the word, or value `order[i]`."""
    matrix = values.numpy().astype(np.uint32)
    matrix = matrix if axis else matrix.T
    per_word = 32 // bits
    padded = np.zeros((matrix.shape[0], -(-matrix.shape[1] // per_word) * per_word), np.uint32)
    padded[:, : matrix.shape[1]] = matrix
    words = np.zeros((matrix.shape[0], padded.shape[1] // per_word), np.uint32)
    for field in range(per_word):
        words |= padded[:, (order[field] if order else field) :: per_word] << np.uint32(bits * field)
    return torch.from_numpy(np.ascontiguousarray(words if axis else words.T).view(np.int32))


def stored_tensors(name: str, quantised: Quantised, kind: Kind) -> dict[str, Tensor]:
    """Returns the tensors of the linear `name`."""
    codes, scales, zeros, bits = quantised.codes, quantised.scales, quantised.zeros, kind.bits
    match kind.layout:
        case "awq":
            words = {"qweight": pack(codes.t(), 4, 1, AWQ_FIELDS), "qzeros": pack(zeros.t(), 4, 1, AWQ_FIELDS)}
            found = {**words, "scales": scales.t()}
        case "gptq":
            less = zeros if kind.is_v2 else (zeros - 1) % 2**bits
            found = {"qweight": pack(codes.t(), bits, 0), "qzeros": pack(less.t(), bits, 1), "scales": scales.t()}
            found["g_idx"] = quantised.groups.to(torch.int32)
        case "pack-quantized":
            found = {"weight_packed": pack(codes, bits, 1), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
            if not kind.symmetric:
                signed = (zeros - 2 ** (bits - 1)).to(torch.int8)
                found["weight_zero_point"] = signed if kind.has_plain_zeros else pack(zeros, bits, 0)
            if kind.is_ordered:
                found["weight_g_idx"] = quantised.groups.to(torch.int32)
        case "int-quantized":
            found = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
            if kind.strategy == "tensor":
                found |= {"weight_scale": scales[:1, 0], "input_scale": torch.ones(1)}
            if not kind.symmetric:
                found["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in found.items()}


def save_integers(source: Path, folder: Path, exact: Path, kind: Kind) -> None:
    """Writes `source` in integers to `folder`, and dequantised in fp32 to `exact`. The head stays as it is."""
    for target in (folder, exact):
        shutil.copytree(source, target)
    stored, dequantised = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not re.search(r"(proj|w[123])\.weight$", name):
            stored[name] = dequantised[name] = tensor
            continue
        quantised = quantise(tensor, kind)
        stored |= stored_tensors(name.removesuffix(".weight"), quantised, kind)
        dequantised[name] = quantised.exact
    save_file(stored, folder / "model.safetensors")
    save_file(dequantised, exact / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": kind.config}))
