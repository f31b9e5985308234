"""Which checkpoints are encoders, and what their heads mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx_api import wire
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.encoders import MAX_LABELS, is_encoder, read_classification
from phalanx_runtime.checkpoint.pooling import read_embedding
from tests.runtime.pods import make_model

HEAD = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "max_position_embeddings": 64}


def save(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**HEAD, **fields}))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, True),
        ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]}, True),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, True),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, False),
        ({"model_type": "bert", "architectures": ["BertForQuestionAnswering"]}, False),
        ({"model_type": "qwen3", "architectures": ["Qwen3Model"]}, False),
        ({"model_type": "bert"}, False),
        ({"model_type": ["bert"], "architectures": 5}, False),
    ],
)
def test_encoders_are_known_by_architecture(config: dict[str, Any], expected: bool) -> None:
    assert is_encoder(config) is expected


@pytest.mark.parametrize(
    ("fields", "num_labels", "activation", "score"),
    [
        ({}, 1, "sigmoid", "sigmoid"),
        ({}, 3, "softmax", "sigmoid"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid", "sigmoid"),
        ({"problem_type": "regression"}, 1, "identity", "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, "sigmoid", "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 1, "sigmoid", "sigmoid"),
    ],
)
def test_activations_follow_the_config(
    tmp_path: Path, fields: dict[str, Any], num_labels: int, activation: str, score: str
) -> None:
    found = read_classification(save(tmp_path, **fields), num_labels)
    assert found is not None and (found.activation, found.score_activation, found.obstacle) == (activation, score, "")


def test_labels_without_a_name_have_that_of_transformers(tmp_path: Path) -> None:
    found = read_classification(save(tmp_path, id2label={"0": "bad", "2": "\ud800"}), 3)
    assert found is not None and found.labels == ["bad", "LABEL_1", "?"]


@pytest.mark.parametrize(
    ("fields", "num_labels", "reason"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.GELU"}, 1, "GELU"),
        ({}, MAX_LABELS + 1, "classes"),
    ],
)
def test_heads_that_cannot_be_used_have_a_reason(tmp_path: Path, fields: dict[str, Any], num_labels: int, reason: str) -> None:
    found = read_classification(save(tmp_path, **fields), num_labels)
    assert found is not None and reason in found.obstacle


def test_models_without_a_head_have_no_classes(tmp_path: Path) -> None:
    assert read_classification(save(tmp_path, architectures=["BertModel"]), 32) is None
    assert read_classification(save(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"]), 32) is None


def test_decoders_have_the_classes_of_their_head(tmp_path: Path) -> None:
    found = read_classification(save(tmp_path, model_type="qwen3", architectures=["Qwen3ForSequenceClassification"]), 2)
    assert found is not None and found.labels == ["LABEL_0", "LABEL_1"]


def test_classifiers_make_no_embeddings(tmp_path: Path) -> None:
    classes = wire.Classification(labels=["a"], activation="sigmoid")
    found = read_embedding(tmp_path, 1, "auto", classes, is_encoder=True)
    assert found.obstacle and found.is_encoder


def test_assets_have_the_classes(tmp_path: Path) -> None:
    classes = wire.Classification(labels=["a"], activation="sigmoid")
    assets = read_assets(make_model(tmp_path / "model"), ["m"], None, classification=classes)
    assert b'"labels":["a"]' in assets.files[wire.CLASSIFICATION_FILE]
