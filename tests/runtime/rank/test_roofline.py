"""The limit of a rank's steps, from the model's sizes and measured rates."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx_api.roofline import DeviceRates
from phalanx_runtime.rank.roofline import ENV_RATES, find_roofline, read_rates
from tests.runtime.pods import make_spec, with_settings

RATES = DeviceRates(name="this machine", copy_bytes_per_s=1e10, matmul_flops_per_s=1e11)
CONFIG = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32}
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "rates.json").write_bytes(msgspec.json.encode(RATES))
    monkeypatch.setenv(ENV_RATES, str(tmp_path / "rates.json"))
    return tmp_path


def test_measured_rates_and_sizes_give_the_limit(folder: Path) -> None:
    spec = make_spec(folder, world_size=4)
    found = find_roofline(spec, CPU, torch.float32)
    assert found is not None and (found.rates, found.num_devices) == (RATES, 4)
    assert (found.shape.bytes_per_number, found.shape.bytes_per_weight) == (4, 4)
    quantized = find_roofline(with_settings(spec, quantization="int8"), CPU, torch.bfloat16)
    assert quantized is not None and (quantized.shape.bytes_per_number, quantized.shape.bytes_per_weight) == (2, 1)


GGUF = {"quant_method": "gguf", "formats": ["MXFP4", "Q8_0"], "bytes_per_weight": 0.9}
PACKED = {"packed_bytes_per_weight": 0.55, "packed_share": 0.75}


def test_gguf_weights_count_as_gpus_keep_them(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": GGUF | PACKED}))
    found = find_roofline(make_spec(folder), torch.device("cuda"), torch.bfloat16)
    assert found is not None and found.shape.bytes_per_weight == 0.75 * 0.55 + 0.25 * 2


@pytest.mark.parametrize(
    ("quantization", "device", "num_bytes"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "cpu", 0.5 + 3 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "cuda", 0.5 + 4 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "cuda", 1 + 4 / 128),
        ({"quant_method": "mxfp4"}, "cuda", 0.5 + 1 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "cuda", 0.5625),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "cpu", 1),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "cuda", 1),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "cpu", 0.5625),
        ({"quant_method": "fp8"}, "cpu", 1),
        ({"quant_method": "fp8"}, "cuda", 1),
    ],
)
def test_packed_weights_count_their_own_bytes(folder: Path, quantization: object, device: str, num_bytes: float) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    found = find_roofline(make_spec(folder), torch.device(device), torch.bfloat16)
    assert found is not None and (found.shape.bytes_per_weight, found.shape.bytes_per_head_weight) == (num_bytes, 2)


def packed_ints(**changes: object) -> dict[str, object]:
    """Returns the quantization_config of compressed-tensors for 4 bits in groups of 128 inputs."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, **changes}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("changes", "dtype", "num_bytes"),
    [
        ({}, "bfloat16", 0.5 + 4 / 128),
        ({"strategy": "channel", "group_size": None}, "bfloat16", 0.5),
        ({}, "float16", 0.5 + 4 / 128),
        ({"symmetric": False}, "bfloat16", 0.5 + 4 / 128),
        ({"group_size": 32}, "bfloat16", 0.5 + 4 / 32),
        ({"group_size": 8}, "bfloat16", 2),
        ({"actorder": "group"}, "bfloat16", 0.5 + 4 / 128),
    ],
    ids=["groups", "rows", "float16 scales", "zero points", "small groups", "tiny groups", "order"],
)
def test_four_bits_count_where_gpus_read_them(folder: Path, changes: dict[str, object], dtype: str, num_bytes: float) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": dtype, "quantization_config": packed_ints(**changes)}))
    found = find_roofline(make_spec(folder), torch.device("cuda"), torch.bfloat16)
    assert found is not None and found.shape.bytes_per_weight == num_bytes


@pytest.mark.parametrize(
    ("quantization", "device", "num_bytes"), [("int4", "cpu", 0.53125), ("fp8", "cpu", 1), ("fp8", "cuda", 1)]
)
def test_rounded_weights_include_the_head(folder: Path, quantization: str, device: str, num_bytes: float) -> None:
    found = find_roofline(with_settings(make_spec(folder), quantization=quantization), torch.device(device), torch.bfloat16)
    assert found is not None and (found.shape.bytes_per_weight, found.shape.bytes_per_head_weight) == (num_bytes, num_bytes)


def test_cpu_without_measured_rates_has_no_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_RATES)
    assert find_roofline(make_spec(folder), CPU, torch.float32) is None


def test_model_of_another_kind_has_no_limit(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert find_roofline(make_spec(folder), CPU, torch.float32) is None
    (folder / "config.json").unlink()
    assert find_roofline(make_spec(folder), CPU, torch.float32) is None


def test_unreadable_rates_are_ignored(tmp_path: Path) -> None:
    assert read_rates(None) is None and read_rates(str(tmp_path / "missing")) is None
    (tmp_path / "rates").write_text("{}")
    assert read_rates(str(tmp_path / "rates")) is None
