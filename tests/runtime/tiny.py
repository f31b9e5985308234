"""Tiny random checkpoints of the supported families, with a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any, Literal, get_args

import torch

Family = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "smollm3",
    "olmo2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
Mixture = Literal["qwen2_moe", "olmoe"]
MIXTURES: tuple[Mixture, ...] = get_args(Mixture)
LATENTS = "deepseek_v2", "deepseek_v3"
"""Families whose keys and values come from one latent per token."""
VOCAB_SIZE = 320
EOS_ID = 257
WINDOW = 24
"""Sliding window of the tiny models that have one, in tokens."""
LATENT_DIM = 24 + 8
"""Of a page's key in the families of `LATENTS`: the latent and the rotated dimensions."""
INDEXED = "glm_moe_dsa"
"""A family whose pages have latents and index keys, in two of three layers: the third uses the keys that the second chooses."""
INDEX_DIM = 16
"""Of an index key of `INDEXED`."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v2": {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
    "glm_moe_dsa": {
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 16,
        "index_head_dim": INDEX_DIM,
        "index_n_heads": 3,  # few, so that keys have equal scores
        "index_topk_pattern": "FFS",
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""Config that shows the features of a family in few tokens and layers."""

_SPECIAL = {256: "<s>", 257: "</s>", 258: "<|user|>", 259: "<|assistant|>"}
_CHAT = (
    "{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint of this family and returns its folder. changes: config fields."""
    return _save(folder, family, seed, changes, "CausalLM")


def save_classifier(folder: Path, family: str, num_labels: int, **changes: Any) -> Path:
    """Writes a checkpoint with a classification head."""
    return _save(folder, family, 0, {**changes, "num_labels": num_labels}, "SequenceClassification")


def _save(folder: Path, family: str, seed: int, changes: dict[str, Any], task: str) -> Path:
    import transformers

    config = _config(family, changes)
    torch.manual_seed(seed)
    auto: Any = getattr(transformers, f"AutoModelFor{task}")
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):  # norms and biases are initialised to constants
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _config(family: str, changes: dict[str, Any]) -> Any:
    """Returns a config of 4 query and 2 KV heads and 3 layers. Large weights make near-ties rare."""
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
    }
    return transformers.AutoConfig.for_model(family, **{**fields, **_OWN.get(family, {}), **changes})


def save_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer: ids 0 to 255 are bytes, then special tokens, then unused ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    vocabulary |= {name: token for token, name in _SPECIAL.items()}
    vocabulary |= {f"<unused{token}>": token for token in range(256 + len(_SPECIAL), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
        "chat_template": _CHAT,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": EOS_ID}))


def save_calibration(folder: Path, name: str = "pages.kv", **fields: Any) -> Path:
    """Calibrates the pages of a model on text of its own, and writes the file into its folder. Returns the folder."""
    from phalanx_runtime.commands import CalibrationSpec
    from phalanx_runtime.fitting.calibrate import calibrate
    from phalanx_runtime.model.attention.calibration import write_calibration

    spec = CalibrationSpec(**{"model_dir": str(folder), "out": "", "tokens": 200, "dtype": "float32", **fields})
    write_calibration(folder / name, *calibrate(spec, torch.device("cpu"), lambda: 0.0))
    return folder


def _byte_letters() -> list[str]:
    """Returns the printable character that byte-level tokenizers use for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return letters
