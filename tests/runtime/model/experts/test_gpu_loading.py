"""Experts loaded to a GPU that this machine lacks, as fake tensors."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.config import parse_config, read_json
from phalanx_runtime.model.experts.gpu import GroupedExperts
from phalanx_runtime.model.experts.load import ExpertReader
from phalanx_runtime.model.experts.sparse import SparseMlp
from phalanx_runtime.model.layers import gate
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import Span, partition
from phalanx_runtime.model.weights import Checkpoint
from tests.runtime.tiny import save_tiny


class ShapesOnly(Checkpoint):
    """A checkpoint whose reads return tensors without memory."""

    def rows(self, name: str, shape: tuple[int, int], span: Span, dtype: torch.dtype | None = None) -> Tensor:
        return self.block(name, shape, (span, Span(0, shape[1])))

    def columns(self, name: str, shape: tuple[int, int], span: Span, dtype: torch.dtype | None = None) -> Tensor:
        return self.block(name, shape, (Span(0, shape[0]), span))

    def vector(self, name: str, size: int, span: Span | None = None) -> Tensor:
        return self.block(name, (size,), (span or Span(0, size),))

    def block(self, name: str, shape: tuple[int, ...], spans: Sequence[Span]) -> Tensor:
        assert self.has(name) and all(span.stop <= size for span, size in zip(spans, shape, strict=True))
        return torch.empty([span.size for span in spans], dtype=self.dtype, device=self.device)


def load(folder: Path, kernels: Kernels) -> SparseMlp:
    config = parse_config(read_json(folder))
    assert config.mixture is not None
    with ShapesOnly(folder, torch.bfloat16, torch.device("cuda")) as checkpoint, FakeTensorMode():
        reader = ExpertReader(config, config.mixture, partition(config, 2)[1], checkpoint, has_bias=False)
        return reader.read("model.layers.0.", kernels, gate)


@pytest.mark.parametrize(
    ("family", "values"), [("mixtral", 3 * 64 * 48), ("qwen3_moe", 3 * 64 * 16), ("gpt_oss", 3 * 64 * 48 + 96)]
)
def test_experts_on_a_gpu_are_grouped(tmp_path: Path, family: str, values: int) -> None:
    mlp = load(save_tiny(tmp_path / "model", family), Kernels())
    assert isinstance(mlp.experts, GroupedExperts)
    assert mlp.experts.num_bytes == 2 * 4 * values, "half of the columns of four experts, in bf16"
    assert mlp.num_bytes == mlp.experts.num_bytes + 2 * 4 * (65 if family == "gpt_oss" else 64), "with the router"


def test_int8_experts_on_a_gpu_are_packed(tmp_path: Path) -> None:
    mlp = load(save_tiny(tmp_path / "model", "mixtral"), Kernels(precision="int8"))
    assert isinstance(mlp.experts, GroupedExperts) and mlp.experts.layouts is not None
    assert {mlp.experts.layouts.gate_up.format, mlp.experts.layouts.down.format} == {"int8"}
