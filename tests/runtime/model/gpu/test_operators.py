"""Launches are torch operators: fake tensors pass, a mix of devices does not."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.operators import operator


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
