"""Copies a checkpoint into MXFP4, NVFP4 or a kind of bitsandbytes, and what those weights are in fp32.

The packing follows the formats' descriptions, one number after the other, and shares no code with the runtime.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by suffix, and the weight that they mean in fp32."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    return (numbers[..., None] - table).abs().argmin(-1)


def pairs(codes: Tensor, first_shift: int) -> Tensor:
    """Puts two codes into each byte; the first one is shifted by `first_shift` bits."""
    flat = codes.numpy().astype(np.uint8).reshape(*codes.shape[:-1], -1, 2)
    return torch.from_numpy(flat[..., 0] << first_shift | flat[..., 1] << (4 - first_shift))


def pack_mxfp4(weight: Tensor) -> Packed:
    """weight: [..., outputs, inputs]."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = groups.abs().amax(-1).log2().floor() - 2
    codes = nearest(groups / exponents.exp2()[..., None], E2M1)
    exact = E2M1[codes] * exponents.exp2()[..., None]
    return {"blocks": pairs(codes, 0), "scales": (exponents + 127).to(torch.uint8)}, exact.flatten(-2)


def pack_nvfp4(weight: Tensor) -> Packed:
    groups, divisor = weight.view(len(weight), -1, 16), 448 * 6 / weight.abs().max()
    scales = (groups.abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn)
    wide = scales.float()[:, :, None] / divisor
    codes = nearest(groups / wide, E2M1)
    stored = {"weight_packed": pairs(codes.flatten(1), 0), "weight_scale": scales, "weight_global_scale": divisor.view(1)}
    return stored | {"input_global_scale": torch.ones(1)}, (E2M1[codes] * wide).flatten(1)


@dataclass(frozen=True)
class Blocks:
    """4 bits of bitsandbytes."""

    kind: str = "nf4"
    size: int = 64
    is_nested: bool = False

    def __call__(self, weight: Tensor) -> Packed:
        table = NF4 if self.kind == "nf4" else torch.tensor([0, 0.005, 0.67, 1, 0.33, 0.5, 0.17, 0.25]).repeat(2)
        table = table if self.kind == "nf4" else table * torch.tensor([1.0] * 8 + [-1.0] * 8)
        flat = weight.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % self.size)).view(-1, self.size)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": self.kind,
            "blocksize": self.size,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        found = {"weight.quant_map": table.clone()}
        if self.is_nested:
            offset, steps = float(absmax.mean()), torch.linspace(-1, 1, 256)
            parts = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            outer = parts.abs().amax(1)
            codes = nearest(parts / outer[:, None], steps).flatten()[: len(absmax)]
            absmax = steps[codes] * outer.repeat_interleave(256)[: len(absmax)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            found |= {"weight.nested_absmax": outer, "weight.nested_quant_map": steps, "weight.absmax": codes.to(torch.uint8)}
        else:
            found["weight.absmax"] = absmax
        values = nearest(blocks / absmax[:, None], table)
        exact = (table[values] * absmax[:, None]).flatten()[: len(flat)].view(weight.shape)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        packed = pairs(values.flatten()[: len(flat)], 4).view(-1, 1)
        return found | {"weight": packed, f"weight.quant_state.bitsandbytes__{self.kind}": text}, exact


def pack_int8(weight: Tensor) -> Packed:
    most = weight.abs().amax(1)
    codes, form = (weight * 127 / most[:, None]).round(), torch.tensor(0, dtype=torch.uint8)
    return {"weight": codes.to(torch.int8), "SCB": most, "weight_format": form}, codes * most[:, None] / 127


def bits4(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_storage": "uint8",
        **more,
    }


NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "dynamic": "local",
                "group_size": 16,
            },
        }
    },
}
KINDS: Mapping[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "nvfp4": (NVFP4, pack_nvfp4),
    "nf4": (bits4(bnb_4bit_quant_type="nf4"), Blocks()),
    "nf4 nested": (bits4(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True), Blocks(is_nested=True)),
    "nf4 across rows": (bits4(bnb_4bit_quant_type="nf4"), Blocks(size=128)),
    "bnb fp4": (bits4(bnb_4bit_quant_type="fp4"), Blocks("fp4")),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, pack_int8),
}
"""`quantization_config`, and the packer of a linear."""
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}


def save_tables(source: Path, folder: Path, exact: Path, config: dict[str, Any], pack: Callable[[Tensor], Packed]) -> None:
    """Writes `source` packed to `folder`, and dequantised in fp32 to `exact`. Embedding, head and routers stay as they are."""
    for target in (folder, exact):
        shutil.copytree(source, target)
    stored, dequantised = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_expert = config is MXFP4 and re.search(r"experts\.\w+_proj$", name)
        if not is_expert and (config is MXFP4 or not re.search(r"(proj|w[123])\.weight$", name)):
            stored[name] = dequantised[name] = tensor
        elif is_expert:
            parts, wide = pack(tensor.mT.float())
            stored |= {f"{name}_{suffix}": part.contiguous() for suffix, part in parts.items()}
            dequantised[name] = wide.mT.contiguous()
        else:
            parts, dequantised[name] = pack(tensor.float())
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    save_file(dequantised, exact / "model.safetensors", {"format": "pt"})
    config = {**json.loads((source / "config.json").read_text()), "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(config))
