"""A draft model beside the device path: it follows the steps that are queued, and drafts in those that the host samples."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.requests import repeating
from tests.runtime.rank.drafting.draft_runs import make_config
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, serve

LIMITS = Limits(max_model_len=60, max_num_seqs=1, max_num_batched_tokens=64)
[GREEDY, *_] = repeating()
REQUEST = replace(GREEDY, prompt=GREEDY.prompt[:9], sampling=replace(GREEDY.sampling, logprobs=None, max_tokens=7))


@pytest.mark.parametrize("method", ["draft", pytest.param("self_draft", marks=pytest.mark.slow)])
def test_drafts_follow_steps_queued_on_the_device(tmp_path: Path, method: str) -> None:
    """The prompt is computed by the device path, and the following steps verify drafts."""
    folder = save_target(tmp_path / "model", num_hidden_layers=3)
    speculative = {"speculative_method": method}
    if method == "draft":
        speculative["draft_dir"] = str(save_draft(folder, tmp_path / "draft"))
    else:
        speculative["draft_exit"] = str(save_exit(folder, tmp_path / "exit.safetensors"))

    def plain(runner: ModelRunner) -> list[int]:
        return serve(runner, [REQUEST], LIMITS)[0].tokens

    def drafting(runner: ModelRunner) -> list[int]:
        counter, step = CountingRunner(runner), runner.device_step
        config: SchedulerConfig = make_config("draft" if method == "draft" else "self_draft")
        [answer] = serve(counter, [REQUEST], LIMITS, config)
        assert counter.draft_failure == "" and counter.num_accepted > 0
        assert isinstance(step, DeviceStep) and step.num_launched > 0 and step.obstacles["draft passes"] > 0
        return answer.tokens

    expected = on_ranks(folder, [1], Build(torch.float32), plain)
    assert on_ranks(folder, [1], Build(torch.float32, device_rows=1, speculative=speculative), drafting) == expected
