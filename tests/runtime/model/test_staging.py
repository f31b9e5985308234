"""Weights through pinned buffers, with buffers and events of the CPU; several files read at once."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.copies import StagingRing, open_staging, read_in_threads
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.linear import DenseLinear
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")


class Log:
    """Records waits and marks of each buffer, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_events = 0

    def make_event(self) -> "LoggedEvent":
        self.num_events += 1
        return LoggedEvent(self, self.num_events)


class LoggedEvent:
    """A `CopyEvent`."""

    def __init__(self, log: Log, number: int) -> None:
        self._log = log
        self._number = number

    def record(self) -> None:
        self._log.calls.append(f"record {self._number}")

    def synchronize(self) -> None:
        self._log.calls.append(f"wait {self._number}")


@given(
    shape=st.lists(st.integers(0, 20), max_size=2),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    size=st.integers(1, 200),
)
def test_every_value_arrives(shape: list[int], dtype: torch.dtype, size: int) -> None:
    ring = StagingRing([torch.empty(4 * size, dtype=torch.uint8) for _ in range(2)], Log().make_event)
    source = torch.randn([*shape[:-1], shape[-1] + 3] if shape else [])
    source = source[..., 3:] if shape else source
    target = torch.full(shape, torch.nan, dtype=dtype)
    ring.copy(source, target)
    assert torch.equal(target, source.to(dtype))


def test_a_buffer_is_filled_again_after_its_copy() -> None:
    log = Log()
    ring = StagingRing([torch.empty(8, dtype=torch.uint8) for _ in range(2)], log.make_event)
    ring.copy(torch.ones(3, 2), torch.empty(3, 2))
    assert log.calls == ["wait 1", "record 1", "wait 2", "record 2", "wait 1", "record 1"]


def test_a_cpu_reads_mapped_files() -> None:
    assert open_staging(CPU) is None


def test_errors_of_a_thread_are_raised() -> None:
    def read(part: int) -> int:
        if part == 2:
            raise ModelError("broken")
        return part

    assert read_in_threads([0, 1], read, CPU) == [0, 1]
    with pytest.raises(ModelError, match="broken"):
        read_in_threads([1, 2, 3], read, CPU)


@pytest.mark.parametrize("num_readers", [2, 8])
def test_files_read_at_once_give_the_same_model(tmp_path: Path, num_readers: int) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2")

    def loaded(num_readers: int) -> Decoder:
        options = LoadOptions(dtype=torch.float32, device=CPU, kernels=Kernels(), positions=64, num_readers=num_readers)
        model = open_model(folder).load(SoloCollective(), options)
        assert isinstance(model, Decoder)
        return model

    model, expected = loaded(num_readers), loaded(1)
    assert model.num_bytes == expected.num_bytes and len(model.layers) == len(expected.layers) == 3
    for layer, other in zip(model.layers, expected.layers, strict=True):
        for linear, same in ((layer.qkv, other.qkv), (layer.down, other.down)):
            assert isinstance(linear, DenseLinear) and isinstance(same, DenseLinear)
            assert torch.equal(linear.weight, same.weight)
