"""A tiny random model of any causal class of `transformers`."""

import dataclasses
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "input_embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "num_decoder_ffn_dim", "dim_ff", "d_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank", "dim_head"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_shared_experts"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    "time_step_min": 1e-9,  # decodes of `transformers` do not apply it
    "sliding_window": 24,
    "index_topk": 8,
}
"""Minimal sizes of config fields. A window of 24 tokens and a choice of 8 keys affect prompts of 40."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 120,
    "indexer_compress_ratio": 8,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 100,
    "heads_per_ngram": 2,
    "split_ngram_parts": 4,
}
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR_FIRST,
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32},
    },
    "dots3_note": {
        "vision_config": {"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_output_size": 64},
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "granitemoehybrid": _LINEAR_FIRST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR_FIRST,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 16,
    },
    "qwen3_5": {"text_config": _LINEAR_FIRST},
    "qwen3_5_moe": {"text_config": _LINEAR_FIRST},
    "qwen3_next": _LINEAR_FIRST,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "zamba": {"layer_types": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48], "attention_head_size": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "moshi": {"audio_vocab_size": 64},
}
"""Additional or different fields by model_type."""


def save_model(folder: Path, model_type: str, **changes: Any) -> Path:
    """Writes a checkpoint with random weights and returns its folder. changes: config fields."""
    import torch
    import transformers

    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(make_config(model_type, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases are constant at first
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def make_config(model_type: str, **others: Any) -> Any:
    """Returns a tiny config with other fields."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[model_type]
    changes = {**tiny_fields(config_class), **CHANGES.get(model_type, {}), **others}
    for name, part in dict(getattr(config_class, "sub_configs", None) or {}).items():
        # Where any config class is possible, uses the default's.
        kind: Any = part if dataclasses.is_dataclass(part) else type(getattr(config_class(), name, None))
        if dataclasses.is_dataclass(kind) and hasattr(kind, "model_type"):
            changes[name] = {"model_type": kind.model_type, **tiny_fields(kind), **changes.get(name, {})}
    return transformers.AutoConfig.for_model(model_type, **changes)


def tiny_fields(config_class: Any) -> dict[str, Any]:
    """Returns the sizes that the config class has."""
    names = {field.name for field in dataclasses.fields(config_class)}
    fields = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # keys of each head come from one latent
        fields["num_key_value_heads"] = fields.get("num_attention_heads", 4)
        fields["head_dim"] = fields.get("qk_rope_head_dim", 16)
    return fields
