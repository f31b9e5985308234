"""Decode steps in CUDA graphs give the tokens of steps without. `pytest tests/gpu -m gpu`."""

from pathlib import Path

import pytest
import torch

from phalanx_runtime.rank.device.decode_graphs import CudaGraphPool
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.rank.device.device_runner import DeviceRunner
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE, Family, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NUM_TOKENS = 24
MAX_NUM_SEQS = 8


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_graphs_give_the_tokens_of_steps_without(tmp_path: Path, family: Family) -> None:
    folder = save_tiny(tmp_path / "model", family)
    chance = torch.Generator().manual_seed(7)
    requests = [DriverRequest(torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist()) for size in (1, 9, 21, 40, 5)]
    made: list[DeviceRunner] = []

    def on_device(runner: ModelRunner) -> list[list[int]]:
        made.append(DeviceRunner(runner, MAX_NUM_SEQS, CudaGraphPool().make_graph))
        return Driver(made[0].as_runner).generate(requests, NUM_TOKENS, chunk=16, lag=1)

    def on_host(runner: ModelRunner) -> list[list[int]]:
        return Driver(runner).generate(requests, NUM_TOKENS, chunk=16, lag=1)

    build = Build(device="cuda")
    assert on_ranks(folder, [1], build, on_device) == on_ranks(folder, [1], build, on_host)
    assert made[0].account.captured == (1, 2, 4, 8)
    assert made[0].decodes.num_computed > NUM_TOKENS // 2
