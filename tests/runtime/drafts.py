"""Drafts that are right sometimes: the target's own weights with noise, and exits of models whose last layers change little."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.model.decoder.exit import Exit, ExitCard, write_exit
from tests.runtime.tiny import save_tiny


def save_target(folder: Path, **changes: Any) -> Path:
    """A tiny model whose later layers change little, so that its first ones tell what it will say."""
    save_tiny(folder, **{"num_hidden_layers": 4, **changes})
    _change(folder, lambda name, tensor: tensor * 0.15 if _is_late(name) else tensor)
    return folder


def save_draft(target: Path, folder: Path, noise: float = 0.03) -> Path:
    """The target with noise in every matrix: it agrees in many places, and not in all."""
    folder.mkdir(parents=True)
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    chance = torch.Generator().manual_seed(9)

    def noisy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        moved = torch.randn(tensor.shape, generator=chance) * tensor.std() * noise
        return tensor + moved if tensor.ndim > 1 else tensor

    _change(folder, noisy)
    return folder


def save_exit(target: Path, file: Path, num_layers: int = 2, width: int = 64, noise: float = 0.005) -> Path:
    """An exit of the target that maps a state nearly to itself."""
    chance = torch.Generator().manual_seed(4)
    card = ExitCard(
        model_hash=weights_hash(target), num_layers=num_layers, ratio=0.5, num_tokens=1, agreement_raw=0.0, agreement_fitted=0.0
    )
    weight = torch.eye(width) + noise * torch.randn((width, width), generator=chance)
    write_exit(file, Exit(card, weight, torch.zeros(width)))
    return file


def _is_late(name: str) -> bool:
    """Whether a weight writes into the stream of hidden states behind the second layer."""
    late = any(name.startswith(f"model.layers.{layer}.") for layer in range(2, 8))
    return late and (name.endswith("o_proj.weight") or name.endswith("down_proj.weight"))


def _change(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file({name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
