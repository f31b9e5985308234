"""Reads the description of a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.

    y = W x + scale * B (A x)        scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

What the runtime does not compute is refused by the name of its field, before any weight is read.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.errors import ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
LINEARS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules that an adapter may change."""
JOINED: Mapping[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules of families that store several linears as one, and these linears."""
EXPERT_LINEARS: Mapping[str, str] = {
    **{name: name for name in LINEARS[4:]},
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
"""Linears of an expert, by their names in any family."""
EXPERT_PARAMETERS: tuple[str, ...] = ("gate_up_proj", "down_proj")
"""Parameters with a matrix of each expert, as transformers 5 stores them."""
_REFUSED: Mapping[str, str] = {
    "modules_to_save": "whole modules that replace those of the base model",
    "use_dora": "DoRA",
    "lora_bias": "biases of the factors",
    "rank_pattern": "ranks by module",
    "alpha_pattern": "alphas by module",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained embeddings of tokens",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
}
"""Fields that must be absent or empty, and what they ask for."""
_STARTS = ("gaussian", "eva", "orthogonal")
"""Named initialisations that leave the base model unchanged. Others, as pissa, olora, corda, loftq and lora_ga, change it."""
_PIECE_BYTES = 1 << 20
MAX_NAME = 200
"""Characters of the base model's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """An adapter, as described."""

    rank: int
    scale: float
    base_model: str
    """The base model's name at training, possibly empty."""


def read_adapter_config(folder: Path, max_rank: int) -> AdapterConfig:
    """Returns the description of the adapter in a folder. Raises ModelError with the reason if it is not supported."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"{path} does not exist: expected an adapter folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    raw = read_json(path)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type {kind!r:.80} is not supported: expected LORA")
    _check_fields(path, raw)
    _check_targets(path, raw.get("target_modules"))
    _check_parameters(path, raw.get("target_parameters"))
    rank, alpha = _number(path, raw, "r"), _number(path, raw, "lora_alpha")
    if rank != int(rank) or rank < 1:
        raise ModelError(f"{path}: r {rank:g} must be a whole number of at least 1")
    if rank > max_rank:
        raise ModelError(f"{path}: r {int(rank)} exceeds --max-lora-rank {max_rank}")
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"{folder / WEIGHTS_FILE} does not exist: other formats of weights are not supported")
    scale = alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
    return AdapterConfig(rank=int(rank), scale=scale, base_model=_name(raw.get("base_model_name_or_path")))


def _name(value: object) -> str:
    """Returns the start of a name, as text that can be sent: JSON may have half of a surrogate pair."""
    return value[:MAX_NAME].encode(errors="backslashreplace").decode() if isinstance(value, str) else ""


def adapter_hash(folder: Path) -> str:
    """Returns the SHA-256 in hex of both files. Reads them whole. Raises ModelError."""
    hasher = hashlib.sha256()
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            hasher.update(f"{name} {(folder / name).stat().st_size} ".encode())
            with open(folder / name, "rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    hasher.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
    return hasher.hexdigest()


def _check_fields(path: Path, raw: Mapping[str, Any]) -> None:
    for field, meaning in _REFUSED.items():
        if raw.get(field):
            raise ModelError(f"{path}: {field} is not supported: {meaning}")
    if raw.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias {raw['bias']!r:.80} is not supported: expected none")
    start = raw.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or (isinstance(start, str) and start.lower() in _STARTS)):
        raise ModelError(
            f"{path}: init_lora_weights {start!r:.80} is not supported: it may belong to a changed base model; save it "
            f"converted to LoRA, or use true, false, {', '.join(_STARTS[:-1])} or {_STARTS[-1]}"
        )


def _check_targets(path: Path, targets: object) -> None:
    """Refuses modules by name. A pattern names none: then the tensors decide."""
    for target in targets if isinstance(targets, list) else []:
        name = str(target).rsplit(".", 1)[-1]
        if name not in LINEARS and name not in JOINED and name not in EXPERT_LINEARS:
            raise ModelError(
                f"{path}: target_modules {target!r:.80} is not supported: use some of {', '.join((*LINEARS, *JOINED))}"
            )


def _check_parameters(path: Path, targets: object) -> None:
    """Refuses parameters that are no matrices of experts by name. The tensors decide which layers have them."""
    for target in targets if isinstance(targets, list) else [targets] if targets else []:
        if str(target).rsplit(".", 1)[-1] not in EXPERT_PARAMETERS:
            known = ", ".join(EXPERT_PARAMETERS)
            raise ModelError(f"{path}: target_parameters {target!r:.80} is not supported: use some of {known} of experts")


def _number(path: Path, raw: Mapping[str, Any], field: str) -> float:
    value = raw.get(field)
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"{path}: {field} {value!r:.80} must be a number")
    return number
