"""Reads `quantization_config` of config.json: fp8 checkpoints of the kinds `fp8` and `compressed-tensors`.

Sources: the Hugging Face `FineGrainedFP8Config` (`weight_block_size`, `weight_scale_inv`) and the compressed-tensors format
`float-quantized` (`weight_scale`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx_runtime.errors import ModelError

_STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights in e4m3 with their scales."""

    scale_names: tuple[str, ...]
    """Suffixes of the scale's tensor, tried in order."""
    block: tuple[int, int] | None
    """Outputs and inputs with a common scale; None: one scale per tensor or output, by the shape of the scales."""
    name: str
    """For logs: `fp8 in blocks of 128 x 128`."""


def parse_quantization(raw: Mapping[str, Any]) -> Fp8Scheme | None:
    """Returns the scheme of a config.json, None for unquantised weights. Raises ModelError for an unsupported one."""
    config = raw.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise ModelError("quantization_config: expected an object")
    method = str(config.get("quant_method", "without quant_method"))
    if method == "fp8":
        return _fine_grained(config)
    if method == "compressed-tensors":
        return _compressed(config)
    raise ModelError(
        f"quantization_config: {method} is not supported: use fp8, compressed-tensors in float-quantized, or a GGUF file"
    )


def _fine_grained(config: Mapping[str, Any]) -> Fp8Scheme:
    """Reads the kind of DeepSeek and Qwen. Without blocks it is that of AutoFP8."""
    if (fmt := config.get("fmt", "e4m3")) != "e4m3":
        raise ModelError(f"quantization_config: fp8 {fmt} is not supported: use e4m3")
    block = _block(config.get("weight_block_size"))
    return Fp8Scheme(("weight_scale_inv", "weight_scale"), block, _name(block))


def _compressed(config: Mapping[str, Any]) -> Fp8Scheme:
    form = config.get("format")
    if form != "float-quantized":
        raise ModelError(f"quantization_config: compressed-tensors {form} is not supported: use float-quantized")
    groups = config.get("config_groups")
    found = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    parts = [part for part in found if isinstance(part, dict)]
    if not parts or len(parts) < len(found):
        raise ModelError("quantization_config: config_groups without weights")
    blocks = set()
    for part in parts:
        strategy, kind, bits = part.get("strategy"), part.get("type"), part.get("num_bits")
        if (kind, bits) != ("float", 8) or strategy not in _STRATEGIES:
            raise ModelError(
                f"quantization_config: compressed-tensors weights of {bits} bits ({kind}) by {strategy} are not supported: "
                "use 8 bits (float) by tensor, channel or block"
            )
        blocks.add(_block(part.get("block_structure")) if strategy == "block" else None)
    if len(blocks) > 1:
        raise ModelError("quantization_config: config_groups of several block sizes are not supported")
    block = blocks.pop()
    return Fp8Scheme(("weight_scale",), block, _name(block))


def _block(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(part, int) and part > 0 for part in size):
        raise ModelError(f"quantization_config: block size {size!r} is not supported: expected two positive integers")
    return size[0], size[1]


def _name(block: tuple[int, int] | None) -> str:
    return "fp8 with scales per tensor or output" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
