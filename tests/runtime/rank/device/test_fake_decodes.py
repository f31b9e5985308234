"""A decode step of large models without a device: its operators, their memory and their devices, on fake tensors.

A wait for the device raises by itself: a fake tensor has no values.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from phalanx_runtime.core.step_plan import LAST_SAMPLED, StepPlan
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.rank.device.decode_graphs import CaptureBudget, DecodeGraphs, bucket_sizes
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs
from phalanx_runtime.rank.device.device_decodes import DecodeStep, DeviceDecodes
from phalanx_runtime.rank.device.device_rows import DeviceRows
from phalanx_runtime.rank.memory.kv_cache import make_caches
from tests.runtime.rank.device.device_runner import greedy, same_logits
from tests.runtime.rank.device.fake_decoders import (
    DEVICE,
    DTYPE,
    LLAMA_8B,
    POSITIONS,
    QWEN3_600M,
    make_decoder,
)
from tests.runtime.rank.device.recorded_ops import VIEWS, RecordedOps, ReplayedGraph, record
from tests.runtime.rank.device.row_plans import new_row

NUM_ROWS = 8
PAGE = 16
NUM_PAGES = 4096


class FakeRank:
    """A rank with a decoder on fake tensors. Slots of padding are negative: its page is not part of the pool."""

    def __init__(self, config: ModelConfig) -> None:
        decoder = make_decoder(config)
        rows = DeviceRows(NUM_ROWS, POSITIONS, PAGE, DEVICE)
        self.inputs = DecodeInputs(rows, decoder.kv.kv_heads)
        caches = make_caches(decoder.kv, NUM_PAGES, PAGE, DTYPE, DEVICE)
        self.step = DecodeStep(model=decoder, caches=caches, inputs=self.inputs, gather=same_logits, sample=greedy(rows))
        self.captured: list[RecordedOps] = []
        sizes = bucket_sizes(NUM_ROWS)
        self.graphs = DecodeGraphs(sizes, self.step, lambda: ReplayedGraph(self.captured))
        self.decodes = DeviceDecodes(self.inputs, self.graphs)
        with torch.inference_mode():
            self.graphs.capture(CaptureBudget(1 << 40, 1000.0), lambda: 0.0)

    def run(self, plan: StepPlan) -> RecordedOps:
        """Returns the operators of a step outside its graph."""

        def work() -> None:
            self.decodes.update(plan)
            assert self.decodes.compute(plan) is not None

        return record(work)


@pytest.fixture(autouse=True)
def fake_tensors() -> Iterator[None]:
    with FakeTensorMode():
        yield


def plan_of(num_rows: int, start: int) -> StepPlan:
    return StepPlan(
        step=start,
        admitted=[new_row(row) for row in range(num_rows)] if start == 0 else [],
        rows=list(range(num_rows)),
        starts=[start] * num_rows,
        counts=[1] * num_rows,
        pages=[[row + 1] if start % PAGE == 0 else [] for row in range(num_rows)],
        tokens=[5 if start == 0 else LAST_SAMPLED] * num_rows,
        draws=[(row, start) for row in range(num_rows)],
    )


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_600M], ids=["llama 8b", "qwen3 0.6b"])
def test_a_decode_step_is_one_capture_and_one_update(config: ModelConfig) -> None:
    rank = FakeRank(config)
    sizes = bucket_sizes(NUM_ROWS)
    assert len(rank.captured) == len(sizes)
    for ops in rank.captured:
        assert ops.devices == {"cuda"}
        own = [name for name in ops.names if name.startswith("phalanx::")]
        assert own.count("phalanx::paged_attention") == own.count("phalanx::prepare_heads") == config.num_layers
        assert own[0] == "phalanx::build_decode_inputs" and own[-1] == "phalanx::record_tokens"
    for start in range(3):
        ops = rank.run(plan_of(5, start))
        assert [name for name in ops.names if name not in VIEWS] == ["aten::copy_", "phalanx::update_rows"]
        assert ops.num_made == 0
    assert dict(rank.graphs.num_replays) == {8: 3}


def test_a_wait_for_the_device_raises() -> None:
    def sample(logits: Tensor, rows: Tensor, indices: Tensor, tokens: Tensor) -> None:
        tokens.fill_(int(rows.max().item()))

    rank = FakeRank(QWEN3_600M)
    step = replace(rank.step, sample=sample)
    with torch.inference_mode(), pytest.raises(DataDependentOutputException):
        step(1)


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_600M], ids=["llama 8b", "qwen3 0.6b"])
def test_steps_read_and_write_the_same_memory(config: ModelConfig) -> None:
    rank = FakeRank(config)
    runs = []
    for start in range(2):
        rank.run(plan_of(3, start))
        runs.append(record(lambda: rank.step(4)))
    assert runs[0].names == runs[1].names
    assert runs[0].external == runs[1].external
    assert len({storage for _, storage, _ in runs[0].external}) > 8 * config.num_layers
