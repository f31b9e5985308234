"""Reads `quantization_config` of config.json: checkpoints in fp8, integers or 4-bit floats.

Sources of fp8: the Hugging Face `FineGrainedFP8Config` (`weight_block_size`, `weight_scale_inv`) and the format `float-quantized`
of compressed-tensors (`weight_scale`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_runtime.checkpoint.schemes.integers import IntScheme, parse_awq, parse_compressed_ints, parse_gptq
from phalanx_runtime.checkpoint.schemes.tables import TableScheme, parse_bitsandbytes, parse_mxfp4, parse_nvfp4
from phalanx_runtime.errors import ModelError

SUPPORTED = (
    "fp8, awq, gptq, bitsandbytes, mxfp4, compressed-tensors in float-quantized, pack-quantized, int-quantized or "
    "nvfp4-pack-quantized, or a GGUF file"
)
MOST_BYTES = 8.0
"""Of a weight in a GGUF file."""
NAMES = ("quantization_config", "compression_config")
"""Of the field: compressed-tensors had the second name in 2024."""
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


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """Weights in a GGUF file, each tensor in a format of its own."""

    name: str
    """For logs: `GGUF, Q4_K, Q6_K`."""
    bytes_per_weight: float
    """Of all matrices."""
    packed_bytes_per_weight: float = 0.0
    """Of matrices in formats that stay packed on a GPU."""
    packed_share: float = 0.0
    """Share of the weights in these formats."""


Scheme = Fp8Scheme | IntScheme | TableScheme | GgufScheme


def parse_quantization(raw: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme of a config.json, None for unquantised weights. Raises ModelError for an unsupported one."""
    config = next((raw[name] for name in NAMES if raw.get(name)), None)
    if not config:
        return None
    if not isinstance(config, dict):
        raise ModelError("quantization_config: expected an object")
    method = str(config.get("quant_method", "without quant_method"))
    parse = _METHODS.get(method)
    if parse is None:
        raise ModelError(f"quantization_config: {method} is not supported: use {SUPPORTED}")
    return parse(config)


def _fine_grained(config: Mapping[str, Any]) -> Fp8Scheme:
    """Reads the kind of DeepSeek and Qwen. Without blocks it is that of AutoFP8."""
    if (fmt := config.get("fmt", "e4m3")) != "e4m3":
        raise ModelError(f"quantization_config: fp8 {fmt} is not supported: use e4m3")
    block = _block(config.get("weight_block_size"))
    return Fp8Scheme(("weight_scale_inv", "weight_scale"), block, _name(block))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    form = config.get("format")
    for name in ("sparsity_config", "transform_config"):
        part = config.get(name)
        if part and not (isinstance(part, dict) and (part.get("format") == "dense" or part.get("config_groups") == {})):
            raise ModelError(f"quantization_config: {name} of compressed-tensors is not supported")
    groups = config.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    parts = [group["weights"] for group in found if isinstance(group, dict) and isinstance(group.get("weights"), dict)]
    if not parts or len(parts) < len(found):
        raise ModelError("quantization_config: config_groups without weights")
    if other := {str(group["format"]) for group in found if group.get("format")} - {str(form)}:
        raise ModelError(
            f"quantization_config: compressed-tensors {form} with groups in {', '.join(sorted(other))} is not supported"
        )
    match form:
        case "float-quantized":
            return _compressed_fp8(parts)
        case "pack-quantized" | "int-quantized":
            return parse_compressed_ints(form, found)
        case "nvfp4-pack-quantized":
            return parse_nvfp4(found)
    raise ModelError(f"quantization_config: compressed-tensors {form} is not supported: use {SUPPORTED}")


def _compressed_fp8(parts: Sequence[Mapping[str, Any]]) -> Fp8Scheme:
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


def _gguf(config: Mapping[str, Any]) -> GgufScheme:
    """Reads what `link_once` writes."""
    formats, num_bytes = config.get("formats"), config.get("bytes_per_weight")
    if not isinstance(formats, list) or not isinstance(num_bytes, float) or not 0 < num_bytes <= MOST_BYTES:
        raise ModelError("quantization_config: gguf without formats and bytes_per_weight: name the .gguf file instead")
    share, packed = config.get("packed_share", 0.0), config.get("packed_bytes_per_weight", 0.0)
    if not isinstance(share, float) or not 0 <= share <= 1:
        raise ModelError(f"quantization_config: packed_share of gguf is a share of the weights, not {share!r:.40}")
    if not isinstance(packed, float) or not 0 <= packed <= MOST_BYTES:
        raise ModelError(f"quantization_config: packed_bytes_per_weight of gguf is a number of bytes, not {packed!r:.40}")
    return GgufScheme(f"GGUF, {', '.join(map(str, formats))}", num_bytes, packed, share)


def _block(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(part, int) and part > 0 for part in size):
        raise ModelError(f"quantization_config: block size {size!r} is not supported: expected two positive integers")
    return size[0], size[1]


def _name(block: tuple[int, int] | None) -> str:
    return "fp8 with scales per tensor or output" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fine_grained,
    "compressed-tensors": _compressed,
    "awq": parse_awq,
    "gptq": parse_gptq,
    "bitsandbytes": parse_bitsandbytes,
    "mxfp4": parse_mxfp4,
    "gguf": _gguf,
}
"""By `quant_method`."""
