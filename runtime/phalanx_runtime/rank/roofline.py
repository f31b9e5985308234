"""The limit of step times on this rank's device: the model's sizes, and the device's rates."""

import os
from pathlib import Path

import msgspec
import torch

from phalanx_api.roofline import DeviceRates, Roofline, product_rates, shape_of
from phalanx_runtime.checkpoint.vision import text_config
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import read_json
from phalanx_runtime.rank_spec import RankSpec

ENV_RATES = "PHALANX_DEVICE_RATES"
"""File with rates that `phalanx-runtime doctor --save` measured; it precedes the table of products."""
KV_BYTES = {"fp8": 1, "int8": 1, "int4": 0.5}
"""Bytes of a number in the KV cache, without scales."""


def find_roofline(spec: RankSpec, device: torch.device, dtype: torch.dtype) -> Roofline | None:
    """Returns the limit, if the rates of the device and the sizes of the model are known."""
    rates = read_rates(os.environ.get(ENV_RATES))
    if rates is None and device.type == "cuda":
        rates = product_rates(torch.cuda.get_device_name(device))
    size, engine = dtype.itemsize, spec.engine
    kv_size = KV_BYTES.get(engine.kv_cache_dtype, size)
    try:
        shape = shape_of(text_config(read_json(Path(spec.model_dir))), kv_size, 1 if engine.quantization == "int8" else size)
    except (KeyError, ModelError):
        return None
    return None if rates is None else Roofline(shape=shape, rates=rates, num_devices=spec.world_size)


def read_rates(path: str | None) -> DeviceRates | None:
    """Returns the rates in a file, if it exists and is valid."""
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=DeviceRates)
    except (OSError, msgspec.DecodeError):
        return None
