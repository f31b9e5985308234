"""The device path with CUDA graphs gives the tokens of the host path. `pytest tests/gpu -m gpu`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx_runtime.core.admission import Limits
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.requests import FIELDS, requests
from tests.runtime.lag import lagging
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import Served, serve
from tests.runtime.tiny import Family, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LIMITS = Limits(max_model_len=120, max_num_seqs=8, max_num_batched_tokens=24)
HOST = Build(torch.float32, num_pages=200, device="cuda")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_graphs_sample_the_tokens_of_the_host(tmp_path: Path, family: Family, lag: int) -> None:
    folder = save_tiny(tmp_path / "model", family)
    submitted = [one for name, one in zip(FIELDS, requests(logprobs=None), strict=True) if name != "grammar"]

    def on_host(runner: ModelRunner) -> list[Served]:
        return serve(runner, submitted, LIMITS)

    def on_device(runner: ModelRunner) -> list[Served]:
        served, step = serve(runner, submitted, LIMITS), runner.device_step
        assert isinstance(step, DeviceStep)
        assert step.account.captured == (1, 2, 4, 8) and step.num_launched > 0
        return served

    expected = on_ranks(folder, [1], HOST, on_host)
    with lagging(lag):
        found = on_ranks(folder, [1], replace(HOST, device_rows=8), on_device)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
