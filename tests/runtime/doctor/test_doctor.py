"""The command on this machine."""

import json
from pathlib import Path

import pytest
import torch

from phalanx_runtime.__main__ import main
from phalanx_runtime.doctor import read
from phalanx_runtime.doctor.__main__ import main as doctor
from phalanx_runtime.doctor.read import copy_rate, matmul_rate, vectors_of
from phalanx_runtime.rank.roofline import read_rates


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short measurements."""
    monkeypatch.setattr(read, "MEASURE_S", 0.01)
    monkeypatch.setattr(read, "CPU_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(read, "CPU_MATMUL", 64)


def test_json_has_the_record_and_every_verdict(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor(["json", str(tmp_path / "rates")])
    found = json.loads(capsys.readouterr().out)
    machine, verdicts = found["machine"], found["verdicts"]
    assert code == any(verdict["status"] != "ok" for verdict in verdicts)
    assert {"processors", "memory", "shared memory", "vectors", "driver"} <= {verdict["check"] for verdict in verdicts}
    assert machine["torch"] == torch.__version__ and machine["copy_bytes_per_s"] > 0 and machine["matmul_flops_per_s"] > 0
    rates = read_rates(str(tmp_path / "rates"))
    assert rates is not None and (machine["devices"] or rates.matmul_flops_per_s == machine["matmul_flops_per_s"])


def test_rates_that_cannot_be_saved_measure_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(["table", str(tmp_path / "none" / "rates")]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("phalanx-runtime doctor: [Errno 2] ")


def test_command_prints_one_line_per_check(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capfd.readouterr().out.splitlines()
    assert any("CPU copy rate" in line and line.endswith("GB/s") for line in lines)
    assert code == any(line.startswith(("slow", "broken")) for line in lines)


def test_rates_are_work_over_time() -> None:
    cpu = torch.device("cpu")
    assert 1e7 < copy_rate(cpu, 1 << 16) < 1e13
    assert 1e6 < matmul_rate(cpu, 32, torch.float32) < 1e14


@pytest.mark.parametrize(
    ("flags", "vectors"),
    [
        ({"avx2", "avx512f", "avx512_bf16", "sse"}, ["avx2", "avx512", "bf16"]),
        ({"avx2", "amx_tile", "amx_bf16"}, ["avx2", "amx", "bf16"]),
        ({"asimd", "bf16"}, ["neon", "bf16"]),
        (set[str](), []),
    ],
)
def test_vectors_are_those_that_kernels_use(flags: set[str], vectors: list[str]) -> None:
    assert vectors_of(frozenset(flags)) == vectors
