"""What a step must read and compute, and the rates of a device: the limit of step times, and the utilization of a device.

    bytes   weights of all linears once, and the KV of every context once
    FLOPs   2 per weight and token, 4 per attention head dimension, token and key

Williams et al., "Roofline" (2009); the share of the FLOP limit that a step reaches is the MFU of Chowdhery et al., "PaLM" (2022).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Measured rates of one device."""

    name: str
    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy."""
    matmul_flops_per_s: float
    """bf16, dense."""


PRODUCTS: Mapping[str, DeviceRates] = {
    "h100": DeviceRates(name="H100", copy_bytes_per_s=3.0e12, matmul_flops_per_s=7.9e14),
    "h200": DeviceRates(name="H200", copy_bytes_per_s=4.3e12, matmul_flops_per_s=7.9e14),
}
"""Products with SXM modules; `phalanx-runtime doctor` measures others."""
_OTHER_FORMS = re.compile(r"\b(PCIE|NVL|MIG)\b")


def product_rates(name: str) -> DeviceRates | None:
    """Returns the rates of a device by the driver's name of its product, such as NVIDIA H100 80GB HBM3."""
    words = name.upper()
    if _OTHER_FORMS.search(words):
        return None
    return next((rates for rates in PRODUCTS.values() if re.search(rf"\b{rates.name}\b", words)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model of the Llama shape."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    bytes_per_number: float = 2
    """Of keys and values."""
    bytes_per_weight: float = 2
    """Of the linears of layers, with the scales of quantised ones."""
    bytes_per_head_weight: float = 2

    @property
    def layer_weights(self) -> int:
        """Weights of the linears of all layers."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def linear_weights(self) -> int:
        """Weights of all linears, the head included and the embedding excluded."""
        return self.layer_weights + self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_number


def shape_of(
    config: Mapping[str, Any], bytes_per_number: float = 2, bytes_per_weight: float = 2, bytes_per_head_weight: float = 2
) -> ModelShape:
    """Returns the shape in a config.json. Raises KeyError if it is of another kind: with experts, or latents."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"):
        if config.get(key):
            raise KeyError(key)
    heads = int(config["num_attention_heads"])
    return ModelShape(
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        bytes_per_number=bytes_per_number,
        bytes_per_weight=bytes_per_weight,
        bytes_per_head_weight=bytes_per_head_weight,
    )


@dataclass(frozen=True, slots=True)
class StepDemand:
    """What a step must do at least."""

    bytes: float
    flops: float


def step_demand(shape: ModelShape, *, tokens: int, num_logits: int, keys_read: int, token_keys: float) -> StepDemand:
    """Returns the demand of a step.

    tokens: rows of the layers. num_logits: rows of the head. keys_read: sum of the contexts, each read once. token_keys: sum over
    tokens of the keys that each attends to.
    """
    head = shape.vocab * shape.hidden
    weight_bytes = shape.layer_weights * shape.bytes_per_weight if tokens else 0.0
    head_bytes = head * shape.bytes_per_head_weight if num_logits else 0.0
    linear = 2.0 * (shape.layer_weights * tokens + head * num_logits)
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * token_keys
    return StepDemand(weight_bytes + head_bytes + keys_read * shape.kv_bytes_per_token, linear + attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model on the devices of its group."""

    shape: ModelShape
    rates: DeviceRates
    num_devices: int

    def utilization(self, demand: StepDemand, seconds: float) -> tuple[float, float]:
        """Returns the shares of the copy rate and of the matmul rate that a step reaches in `seconds`."""
        available_s = max(seconds, 1e-9) * self.num_devices
        bandwidth = demand.bytes / (available_s * self.rates.copy_bytes_per_s)
        return bandwidth, demand.flops / (available_s * self.rates.matmul_flops_per_s)
