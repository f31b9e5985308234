"""Writes a compressed-tensors checkpoint: formats `pack-quantized` and `int-quantized`."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx_runtime.checkpoint.folder import INDEX, read_json, write_file
from phalanx_runtime.model.weights import Checkpoint
from phalanx_runtime.quantizing.layers import HEAD, StoredLinear
from phalanx_runtime.quantizing.rounding import Grid, Rounded

SHARD_BYTES = 4 << 30
"""Maximum size of a file, unless one tensor is larger."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", INDEX)


def stored_tensors(rounded: Rounded, grid: Grid, *, rounds_inputs: bool) -> dict[str, Tensor]:
    """Returns the tensors of a linear by suffix."""
    if _form(grid, rounds_inputs=rounds_inputs) == "int-quantized":
        return {"weight": rounded.codes, "weight_scale": rounded.scales}
    shape = torch.tensor(rounded.codes.shape)
    return {"weight_packed": _packed(rounded.codes, grid), "weight_scale": rounded.scales, "weight_shape": shape}


def _form(grid: Grid, *, rounds_inputs: bool) -> str:
    """Returns the format: codes of 8 bits are stored as numbers if inputs are rounded, others in words."""
    return "int-quantized" if rounds_inputs and grid.bits == 8 else "pack-quantized"


def _packed(codes: Tensor, grid: Grid) -> Tensor:
    """Returns int32 words along the inputs, the first one in the lowest bits."""
    per_word = 32 // grid.bits
    fields = torch.nn.functional.pad(codes.to(torch.int16) + grid.limit, (0, -codes.shape[1] % per_word))
    fields = fields.to(torch.uint8).view(len(codes), -1, per_word)
    if grid.bits == 4:
        fields = fields[:, :, ::2] | fields[:, :, 1::2] << 4
    return fields.contiguous().view(torch.int32)[:, :, 0]


def quantization_config(grid: Grid, ignored: Sequence[str], *, rounds_inputs: bool) -> dict[str, Any]:
    """Returns `quantization_config` of config.json. `ignored`: linears that stay as they are."""
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    weights = {"num_bits": grid.bits, "type": "int", "symmetric": True, "dynamic": False, "group_size": grid.group}
    group = {
        "targets": ["Linear"],
        "weights": weights | {"strategy": "channel" if grid.group is None else "group"},
        "input_activations": inputs if rounds_inputs else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _form(grid, rounds_inputs=rounds_inputs),
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {"group_0": group},
    }


def write_checkpoint(
    checkpoint: Checkpoint, source: Path, folder: Path, linears: Sequence[StoredLinear], grid: Grid, *, rounds_inputs: bool
) -> None:
    """Fills `folder` with the checkpoint `source`, its `linears` in codes, and all its other files; empties it first."""
    parts = {f"{linear.name}.weight": linear for linear in linears}
    has_head = f"{HEAD}.weight" in parts
    others = [name for name in checkpoint.names() if name.endswith(".weight") and name not in parts]
    # A tied head is not stored, but readers make it a linear all the same.
    ignored = [*([] if has_head else [HEAD]), *(name.removesuffix(".weight") for name in others if name.endswith("gate.weight"))]
    _empty(folder)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        names = list(checkpoint.names())
        for name in [*names, *(name for name in parts if name not in names)]:  # a tied head is stored nowhere
            if name not in parts:
                yield name, checkpoint.part(name, None).clone()
                continue
            found = stored_tensors(parts[name].rounded, grid, rounds_inputs=rounds_inputs)
            yield from ((f"{parts[name].name}.{suffix}", tensor.cpu().contiguous()) for suffix, tensor in found.items())

    _save(tensors(), folder)
    config = {
        **read_json(source / "config.json"),
        **({"tie_word_embeddings": False} if has_head else {}),
        "quantization_config": quantization_config(grid, ignored, rounds_inputs=rounds_inputs),
    }
    write_file(folder / "config.json", json.dumps(config, indent=2).encode())


def _empty(folder: Path) -> None:
    """Removes what a killed run has left."""
    shutil.rmtree(folder)
    folder.mkdir()


def _save(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Writes one file, or several with an index."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total, size = 0, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            shards.append(_save_shard(shard, folder, len(shards)))
            shard, size = {}, 0
        shard[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    shards.append(_save_shard(shard, folder, len(shards)))
    if len(shards) == 1:
        (folder / _shard_name(0)).rename(folder / "model.safetensors")
        return
    weight_map: Mapping[str, str] = {name: _shard_name(at) for at, names in enumerate(shards) for name in names}
    write_file(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}).encode())


def _save_shard(shard: dict[str, Tensor], folder: Path, number: int) -> list[str]:
    save_file(shard, folder / _shard_name(number), {"format": "pt"})
    return list(shard)


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05}.safetensors"
