"""Tiny random encoders, with the tokenizer of the other tiny models or one that writes pairs as BERT does."""

import json
from pathlib import Path
from typing import Any

import torch

from phalanx_runtime.checkpoint.encoders import ENCODERS
from tests.runtime.tiny import VOCAB_SIZE, save_tokenizer

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "camembert": {"type_vocab_size": 1, "pad_token_id": 1},
    "mpnet": {"pad_token_id": 1},
}
KINDS = ENCODERS


def encoder(kind: str, num_labels: int = 0, **changes: Any) -> Any:
    """Returns a model of `transformers`; without labels one whose hidden states become embeddings."""
    import transformers

    automatic: Any = transformers.AutoConfig
    labels = {"num_labels": num_labels} if num_labels else {}
    config = automatic.for_model(kind, **{**SMALL, **_OWN.get(kind, {}), **labels, **changes})
    torch.manual_seed(len(kind))
    auto: Any = transformers.AutoModelForSequenceClassification if num_labels else transformers.AutoModel
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)  # initial weights give almost equal states
    return model


def save_encoder(folder: Path, kind: str, num_labels: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint and returns its folder."""
    encoder(kind, num_labels, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = _PAIRS
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


_PAIRS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "pair": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
        {"SpecialToken": {"id": "</s>", "type_id": 1}},
    ],
    "special_tokens": {
        "<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]},
        "</s>": {"id": "</s>", "ids": [257], "tokens": ["</s>"]},
    },
}
"""As BERT's tokenizer."""
