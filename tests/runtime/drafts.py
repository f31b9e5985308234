"""Drafts with a partial acceptance rate: the target's weights with noise, and exits of a model with weak late layers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.model.decoder.exit import Exit, ExitCard, write_exit
from tests.runtime.tiny import save_tiny


def save_target(folder: Path, **changes: Any) -> Path:
    """Saves a tiny model with weak late layers, so that its first layers predict its output."""
    save_tiny(folder, **{"num_hidden_layers": 4, **changes})
    _change(folder, lambda name, tensor: tensor * 0.15 if _is_late(name) else tensor)
    return folder


def save_draft(target: Path, folder: Path, noise: float = 0.03) -> Path:
    """Saves the target with noise in every matrix."""
    folder.mkdir(parents=True)
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    rng = torch.Generator().manual_seed(9)

    def noisy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        moved = torch.randn(tensor.shape, generator=rng) * tensor.std() * noise
        return tensor + moved if tensor.ndim > 1 else tensor

    _change(folder, noisy)
    return folder


def save_exit(target: Path, file: Path, num_layers: int = 2, width: int = 64, noise: float = 0.005) -> Path:
    """Saves an exit of the target that is nearly the identity."""
    rng = torch.Generator().manual_seed(4)
    card = ExitCard(
        model_hash=weights_hash(target), num_layers=num_layers, ratio=0.5, num_tokens=1, agreement_raw=0.0, agreement_fitted=0.0
    )
    weight = torch.eye(width) + noise * torch.randn((width, width), generator=rng)
    write_exit(file, Exit(card, weight, torch.zeros(width)))
    return file


def _is_late(name: str) -> bool:
    """Returns whether a weight writes to the hidden states after the second layer."""
    late = any(name.startswith(f"model.layers.{layer}.") for layer in range(2, 8))
    return late and (name.endswith("o_proj.weight") or name.endswith("down_proj.weight"))


def _change(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file({name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def change_token(folder: Path) -> Path:
    """Changes one token of a model's tokenizer."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<unused300>", "<hello>"))
    return folder
