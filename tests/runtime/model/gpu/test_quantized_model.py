"""A whole model with quantised weights, by the kernels in the interpreter: tokens equal those of its dequantised reference."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_runtime.model.linear.gpu import PackedTritonLinear
from phalanx_runtime.model.linear.linear import QuantizedLinear
from phalanx_runtime.model.linear.packed import DequantizedLinear, Format
from phalanx_runtime.model.linear.registry import Kernels, make_linear
from tests.runtime.model.fp8_checkpoints import save_fp8
from tests.runtime.model.gpu.launches import launches_of
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE, save_tiny

NUM_TOKENS = 2


def generate(folder: Path, kernels: Kernels, ranks: int = 1) -> tuple[list[list[int]], list[str]]:
    """Returns tokens and launches of rank 0. The steps have 10 rows and 2."""
    chance = torch.Generator().manual_seed(7)
    requests = [DriverRequest(torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist()) for size in (1, 9)]
    outputs: list[Any] = []

    def work(runner: Any) -> list[str]:
        return launches_of(lambda: outputs.append(Driver(runner).generate(requests, NUM_TOKENS)))

    launches = on_ranks(folder, [1] * ranks, Build(kernels=kernels), work)
    return outputs[0], launches


@pytest.mark.parametrize("kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int4", "fp8"))])
def test_tokens_equal_those_of_dequantised_weights(tmp_path: Path, kind: Format) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=1)
    tokens, launches = generate(folder, Kernels(precision=kind, triton=True))
    expected, reference_launches = generate(folder, Kernels(precision=kind))
    assert tokens == expected
    assert "phalanx::multiply_packed" in launches and "phalanx::multiply_packed" not in reference_launches
    assert not {"aten::mm", "aten::addmm", "aten::addmm_"} & set(launches), "every linear is quantised"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_blocks_of_a_checkpoint_are_multiplied_packed(tmp_path: Path, ranks: int) -> None:
    folder, exact = tmp_path / "fp8", tmp_path / "exact"
    save_fp8(save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=1), folder, exact, "block")
    tokens, launches = generate(folder, Kernels(triton=True), ranks)
    assert tokens == generate(exact, Kernels())[0]
    assert "phalanx::multiply_packed" in launches


def test_a_format_has_one_linear_on_each_device() -> None:
    weight = torch.randn(16, 32)
    assert isinstance(make_linear(weight, None, Kernels(precision="int4")), DequantizedLinear)
    assert isinstance(make_linear(weight, None, Kernels(precision="int8")), QuantizedLinear)
    for kind in ("int8", "int4", "fp8"):
        assert isinstance(make_linear(weight, None, Kernels(precision=kind, triton=True)), PackedTritonLinear)


def test_the_reference_adds_to_a_residual() -> None:
    linear, x, residual = (
        make_linear(torch.randn(8, 40), torch.ones(8), Kernels(precision="int4")),
        torch.randn(3, 40),
        torch.ones(3, 8),
    )
    linear.add_to(residual, x)
    torch.testing.assert_close(residual, linear(x) + 1)
