"""Which checkpoints are encoders, which have a classification head, and what its classes mean."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json

ENCODERS = (
    "albert",
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
)
"""`model_type`s of `transformers`."""
MAX_LABELS = 10_000
_CLASSIFIER = "ForSequenceClassification"
_DECODER = "LMHeadModel"
_TRAINED = ("Model", "ForMaskedLM", "ForPreTraining")
"""Architectures whose hidden states become embeddings."""
_ACTIVATIONS: Mapping[str, wire.Activation] = {"Identity": "identity", "Sigmoid": "sigmoid"}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json is that of an encoder, with a classification head or none."""
    name = _architecture(config)
    has_task = name.endswith((*_TRAINED, _CLASSIFIER)) and not name.endswith(_DECODER)
    return str(config.get("model_type")) in ENCODERS and has_task


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json is that of a model with a classification head, an encoder or a decoder."""
    return _architecture(config).endswith(_CLASSIFIER)


def read_classification(folder: Path, num_labels: int) -> wire.Classification | None:
    """Returns what the head's numbers mean, if the model of `folder` has a head.

    Scores have the activation that sentence-transformers stores, else the sigmoid. Raises ModelError for a broken file.
    """
    config = read_json(folder / "config.json")
    if not is_classifier(config):
        return None
    score, obstacle = _score_activation(config)
    return wire.Classification(
        labels=_labels(config, num_labels),
        activation=_activation(config, num_labels),
        score_activation=score,
        obstacle=obstacle or (f"it has {num_labels} classes, more than {MAX_LABELS}" if num_labels > MAX_LABELS else ""),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _labels(config: Mapping[str, Any], num_labels: int) -> list[str]:
    """Returns the names of config.json, else those that `transformers` gives."""
    named = config.get("id2label")
    names = named if isinstance(named, dict) else {}
    return [str(names.get(str(index), f"LABEL_{index}")).encode(errors="replace").decode() for index in range(num_labels)]


def _activation(config: Mapping[str, Any], num_labels: int) -> wire.Activation:
    match config.get("problem_type"):
        case "regression":
            return "identity"
        case "multi_label_classification":
            return "sigmoid"
        case _:
            return "softmax" if num_labels > 1 else "sigmoid"


def _score_activation(config: Mapping[str, Any]) -> tuple[wire.Activation, str]:
    """Returns the activation of scores, and why it is not supported, if so."""
    stored = config.get("sentence_transformers")
    name = stored.get("activation_fn") if isinstance(stored, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if not isinstance(name, str):
        return "sigmoid", ""
    kind = name.rpartition(".")[2]
    obstacle = "" if kind in _ACTIVATIONS else f"its activation {kind[:60]} is not supported"
    return _ACTIVATIONS.get(kind, "sigmoid"), obstacle.encode(errors="replace").decode()
