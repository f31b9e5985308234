"""The limit of step times on this rank's device: the model's sizes, and the device's rates."""

import os
from pathlib import Path

import msgspec
import torch

from phalanx_api.roofline import DeviceRates, Roofline, product_rates, shape_of
from phalanx_runtime.checkpoint.quantization import Fp8Scheme, GgufScheme, parse_quantization
from phalanx_runtime.checkpoint.schemes.integers import IntScheme
from phalanx_runtime.checkpoint.vision import text_config
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import read_json
from phalanx_runtime.model.linear.packed.pack import GROUP
from phalanx_runtime.model.linear.registry import keeps_codes
from phalanx_runtime.model.rope import Json
from phalanx_runtime.rank_spec import RankSpec

ENV_RATES = "PHALANX_DEVICE_RATES"
"""File with rates that `phalanx-runtime doctor --save` measured; it precedes the table of products."""
KV_BYTES = {"fp8": 1, "int8": 1, "int4": 0.5}
"""Bytes of a number in the KV cache, without scales."""
WEIGHT_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / GROUP}
"""Bytes of a weight by `--quantization`, which rounds the head too."""


def find_roofline(spec: RankSpec, device: torch.device, dtype: torch.dtype) -> Roofline | None:
    """Returns the limit, if the rates of the device and the sizes of the model are known."""
    rates = read_rates(os.environ.get(ENV_RATES))
    if rates is None and device.type == "cuda":
        rates = product_rates(torch.cuda.get_device_name(device))
    size, engine = dtype.itemsize, spec.engine
    kv_size = KV_BYTES.get(engine.kv_cache_dtype, size)
    try:
        config = text_config(read_json(Path(spec.model_dir)))
        rounding = engine.quantization
        expands = rounding == "fp8" and not _keeps_fp8(device)
        head_size = size if rounding is None or expands else WEIGHT_BYTES[rounding]
        layer_size = _layer_bytes(config, device, head_size)
        if isinstance(parse_quantization(config), GgufScheme):
            layer_size = head_size = layer_size if rounding is None else head_size
        shape = shape_of(config, kv_size, layer_size, head_size)
    except (KeyError, ModelError):
        return None
    return None if rates is None else Roofline(shape=shape, rates=rates, num_devices=spec.world_size)


def _layer_bytes(config: Json, device: torch.device, size: float) -> float:
    """Returns the bytes of a weight of the layers; `size`: if the checkpoint does not quantise them."""
    scheme = parse_quantization(config)
    if scheme is None:
        return size
    if isinstance(scheme, Fp8Scheme):
        return 1.0 if _keeps_fp8(device) else size
    if keeps_codes(device):
        return scheme.bytes_per_weight
    if device.type != "cuda":
        return size
    if isinstance(scheme, GgufScheme):
        return scheme.packed_share * scheme.packed_bytes_per_weight + (1 - scheme.packed_share) * size
    if isinstance(scheme, IntScheme):
        return scheme.bits / 8 + (0 if scheme.group is None else 4 / scheme.group) if scheme.has_gpu_format else size
    return scheme.bytes_per_weight


def _keeps_fp8(device: torch.device) -> bool:
    """Whether weights stay in fp8, where the device has its kernels."""
    return device.type == "cuda" or keeps_codes(device)


def read_rates(path: str | None) -> DeviceRates | None:
    """Returns the rates in a file, if it exists and is valid."""
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=DeviceRates)
    except (OSError, msgspec.DecodeError):
        return None
