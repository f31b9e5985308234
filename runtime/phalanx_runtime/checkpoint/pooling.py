"""How a checkpoint makes embeddings: the pooling and normalisation that sentence-transformers stores next to a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from phalanx_api import wire
from phalanx_api.engine_config import EngineConfig, PoolingSetting
from phalanx_runtime.checkpoint.encoders import read_classification
from phalanx_runtime.errors import ModelError

_MODES: Mapping[str, wire.Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "cls": "cls",
}
"""Our name of each mode of `1_Pooling/config.json`: a true field, or the value of `pooling_mode`."""
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


_CLASSIFIER = "it is a classifier; use /v1/classify, or /v1/score and /v1/rerank with one label"


def read_outputs(
    folder: Path, served: wire.Served, engine: EngineConfig
) -> tuple[wire.Embedding | None, wire.Classification | None]:
    """Returns how the model of `folder` makes embeddings, if it gives vectors, and classes, if it has a head for them.

    Raises ModelError for broken files.
    """
    size = served.embedding_size
    if not size:
        return None, None
    classification = read_classification(folder, size)
    embedding = read_embedding(folder, size, engine.pooling, classification, is_encoder=served.is_encoder)
    return msgspec.structs.replace(embedding, reranker=engine.reranker), classification


def read_embedding(
    folder: Path,
    size: int,
    setting: PoolingSetting,
    classification: wire.Classification | None = None,
    *,
    is_encoder: bool = False,
) -> wire.Embedding:
    """Returns how the model of `folder` makes embeddings of length `size`. One with a classification head makes none.

    Without `modules.json` of sentence-transformers vectors are normalised, and `setting` auto is the mean. An unsupported module
    or mode is an obstacle; a `setting` other than auto takes the place of the mode. Raises ModelError for broken files.
    """
    if classification is not None:
        return wire.Embedding(size=size, pooling="last", obstacle=_CLASSIFIER, is_encoder=is_encoder)
    modules = _read(folder / "modules.json", list)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules or () if isinstance(module, dict)]
    unknown = [kind for kind in kinds if kind not in _KNOWN_MODULES]
    is_normalised = "Normalize" in kinds if modules is not None else True
    obstacle = f"its module {unknown[0]} (modules.json) is not supported" if unknown else ""
    pooling: wire.Pooling = "mean"
    if setting != "auto":
        pooling = setting
    elif (config := _read(folder / _pooling_folder(modules) / "config.json", dict)) is not None:
        modes = _enabled_modes(config)
        if len(modes) == 1 and modes[0] in _MODES:
            pooling = _MODES[modes[0]]
        else:
            obstacle = obstacle or f"its pooling mode {' with '.join(modes) or 'none'} is not supported: set pooling"
    encodable = obstacle.encode(errors="backslashreplace").decode()  # JSON may have half of a surrogate pair
    return wire.Embedding(size=size, pooling=pooling, is_normalised=is_normalised, obstacle=encodable, is_encoder=is_encoder)


def _pooling_folder(modules: list[Any] | None) -> str:
    for module in modules or ():
        if isinstance(module, dict) and str(module.get("type", "")).endswith(".Pooling"):
            name = str(module.get("path", ""))
            return name if Path(name).name == name else "1_Pooling"
    return "1_Pooling"


def _enabled_modes(config: dict[str, Any]) -> list[str]:
    if isinstance(config.get("pooling_mode"), str):
        return [str(config["pooling_mode"])]
    return [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]


def _read(path: Path, kind: type) -> Any:
    """Returns the JSON document, if the file exists. Raises ModelError."""
    try:
        if not path.is_file():
            return None
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(document, kind):
        raise ModelError(f"{path} is not the {'list' if kind is list else 'object'} that sentence-transformers writes")
    return document
