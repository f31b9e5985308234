"""The file of a calibration: how the keys and values of each layer of a model are rounded.

Stored as safetensors: `Feedback` of keys and of values with a first dimension of layers (`keys.shift` and so on), and a
`CalibrationCard` as metadata. Equal calibrations have equal bytes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.feedback import Feedback, KvRounding

FORMAT = "phalanx kv calibration 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCard:
    """Metadata of a calibration."""

    model_hash: str
    num_tokens: int
    """Tokens that it was fitted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The layers and KV heads of a rank, and those of the whole model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    layers: range
    kv_heads: range


def calibration_hash(path: Path) -> str:
    """Returns 16 hex digits of the file's content. Raises ModelError."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ModelError(f"calibration {path} cannot be read: {error.strerror or error}") from error


def write_calibration(path: Path, card: CalibrationCard, layers: Sequence[KvRounding]) -> None:
    """Writes the file atomically. Raises ModelError."""
    metadata = {FORMAT: msgspec.json.encode(card).decode()}  # one entry: several have no fixed order
    tensors = {
        f"{part}.{field.name}": torch.stack([getattr(getattr(layer, part), field.name) for layer in layers]).cpu()
        for part in ("keys", "values")
        for field in fields(Feedback)
    }
    partial = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, partial, metadata)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {path}: {error}") from error


def read_calibration(path: Path, part: ModelPart) -> tuple[CalibrationCard, list[KvRounding]]:
    """Returns the card and what rounds the layers and heads of a rank. Raises ModelError."""
    try:
        with safe_open(path, framework="pt") as file:
            card = _read_card(path, file.metadata() or {})
            keys, values = ([_read(path, file, name, part=part) for name in _names(kind)] for kind in ("keys", "values"))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"calibration {path} cannot be read: {error}") from error
    return card, [
        KvRounding(*(Feedback(*(tensor[layer].contiguous() for tensor in tensors)) for tensors in (keys, values)))
        for layer in range(len(part.layers))
    ]


def _names(kind: str) -> list[str]:
    return [f"{kind}.{field.name}" for field in fields(Feedback)]


def _read(path: Path, file: safe_open, name: str, *, part: ModelPart) -> Tensor:
    """Returns the rank's slice of a tensor."""
    expected = [part.num_layers, part.num_kv_heads, part.head_dim] + [part.head_dim] * name.endswith("triangle")
    stored: Any = file.get_slice(name)  # type: ignore[no-untyped-call]
    if stored.get_shape() != expected:
        raise ModelError(
            f"calibration {path} was made for another model: its {name} is {stored.get_shape()}, expected {expected}"
        )
    kind = torch.int64 if name.endswith("order") else torch.float32
    tensor: Tensor = stored[part.layers.start : part.layers.stop, part.kv_heads.start : part.kv_heads.stop]
    if kind == torch.int64 and not torch.equal(tensor.sort(-1).values, torch.arange(part.head_dim).expand_as(tensor)):
        raise ModelError(f"calibration {path} is malformed: its {name} is no order of {part.head_dim} dimensions")
    return tensor.to(kind)


def _read_card(path: Path, metadata: dict[str, str]) -> CalibrationCard:
    if FORMAT not in metadata:
        raise ModelError(f"{path} is not a calibration: make one with phalanx-runtime calibrate-kv")
    try:
        return msgspec.json.decode(metadata[FORMAT], type=CalibrationCard)
    except msgspec.DecodeError as error:
        raise ModelError(f"calibration {path} has malformed metadata: {error}") from error
