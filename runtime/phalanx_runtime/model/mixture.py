"""Mixtures of experts: the fields of config.json that describe them."""

from dataclasses import dataclass

from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.families import ExpertTensors
from phalanx_runtime.model.rope import Json, integer, number

SWIGLUOAI = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Constants of the activation `swigluoai`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model: each token passes through the `per_token` experts with the largest router logits."""

    num_experts: int
    per_token: int
    intermediate_size: int
    """Of each expert."""
    norm_topk_prob: bool
    """The weights of a token's experts sum to 1; otherwise they are their shares of the softmax over all experts."""
    layers: tuple[bool, ...]
    """By layer: whether it has experts instead of an MLP."""
    tensors: ExpertTensors
    is_parallel: bool = False
    """Each rank has whole experts; otherwise each has columns of all experts."""


def read_mixture(raw: Json, tensors: ExpertTensors, layers: int) -> Mixture:
    """Reads the experts of a model with this number of layers. Raises ModelError."""
    num_experts = integer(raw, "num_experts" if raw.get("num_local_experts") is None else "num_local_experts")
    per_token = integer(raw, "num_experts_per_tok")
    if per_token > num_experts:
        raise ModelError(f"num_experts_per_tok {per_token} exceeds the {num_experts} experts")
    for field, value in SWIGLUOAI.items():
        if tensors.is_interleaved and number(raw, field, value) != value:
            raise Unsupported(f"{field} must be {value}, not {raw[field]}")
    has_own_size = raw.get("moe_intermediate_size") is not None
    return Mixture(
        num_experts=num_experts,
        per_token=per_token,
        intermediate_size=integer(raw, "moe_intermediate_size" if has_own_size else "intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", not has_own_size)),
        layers=_sparse_layers(raw, layers),
        tensors=tensors,
    )


def _sparse_layers(raw: Json, layers: int) -> tuple[bool, ...]:
    """Applies decoder_sparse_step and mlp_only_layers; without them all layers have experts."""
    every, dense = integer(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"mlp_only_layers must be a list of layers, not {dense!r}")
    return tuple((layer + 1) % every == 0 and layer not in dense for layer in range(layers))
