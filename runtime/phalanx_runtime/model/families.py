"""The architectures that the fused decoder computes, as data: how each departs from Llama."""

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Biases = Literal["asked", "always"]
Norms = Literal["before", "after", "around"]
HeadNorms = Literal["none", "head", "whole"]
Slides = Literal["never", "always", "by layer"]


@dataclass(frozen=True, slots=True)
class Family:
    """What config.json leaves to the architecture.

    norms: where each half of a block is normalised: before it, after it, or around it. qk_norm: queries and keys are
    normalised per head, or over the whole projection. slides: which layers `sliding_window` is for. norm_offset: weights of
    norms are stored less 1. embedding_scaled: embeddings are multiplied by sqrt(hidden_size). joined: the checkpoint holds
    q, k, v as one matrix, and gate and up as another. query_scaled: scores are divided by sqrt(query_pre_attn_scalar).
    nope_interval: each so-manieth layer has no rotary embedding. From `tied` on: what holds where config.json is silent.
    """

    qkv_bias: Biases = "asked"
    norms: Norms = "before"
    qk_norm: HeadNorms = "none"
    slides: Slides = "never"
    norm_offset: bool = False
    embedding_scaled: bool = False
    joined: bool = False
    query_scaled: bool = False
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
"""SmolLM and SmolLM2 say LlamaForCausalLM, Qwen2.5 says Qwen2ForCausalLM."""
