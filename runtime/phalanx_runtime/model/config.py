"""What a checkpoint's config.json says, in our words, for the architectures that the fused decoder block computes.

Anything else is refused with the architecture's name and the list of what works. No transformers here: ranks do not load it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx_runtime.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that load. SmolLM and SmolLM2 say LlamaForCausalLM."""

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base frequency and how positions are stretched."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped model. `windows[l]` is layer l's sliding window in tokens, None where attention is full."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str


def read_config(folder: Path) -> ModelConfig:
    """The model in this folder. Raises ModelError when config.json is missing, broken, or of another architecture."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist: the folder holds no model") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is no JSON object")
    return parse_config(raw)


def parse_config(raw: Json) -> ModelConfig:
    """The model that config.json's fields describe. Raises ModelError naming the field."""
    architecture = _architecture(raw)
    heads = _integer(raw, "num_attention_heads")
    kv_heads = _integer(raw, "num_key_value_heads", heads)
    hidden = _integer(raw, "hidden_size")
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported: only silu is")
    if raw.get("quantization_config"):
        raise ModelError(
            "quantization_config: quantised safetensors are not supported, give an unquantised checkpoint or a GGUF file"
        )
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(raw.get("attention_bias", False))
    layers = _integer(raw, "num_hidden_layers")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_integer(raw, "head_dim", hidden // heads),
        vocab_size=_integer(raw, "vocab_size"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        max_position=_integer(raw, "max_position_embeddings", 2048),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(raw, architecture, layers),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _architecture(raw: Json) -> str:
    named = raw.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return name
    what = ", ".join(names) or f"model_type {raw.get('model_type')!r}"
    raise ModelError(f"architecture {what} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _windows(raw: Json, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Layer types say which layers slide; without them Mistral slides everywhere, Qwen2 and Qwen3 from max_window_layers on."""
    window = raw.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * layers
    size = _integer(raw, "sliding_window")
    types = raw.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            raise ModelError(f"layer_types has {len(types)} entries for {layers} layers")
        return tuple(size if kind == "sliding_attention" else None for kind in types)
    if architecture == "MistralForCausalLM":
        return (size,) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    first = _integer(raw, "max_window_layers", 28)
    return tuple(size if layer >= first else None for layer in range(layers))


def _rope(raw: Json) -> Rope:
    """transformers 5 writes rope_parameters; before it, rope_theta and rope_scaling stood apart."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelError(f"rope_parameters is no JSON object: {given!r}")
    theta = _number(given, "rope_theta", _number(raw, "rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    match kind:
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, "linear", _number(given, "factor"))
        case "llama3":
            return Rope(
                theta,
                "llama3",
                _number(given, "factor"),
                _number(given, "low_freq_factor"),
                _number(given, "high_freq_factor"),
                _integer(given, "original_max_position_embeddings"),
            )
        case _:
            raise ModelError(f"rope type {kind!r} is not supported; supported are default, linear, llama3")


def _integer(raw: Json, field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {field} must be a whole number of at least 1, not {value!r}")
    return value


def _number(raw: Json, field: str, default: float | None = None) -> float:
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config.json: {field} must be a number, not {value!r}")
    return float(value)
