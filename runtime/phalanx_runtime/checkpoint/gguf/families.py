"""Architectures of GGUF files that can be converted: their tensors and fields of config.json.

Source: the converter of llama.cpp, and its loader where a field is not stored. It joins the experts of a layer, adds 1 to the
norms of Gemma, interleaves query and key rows of Llama's kind, and separates gates from ups of gpt-oss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from phalanx_runtime.checkpoint.gguf.file import GgufFile
from phalanx_runtime.errors import ModelError

Fields = dict[str, object]
ROOTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Layer tensors, and the field with the number of their heads."""
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the model whose queries are scaled by hidden size / heads."""
_LOCAL_THETA = 10000.0


def _no_fields(file: GgufFile, config: Fields) -> Fields:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """How one architecture is stored."""

    architecture: str
    model_type: str
    parts: Mapping[str, str] = field(default_factory=lambda: _PARTS)
    """Layer tensors: names in the file and in the checkpoint."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Tensors that join all experts of a layer; `{}` is the number of an expert."""
    bare: Mapping[str, str] = field(default_factory=dict)
    """Layer tensors whose names in the checkpoint have no `.weight`."""
    joins_experts: bool = False
    """Model folders have gates and ups of all experts in one tensor, and all downs in another, with biases."""
    is_interleaved: bool = False
    has_norm_offset: bool = False
    fields: Callable[[GgufFile, Fields], Fields] = _no_fields
    """Further fields of config.json, from the file and the other fields."""


def family_of(file: GgufFile) -> GgufFamily:
    """Returns the family of a file. Raises ModelError for one that cannot be converted."""
    name = file.text("general.architecture")
    if name == "llama" and file.number("llama.expert_count"):
        return _MIXTRAL
    if name is None or name not in FAMILIES:
        raise ModelError(f"{file.path}: architecture {name!r} cannot be converted, only {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _experts(file: GgufFile, config: Fields, count: str) -> Fields:
    name = file.text("general.architecture")
    sizes = {count: f"{name}.expert_count", "num_experts_per_tok": f"{name}.expert_used_count"}
    return {key: file.size(stored) for key, stored in sizes.items()}


def _mixtral(file: GgufFile, config: Fields) -> Fields:
    return _experts(file, config, "num_local_experts")


def _qwen3_moe(file: GgufFile, config: Fields) -> Fields:
    size = file.size("qwen3moe.expert_feed_forward_length")
    return {**_experts(file, config, "num_experts"), "moe_intermediate_size": size, "norm_topk_prob": True}


def _gpt_oss(file: GgufFile, config: Fields) -> Fields:
    names = {"intermediate_size": "gpt-oss.expert_feed_forward_length", "sliding_window": "gpt-oss.attention.sliding_window"}
    sizes = {key: file.size(stored) for key, stored in names.items()}
    return {"attention_bias": True, **_experts(file, config, "num_local_experts"), **sizes}


def _phi3(file: GgufFile, config: Fields) -> Fields:
    key = "phi3.attention.sliding_window"
    return {"sliding_window": file.size(key) if file.number(key) else None}


def _olmo2(file: GgufFile, config: Fields) -> Fields:
    """Raises ModelError for OLMo 3, which llama.cpp stores as OLMo 2 with a window in some layers."""
    if "olmo2.attention.sliding_window" in file.metadata:
        raise ModelError(
            f"{file.path}: olmo2.attention.sliding_window: OLMo 3 cannot be converted; use the safetensors checkpoint"
        )
    return {}


def _gemma(file: GgufFile, config: Fields) -> Fields:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _sliding_gemma(file: GgufFile, config: Fields) -> Fields:
    name = str(file.text("general.architecture"))
    hidden, heads = int(str(config["hidden_size"])), int(str(config["num_attention_heads"]))
    is_largest = config["num_hidden_layers"] == _LARGEST_GEMMA[name]
    scalar = hidden // heads if is_largest else config["head_dim"]
    window = file.size(f"{name}.attention.sliding_window")
    return {**_gemma(file, config), "query_pre_attn_scalar": scalar, "sliding_window": window}


def _gemma2(file: GgufFile, config: Fields) -> Fields:
    caps = {f"{name}_logit_softcapping": file.positive(f"gemma2.{name}_logit_softcapping") for name in ("attn", "final")}
    return {**_sliding_gemma(file, config), **caps}


def _gemma3(file: GgufFile, config: Fields) -> Fields:
    local = file.positive("gemma3.rope.freq_base_swa", _LOCAL_THETA)
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return {**_sliding_gemma(file, config), "rope_parameters": ropes, "rope_local_base_freq": local}


_LLAMA = GgufFamily(architecture="LlamaForCausalLM", model_type="llama", is_interleaved=True)
_MIXTRAL = GgufFamily(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    parts=_PARTS | {"ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    is_interleaved=True,
    fields=_mixtral,
)
_GPT_OSS = GgufFamily(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    parts=_PARTS | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    experts={f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
    bare={"attn_sinks": "self_attn.sinks"},
    joins_experts=True,
    fields=_gpt_oss,
)
_QWEN3 = GgufFamily(architecture="Qwen3ForCausalLM", model_type="qwen3", parts=_PARTS | _HEAD_NORMS)
_GEMMA = GgufFamily(architecture="GemmaForCausalLM", model_type="gemma", has_norm_offset=True, fields=_gemma)
_GEMMA2 = replace(
    _GEMMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    parts=_PARTS | _NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"},
    fields=_gemma2,
)
FAMILIES: Mapping[str, GgufFamily] = {
    "llama": _LLAMA,
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": _QWEN3,
    "qwen3moe": replace(
        _QWEN3,
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        parts=_QWEN3.parts | {"ffn_gate_inp": "mlp.gate"},  # type: ignore[operator]
        experts={f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
        fields=_qwen3_moe,
    ),
    "gpt-oss": _GPT_OSS,
    "phi3": GgufFamily(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        parts=_PARTS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields=_phi3,
    ),
    "smollm3": replace(_LLAMA, architecture="SmolLM3ForCausalLM", model_type="smollm3"),
    "olmo2": GgufFamily(
        architecture="Olmo2ForCausalLM", model_type="olmo2", parts=_PARTS | _HEAD_NORMS | _NORMS_AFTER, fields=_olmo2
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        parts=_GEMMA2.parts | _HEAD_NORMS,  # type: ignore[operator]
        fields=_gemma3,
    ),
}
"""By `general.architecture`. Mistral's is `llama`, and Mixtral's is `llama` with experts."""
