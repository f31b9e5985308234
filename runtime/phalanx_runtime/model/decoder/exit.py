"""Exit of a self-draft: an affine map from the hidden state after the first layers to the one before the final norm.

Stored as safetensors: `weight` [hidden, hidden] and `bias` [hidden] in float32, and an `ExitCard` as metadata.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx_runtime.errors import ModelError

FORMAT = "phalanx exit 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCard:
    """Metadata of an exit."""

    model_hash: str
    num_layers: int
    ratio: float
    num_tokens: int
    agreement_raw: float
    """Fraction of held-out tokens with the model's argmax, without the map."""
    agreement_fitted: float
    """Agreement with the fitted map."""


@dataclass(frozen=True, slots=True)
class Exit:
    """y = x weight^T + bias."""

    card: ExitCard
    weight: Tensor
    bias: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """Maps [n, hidden]."""
        return torch.addmm(self.bias, states, self.weight.t())


def exit_layers(ratio: float, num_layers: int) -> int:
    """Returns the number of draft layers: at least one, never all."""
    return min(max(1, round(ratio * num_layers)), max(1, num_layers - 1))


def write_exit(path: Path, fitted: Exit) -> None:
    """Writes the file atomically. Raises ModelError."""
    metadata = {"format": FORMAT} | {name: str(value) for name, value in asdict(fitted.card).items()}
    part = path.with_name(f"{path.name}.part")
    try:
        save_file({"weight": fitted.weight.float().contiguous(), "bias": fitted.bias.float()}, part, metadata)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {path}: {error}") from error


def read_exit(path: Path, dtype: torch.dtype, device: torch.device) -> Exit:
    """Reads an exit. Raises ModelError."""
    try:
        with safe_open(path, framework="pt") as file:
            card = _read_card(path, file.metadata() or {})
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"exit {path} cannot be read: {error}") from error
    if tuple(weight.shape) != (bias.shape[0], bias.shape[0]):
        raise ModelError(f"exit {path} is malformed: its weight is {list(weight.shape)}, its bias {list(bias.shape)}")
    return Exit(card, weight.to(device, dtype), bias.to(device, dtype))


def _read_card(path: Path, metadata: dict[str, str]) -> ExitCard:
    if metadata.get("format") != FORMAT:
        raise ModelError(f"{path} is not an exit: make one with phalanx-runtime fit-exit")
    try:
        return ExitCard(
            model_hash=metadata["model_hash"],
            num_layers=int(metadata["num_layers"]),
            ratio=float(metadata["ratio"]),
            num_tokens=int(metadata["num_tokens"]),
            agreement_raw=float(metadata["agreement_raw"]),
            agreement_fitted=float(metadata["agreement_fitted"]),
        )
    except (KeyError, ValueError) as error:
        raise ModelError(f"exit {path} has malformed metadata: {error!r}") from error
