"""Architectures of the fused decoder as differences from Llama."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "swigluoai"]
"""swigluoai: of gpt-oss, with limits on gate and up."""
Biases = Literal["config", "always"]
Norms = Literal["before", "after", "around"]
HeadNorms = Literal["none", "head", "whole"]
Slides = Literal["never", "always", "if used", "by layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """Names of the tensors of a layer with experts, below the layer's name; transformers 5 also stores all experts as one."""

    block: str
    """Module of router and experts."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_interleaved: bool = False
    """All experts are one tensor, [experts, in, out], gate and up columns alternate; GGUF files have tensors of each."""
    has_bias: bool = False
    """Experts and router have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties that config.json omits; fields from `defaults` on are its defaults, as in `transformers`."""

    qkv_bias: Biases = "config"
    norms: Norms = "before"
    """Position of the norm in each half of a layer."""
    qk_norm: HeadNorms = "none"
    """Query and key norm: per head, or over the whole projection."""
    slides: Slides = "never"
    """Layers with sliding window."""
    norm_offset: bool = False
    """Stored norm weights are reduced by 1."""
    embedding_scaled: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    joined: bool = False
    """Checkpoints store q, k, v as one matrix, gate and up as another."""
    query_scaled: bool = False
    """Attention logits are divided by sqrt(query_pre_attn_scalar)."""
    experts: ExpertTensors | None = None
    """Layers have experts instead of an MLP, as config.json says."""
    nope_interval: int | None = None
    """Every nth layer has no rotary embedding."""
    has_sinks: bool = False
    """Each attention head has a sink: see `AttentionParams`."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of absent fields, but not of null ones. Sizes of the model have none."""
    activation: str = "silu"
    theta: float = 10000.0
    local_theta: float | None = None
    full_every: int | None = None


_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_GEMMA = Family(
    norm_offset=True,
    embedding_scaled=True,
    activation="gelu_pytorch_tanh",
    defaults={"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192},
)
_GEMMA2 = replace(
    _GEMMA,
    norms="around",
    slides="by layer",
    query_scaled=True,
    defaults={**_GEMMA.defaults, "num_key_value_heads": 4, "sliding_window": 4096},
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(slides="always", defaults={**_MISTRAL, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(qkv_bias="always", slides="by layer", defaults=_QWEN),
    "Qwen3ForCausalLM": Family(qk_norm="head", slides="by layer", defaults={**_QWEN, "head_dim": 128}),
    "MixtralForCausalLM": Family(
        slides="always",
        experts=ExpertTensors(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        defaults={**_MISTRAL, "rms_norm_eps": 1e-5},
        theta=1000000.0,
    ),
    "GptOssForCausalLM": Family(
        slides="by layer",
        full_every=2,
        has_sinks=True,
        experts=ExpertTensors(block="mlp", router="router", is_interleaved=True, has_bias=True),
        defaults={**_MISTRAL, "rms_norm_eps": 1e-5, "head_dim": 64, "attention_bias": True, "sliding_window": 128},
        activation="swigluoai",
        theta=150000.0,
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="head",
        slides="if used",
        experts=ExpertTensors(block="mlp"),
        defaults={**_QWEN, "num_key_value_heads": 4, "moe_intermediate_size": 768},
    ),
    "Phi3ForCausalLM": Family(slides="always", joined=True, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
    "SmolLM3ForCausalLM": Family(
        slides="by layer",
        nope_interval=4,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
        theta=2000000.0,
    ),
    "Olmo2ForCausalLM": Family(norms="after", qk_norm="whole", defaults={"rms_norm_eps": 1e-5}),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": replace(
        _GEMMA2,
        full_every=2,
        defaults={**_GEMMA2.defaults, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        qk_norm="head",
        full_every=6,
        defaults={**_GEMMA2.defaults, "max_position_embeddings": 131072},
        theta=1000000.0,
        local_theta=10000.0,
    ),
}
"""By name in config.json."""

CLASSIFIERS: dict[str, str] = {
    name.replace("Gemma3For", "Gemma3TextFor").replace("ForCausalLM", "ForSequenceClassification"): name for name in FAMILIES
}
"""The family of each architecture with a classification head in place of the language model's."""
