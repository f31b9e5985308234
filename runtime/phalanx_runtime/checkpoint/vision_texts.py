"""The text part of models that read images, as the config.json of a causal language model."""

from collections.abc import Mapping
from typing import Any

from phalanx_runtime.checkpoint.quantization import NAMES
from phalanx_runtime.errors import Unsupported

Json = dict[str, Any]
TEXT_MODULES = ("language_model.", "text_model.")
"""Modules of the text in a model of `transformers`."""
TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""Stored prefixes of the text's tensors, and those of a causal language model."""
_QWEN: Json = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
_QWEN2: Json = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
}
_DEFAULTS: dict[str, tuple[str, Json]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen3": ("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN2),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN2),
    "qwen3_vl_text": (
        "Qwen3ForCausalLM",
        {**_QWEN, "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 500000.0},
    ),
    "qwen3_vl_moe_text": (
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 151936,
            "max_position_embeddings": 128000,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "rope_theta": 500000.0,
        },
    ),
}
"""By `model_type`: the architecture, and fields that published models leave out."""
_SECTIONS: dict[str, Json] = {
    "qwen2_vl_text": {"mrope_section": [16, 24, 24]},
    "qwen2_5_vl_text": {"mrope_section": [16, 24, 24]},
    "qwen3_vl_text": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "qwen3_vl_moe_text": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
"""By `model_type`: what rotary parameters with three positions say if they leave it out."""
_FIXED: dict[str, Json] = {"qwen3_vl_moe_text": {"norm_topk_prob": True, "sliding_window": None}}
"""By `model_type`: what models have, whatever their config.json says."""


def text_of(raw: Mapping[str, Any], kind: str, *, has_own_ties: bool, is_tied: bool) -> Mapping[str, Any]:
    """Returns the config.json of the text. Raises Unsupported for one of another kind.

    `kind`: its `model_type` if config.json has none. `has_own_ties`: the text's config may also say that its embedding is the
    head. `is_tied`: it is by default.
    """
    text = raw.get("text_config")
    if text is None and (published := raw.get("model_type")) in ("qwen2_vl", "qwen2_5_vl"):  # as published: one object for both
        text = {**raw, "model_type": f"{published}_text"}
    if not isinstance(text, dict):
        raise Unsupported("text_config of config.json is missing")
    found = text.get("model_type", kind)
    if not isinstance(found, str) or found not in _DEFAULTS:
        raise Unsupported(
            f"config.json: a text of model_type {found!r:.80} beside images is not supported: use one of {', '.join(_DEFAULTS)}"
        )
    kind = found
    name, defaults = _DEFAULTS[kind]
    tied = raw.get("tie_word_embeddings", is_tied)
    if has_own_ties:
        tied = tied or text.get("tie_word_embeddings", False)
    shared = {key: raw[key] for key in ("dtype", "torch_dtype", *NAMES) if key in raw}
    given = {key: value for key, value in text.items() if value is not None or key == "sliding_window"}  # null: it has none
    if kind in _SECTIONS:
        parameters = given.get("rope_parameters") or {}
        given["rope_parameters"] = {**_SECTIONS[kind], **parameters} if isinstance(parameters, dict) else parameters
    fixed = _FIXED.get(kind, {})
    return {**defaults, **given, **shared, **fixed, "architectures": [name], "tie_word_embeddings": tied}
