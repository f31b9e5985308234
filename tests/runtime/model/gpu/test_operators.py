"""Launches are torch operators: fake tensors pass, a mix of devices does not."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.operators import compiler_obstacle, operator


@operator("test_double(Tensor x, Tensor(a!) out, float factor)")
def double(x: Tensor, out: Tensor, factor: float) -> None:
    out.copy_(x * factor)


@operator("test_total(Tensor[] parts, Tensor(a!) out)")
def total(parts: list[Tensor], out: Tensor) -> None:
    out.copy_(torch.stack(parts).sum(0))


def test_a_launch_writes_its_outputs() -> None:
    out = torch.empty(3)
    double(torch.ones(3), out, 2.0)
    assert out.tolist() == [2.0] * 3


def test_fake_tensors_launch_nothing_and_may_not_mix_devices() -> None:
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
        double(x, torch.empty(3, device="cuda"), 2.0)
        with pytest.raises(ValueError, match="mixes tensors on"):
            double(x, torch.empty(3), 2.0)
        with pytest.raises(ValueError, match="mixes tensors on"):
            total([x, torch.empty(3)], x)


def test_a_launch_refuses_numbers_of_numpy() -> None:
    with pytest.raises(TypeError, match="numbers of numpy"):
        double(torch.ones(3), torch.empty(3), np.float64(2.0))


@pytest.mark.parametrize(
    ("programs", "has_headers", "variables", "expected"),
    [
        (["gcc"], True, {}, None),
        (["clang"], True, {}, None),
        ([], True, {"CC": "cc"}, None),
        ([], True, {}, "Triton finds no C compiler: install gcc or set CC"),
        (["gcc"], False, {}, "has no Python.h"),
    ],
    ids=["gcc", "clang", "CC", "no compiler", "no headers"],
)
def test_launchers_need_a_compiler_and_headers(
    tmp_path: Path, programs: list[str], has_headers: bool, variables: dict[str, str], expected: str | None
) -> None:
    for name in programs:
        (tmp_path / name).touch(0o755)
    if has_headers:
        (tmp_path / "Python.h").touch()
    obstacle = compiler_obstacle({"PATH": str(tmp_path), **variables}, tmp_path)
    assert obstacle is None if expected is None else obstacle is not None and expected in obstacle


def test_a_rank_of_a_cpu_imports_no_triton() -> None:
    """It takes about 70 MiB."""
    code = "import sys, phalanx_runtime.rank.loader; print([name for name in sys.modules if name.split('.')[0] == 'triton'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]"]
