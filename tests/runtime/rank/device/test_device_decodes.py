"""Decode steps on the device give the tokens of `BatchBuilder` and `TorchSampler`; other steps are refused with a reason."""

from pathlib import Path

import pytest
import torch

from phalanx_api import wire
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan
from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.attention.paged import PagedAttention
from phalanx_runtime.rank.device.device_decodes import Obstacle, decode_obstacle, is_special
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.rank.device.device_runner import DeviceRunner
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE, Family, save_tiny

NUM_TOKENS = 6


def requests() -> list[DriverRequest]:
    chance = torch.Generator().manual_seed(7)
    return [DriverRequest(torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist()) for size in (1, 9, 21)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_tokens_equal_those_of_the_batch_builder(tmp_path: Path, family: Family) -> None:
    folder = save_tiny(tmp_path / "model", family)
    kernels = TritonAttention(num_multiprocessors=2)  # one split: the interpreter runs each program
    made: list[DeviceRunner] = []

    def on_device(runner: ModelRunner) -> list[list[int]]:
        made.append(DeviceRunner(runner, 4))
        return Driver(made[0].as_runner).generate(requests(), NUM_TOKENS, chunk=8, lag=1)

    def on_host(runner: ModelRunner) -> list[list[int]]:
        return Driver(runner).generate(requests(), NUM_TOKENS, chunk=8, lag=1)

    expected = on_ranks(folder, [1], Build(attention=PagedAttention()), on_host)
    assert on_ranks(folder, [1], Build(attention=kernels), on_device) == expected
    assert made[0].account.captured == (1, 2, 4)
    assert kernels.num_computed > 0
    replays, obstacles = made[0].graphs.num_replays, made[0].decodes.obstacles
    assert made[0].decodes.num_computed == replays.total() >= 3
    assert replays[4] > 0, "three rows and a padding row"
    assert set(obstacles) == {"chunk"}


SAMPLING = wire.Sampling(max_tokens=8, seed=0)
GRAMMAR = wire.Sampling(max_tokens=8, seed=0, grammar=wire.Grammar(kind="regex", text="a*"))
PROMPT_LOGPROBS = wire.Sampling(max_tokens=8, seed=0, prompt_logprobs=1)


def decode(*draws: tuple[int, int], starts: tuple[int, ...] = (5, 9), counts: tuple[int, ...] = (1, 1)) -> StepPlan:
    return StepPlan(
        step=3,
        admitted=[],
        rows=[4, 7][: len(counts)],
        starts=list(starts[: len(counts)]),
        counts=list(counts),
        pages=[[] for _ in counts],
        tokens=[1] * sum(counts),
        draws=list(draws),
        paths=[DraftPath(request=0, depth=1)] if counts[:1] == (2,) else [],
    )


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (decode((0, 0), (1, 3)), None),
        (decode((1, 3), (0, 0)), "draws"),
        (decode(counts=()), "no row"),
        (decode((0, 0), (1, 0), counts=(2, 1)), "draft"),
        (decode((0, 0), (1, 0), counts=(1, 3)), "chunk"),
        (decode((0, 0)), "draws"),
        (decode((0, 0), (0, 1)), "draws"),
        (decode((0, 0), (1, 0), (1, 1)), "draws"),
    ],
)
def test_a_decode_step_has_one_token_per_row(plan: StepPlan, expected: Obstacle | None) -> None:
    assert decode_obstacle(plan, {}) == expected


@pytest.mark.parametrize(
    ("sampling", "num_prompt", "expected"),
    [
        (SAMPLING, 5, None),
        (GRAMMAR, 5, "grammar"),
        (PROMPT_LOGPROBS, 5, None),
        (PROMPT_LOGPROBS, 6, None),
        (PROMPT_LOGPROBS, 7, "prompt logprobs"),
    ],
)
def test_special_rows_are_no_decode_step(sampling: wire.Sampling, num_prompt: int, expected: Obstacle | None) -> None:
    new = NewRow(4, sampling, num_prompt)
    assert is_special(new) == (sampling != SAMPLING)
    assert decode_obstacle(decode((0, 0), (1, 0)), {4: new, 9: NewRow(9, GRAMMAR)}) == expected
