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
