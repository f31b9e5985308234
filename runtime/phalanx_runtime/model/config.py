"""Parses config.json of fused-decoder architectures, without transformers."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from phalanx_runtime.checkpoint.encoders import is_classifier
from phalanx_runtime.checkpoint.quantization import Scheme, parse_quantization
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.families import CLASSIFIERS, FAMILIES, Activation, Family, HeadNorms, Norms
from phalanx_runtime.model.mixture import Mixture, read_mixture
from phalanx_runtime.model.rope import Json, Rope, integer, number, optional_number, positive, read_ropes

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "swigluoai": "swigluoai",
}
"""By name in config.json."""


MAX_LAYERS, MAX_HEAD_DIM = 10_000, 1 << 16
"""Some fields are kept by layer, and angles by dimension of a head: numbers from a broken file must not take all memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-shaped model. Terms as in `Family`."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    ropes: tuple[Rope | None, ...]
    """By layer; some layers may have no rotary embedding."""
    max_position: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: HeadNorms
    norms: Norms
    norm_offset: bool
    activation: Activation
    joined: bool
    embedding_scale: float | None
    scale: float | None
    softcap: float | None
    logit_softcap: float | None
    windows: tuple[int | None, ...]
    """Sliding windows by layer, if any."""
    has_sinks: bool = False
    mixture: Mixture | None = None
    """Experts, in some or all layers."""
    dtype: str | None
    """Of the checkpoint, if config.json says it."""
    quantization: Scheme | None = None
    """Of the checkpoint."""
    num_labels: int = 0
    """Of a classification head, which the model has in place of that for tokens; 0: it has none."""


def read_json(folder: Path) -> Json:
    """Reads config.json. Raises ModelError."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist: expected a model folder with a config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return raw


def parse_config(raw: Json) -> ModelConfig:
    """Returns the model. Raises ModelError, Unsupported."""
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = {**family.defaults, **raw}
    heads = integer(raw, "num_attention_heads")
    kv_heads = integer(raw, "num_key_value_heads", heads)
    hidden = integer(raw, "hidden_size")
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    _check_causal(raw)
    attention_bias = bool(raw.get("attention_bias", False))
    layers = integer(raw, "num_hidden_layers", most=MAX_LAYERS)
    windows = _windows(raw, family, layers)
    ropes = read_ropes(raw, family, windows)
    num_labels = _num_labels(raw) if is_classifier(raw) else 0
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(raw, hidden, heads),
        vocab_size=integer(raw, "vocab_size"),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        ropes=ropes,
        max_position=_max_position(raw, ropes),
        tied=num_labels > 0 or bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias == "always" or attention_bias,
        o_bias=family.qkv_bias == "config" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=_activation(raw, family),
        joined=family.joined,
        embedding_scale=math.sqrt(hidden) if family.embedding_scaled else None,
        scale=positive(raw, "query_pre_attn_scalar", 256.0) ** -0.5 if family.query_scaled else None,
        softcap=optional_number(raw, "attn_logit_softcapping"),
        logit_softcap=optional_number(raw, "final_logit_softcapping"),
        windows=windows,
        has_sinks=family.has_sinks,
        mixture=None if family.experts is None else read_mixture(raw, family.experts, layers),
        dtype=stored_dtype(raw),
        quantization=parse_quantization(raw),
        num_labels=num_labels,
    )


def _check_causal(raw: Json) -> None:
    if raw.get("use_bidirectional_attention") or not raw.get("is_causal", True):
        raise Unsupported(
            "its tokens attend to later ones (use_bidirectional_attention, or is_causal: false), as only those of encoders may: "
            "for embeddings take an encoder, or a decoder with causal attention (docs/embeddings.md)"
        )


def _head_dim(raw: Json, hidden: int, heads: int) -> int:
    size = integer(raw, "head_dim", hidden // heads, most=MAX_HEAD_DIM)
    if size > MAX_HEAD_DIM:
        raise ModelError(f"config.json: hidden_size {hidden} / num_attention_heads {heads} exceeds {MAX_HEAD_DIM}")
    return size


def stored_dtype(raw: Json) -> str | None:
    """Returns the dtype in config.json."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    return str(name) if name else None


def architectures(raw: Json) -> list[str]:
    """Returns the architecture names in config.json."""
    named = raw.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def _architecture(raw: Json) -> str:
    names = architectures(raw)
    for name in names:
        if name in FAMILIES:
            return name
    if names and names[0] in CLASSIFIERS:
        return CLASSIFIERS[names[0]]
    requested = ", ".join(names) or f"model_type {raw.get('model_type')!r}"
    raise Unsupported(f"architecture {requested} is not supported: use one of {', '.join(FAMILIES)}")


def _num_labels(raw: Json) -> int:
    names = raw.get("id2label")
    return len(names) if isinstance(names, dict) and names else integer(raw, "num_labels", 2)


def _activation(raw: Json, family: Family) -> Activation:
    """Prefers Gemma's own field: early checkpoints set the general one wrongly."""
    field = "hidden_activation" if family.activation != "silu" else "hidden_act"
    name = raw.get(field) or family.activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise Unsupported(f"{field} {name!r} is not supported: use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _max_position(raw: Json, ropes: tuple[Rope | None, ...]) -> int:
    """Limits longrope to its first range, where keys rotate alike."""
    longest = integer(raw, "max_position_embeddings", 2048)
    return min([longest, *(rope.original_max_position for rope in ropes if rope and rope.kind == "longrope")])


def _windows(raw: Json, family: Family, layers: int) -> tuple[int | None, ...]:
    """Applies layer_types, else the family's rule."""
    if raw.get("sliding_window") is None or family.slides == "never":
        return (None,) * layers
    size = integer(raw, "sliding_window")
    types = raw.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            raise ModelError(f"layer_types has {len(types)} entries for {layers} layers")
        return tuple(size if kind == "sliding_attention" else None for kind in types)
    if family.slides == "always":
        return (size,) * layers
    if family.slides == "if used":
        return (size if raw.get("use_sliding_window", False) else None,) * layers
    if family.full_every is not None:
        every = integer(raw, "sliding_window_pattern", family.full_every)
        return tuple(size if (layer + 1) % every else None for layer in range(layers))
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    first = integer(raw, "max_window_layers", 28)
    return tuple(size if layer >= first else None for layer in range(layers))
