"""Kinds of `quantization_config` whose codes of 4 bits have values of their own: MXFP4, NVFP4, and nf4 and fp4 of bitsandbytes.

Names of fields and values are those of transformers, compressed-tensors and bitsandbytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx_runtime.checkpoint.schemes.integers import IntScheme
from phalanx_runtime.errors import ModelError

Json = Mapping[str, Any]
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The values of the codes of MXFP4 and NVFP4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableScheme:
    """Weights in codes of 4 bits: value of the code * scale of the group."""

    layout: Literal["mxfp4", "nvfp4", "bitsandbytes"]
    name: str
    """For logs: `MXFP4`."""
    bits: int = 4

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a packed weight in memory, with its share of a scale."""
        return self.bits / 8 + {"mxfp4": 1 / 32, "nvfp4": 1 / 16, "bitsandbytes": 4 / 64}[self.layout]


def parse_mxfp4(config: Json) -> TableScheme:
    """Returns the scheme of gpt-oss: experts in e2m1 with a power of two for 32 inputs."""
    return TableScheme(layout="mxfp4", name="MXFP4, 4 bits in groups of 32 inputs")


def parse_nvfp4(groups: Sequence[Json]) -> TableScheme:
    """Returns the scheme of compressed-tensors' format nvfp4-pack-quantized. Raises ModelError."""
    for group in groups:
        part = group["weights"]
        found = (
            part.get("num_bits"),
            part.get("type"),
            part.get("strategy"),
            part.get("group_size"),
            part.get("symmetric", True),
        )
        if found != (4, "float", "tensor_group", 16, True):
            raise ModelError(
                f"quantization_config: nvfp4-pack-quantized of {found[0]} bits ({found[1]}) by {found[2]} of {found[3]} inputs "
                "is not supported: use 4 bits (float) by tensor_group of 16 inputs"
            )
    return TableScheme(layout="nvfp4", name="NVFP4, 4 bits in groups of 16 inputs")


def parse_bitsandbytes(config: Json) -> TableScheme | IntScheme:
    """Returns the scheme of 4 bits, or of LLM.int8. Raises ModelError."""
    if config.get("load_in_8bit"):
        return IntScheme(
            layout="bitsandbytes", bits=8, group=None, has_zeros=False, name="bitsandbytes, 8 bits with scales per output"
        )
    kind, storage = config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_quant_storage", "uint8")
    if not config.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise ModelError(
            f"quantization_config: bitsandbytes {kind!r:.80} is not supported: use load_in_8bit, or load_in_4bit with nf4 or fp4"
        )
    if storage != "uint8":
        raise ModelError(
            f"quantization_config: bitsandbytes with bnb_4bit_quant_storage {storage!r:.80} is not supported: use uint8"
        )
    nested = ", double quantised" if config.get("bnb_4bit_use_double_quant") else ""
    return TableScheme(layout="bitsandbytes", name=f"bitsandbytes {kind}, 4 bits{nested}")
