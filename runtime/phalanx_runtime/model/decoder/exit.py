"""Fitted exit of a self-draft: the affine map from the hidden state after the first layers to the one before the final norm.

    state after n layers -> weight, bias -> final norm -> head -> draft logits

`phalanx-runtime fit-exit` writes it as safetensors: `weight` [hidden, hidden] and `bias` [hidden] in float32; the metadata has
the hash of its model and its agreement. Without an exit the state enters the final norm unchanged.
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
    """Metadata of an exit.

    `agreement_raw` and `agreement_fitted`: share of held-out tokens whose argmax from the first layers, without and with the map,
    equals the model's own.
    """

    model_hash: str
    num_layers: int
    ratio: float
    num_tokens: int
    agreement_raw: float
    agreement_fitted: float


@dataclass(frozen=True, slots=True)
class Exit:
    """The map y = x weight^T + bias."""

    card: ExitCard
    weight: Tensor
    bias: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """[n, hidden] from [n, hidden]."""
        return torch.addmm(self.bias, states, self.weight.t())


def exit_layers(ratio: float, num_layers: int) -> int:
    """Returns the number of layers in this share of the model: at least one, never all."""
    return min(max(1, round(ratio * num_layers)), max(1, num_layers - 1))


def write_exit(path: Path, made: Exit) -> None:
    """Writes the file atomically. Raises ModelError."""
    metadata = {"format": FORMAT} | {name: str(value) for name, value in asdict(made.card).items()}
    beside = path.with_name(f"{path.name}.part")
    try:
        save_file({"weight": made.weight.float().contiguous(), "bias": made.bias.float()}, beside, metadata)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {path}: {error}") from error


def read_exit(path: Path, dtype: torch.dtype, device: torch.device) -> Exit:
    """Returns the exit in a file. Raises ModelError when it is missing or malformed."""
    try:
        with safe_open(path, framework="pt") as file:
            card = _read_card(path, file.metadata() or {})
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"exit {path} cannot be read: {error}") from error
    if tuple(weight.shape) != (bias.shape[0], bias.shape[0]):
        raise ModelError(f"exit {path} is malformed: its weight is {list(weight.shape)}, its bias {list(bias.shape)}")
    return Exit(card, weight.to(device, dtype), bias.to(device, dtype))


def _read_card(path: Path, told: dict[str, str]) -> ExitCard:
    if told.get("format") != FORMAT:
        raise ModelError(f"{path} is not an exit: make one with phalanx-runtime fit-exit")
    try:
        return ExitCard(
            model_hash=told["model_hash"],
            num_layers=int(told["num_layers"]),
            ratio=float(told["ratio"]),
            num_tokens=int(told["num_tokens"]),
            agreement_raw=float(told["agreement_raw"]),
            agreement_fitted=float(told["agreement_fitted"]),
        )
    except (KeyError, ValueError) as error:
        raise ModelError(f"exit {path} has malformed metadata: {error!r}") from error
