"""The architectures of the fused decoder, as data: how each departs from Llama."""

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Biases = Literal["asked", "always"]
Norms = Literal["before", "after", "around"]
HeadNorms = Literal["none", "head", "whole"]
Slides = Literal["never", "always", "by layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What config.json does not state. Fields from `tied` on are defaults of config.json fields."""

    qkv_bias: Biases = "asked"
    # Where each half of a block is normalised.
    norms: Norms = "before"
    # Queries and keys are normalised per head, or over the whole projection.
    qk_norm: HeadNorms = "none"
    # The layers that `sliding_window` applies to.
    slides: Slides = "never"
    # The checkpoint stores norm weights minus 1.
    norm_offset: bool = False
    # Embeddings are multiplied by sqrt(hidden_size).
    embedding_scaled: bool = False
    # The checkpoint stores q, k, v as one matrix, and gate and up as another.
    joined: bool = False
    # Attention scores are divided by sqrt(query_pre_attn_scalar).
    query_scaled: bool = False
    # Every `nope_interval`-th layer has no rotary embedding.
    nope_interval: int | None = None
    tied: bool = False
    activation: str = "silu"
    theta: float = 10000.0
    local_theta: float | None = None
    full_every: int | None = None
    softcap: float | None = None
    logit_softcap: float | None = None


_GEMMA = Family(norm_offset=True, embedding_scaled=True, tied=True, activation="gelu_pytorch_tanh")
_GEMMA2 = replace(_GEMMA, norms="around", slides="by layer", query_scaled=True)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(slides="always"),
    "Qwen2ForCausalLM": Family(qkv_bias="always", slides="by layer"),
    "Qwen3ForCausalLM": Family(qk_norm="head", slides="by layer"),
    "Phi3ForCausalLM": Family(slides="always", joined=True),
    "SmolLM3ForCausalLM": Family(slides="by layer", nope_interval=4, tied=True, theta=2000000.0),
    "Olmo2ForCausalLM": Family(norms="after", qk_norm="whole"),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": replace(_GEMMA2, full_every=2, softcap=50.0, logit_softcap=30.0),
    "Gemma3ForCausalLM": replace(_GEMMA2, qk_norm="head", full_every=6, theta=1000000.0, local_theta=10000.0),
}
"""By the name in config.json. SmolLM and SmolLM2 use LlamaForCausalLM, Qwen2.5 uses Qwen2ForCausalLM."""
