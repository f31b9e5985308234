"""Whole engines whose steps are queued on the device, in the interpreter: tokens equal those of the host path, with any lag."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as modified
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from phalanx_api import wire
from phalanx_api.speculation import Tree
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.rank.device.device_step import DeviceStep, StepObstacle
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.adapters import load_frame, save_adapter
from tests.runtime.equality.requests import FIELDS, repeating, requests
from tests.runtime.lag import lagging
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

LIMITS = Limits(max_model_len=120, max_num_seqs=4, max_num_batched_tokens=48)
NUM_TOKENS = 5
ON_DEVICE = ["seeded", "filters", "penalties", "allowed, min tokens"]
"""Modes that `RowState` admits."""
HOST = Build(torch.float32, num_pages=200)
DEVICE = Build(torch.float32, num_pages=200, device_rows=4)
NO_SPECULATION = SchedulerConfig()
NGRAMS = SchedulerConfig(speculation=SpeculationConfig(method="ngram", num_tokens=3, is_adaptive=False))
NGRAM_TREES = SchedulerConfig(speculation=SpeculationConfig(method="ngram", num_tokens=4, is_adaptive=False, tree=Tree([2, 2])))


@dataclass(frozen=True)
class Steps:
    """Steps of one run: queued ones, those of graphs, and those of the host by obstacle."""

    launched: int
    graphs: int
    obstacles: Counter[StepObstacle]
    accepted: int
    adapted_graphs: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("device") / "model", "qwen3")


def chosen(names: list[str], logprobs: int | None = None, num_tokens: int = NUM_TOKENS) -> list[wire.Request]:
    by_name = dict(zip(FIELDS, requests(logprobs=logprobs), strict=True))
    return [limited(by_name[name], num_tokens) for name in names]


def limited(request: wire.Request, num_tokens: int) -> wire.Request:
    return replace(request, sampling=replace(request.sampling, max_tokens=num_tokens))


def answers(
    folder: Path,
    build: Build,
    submitted: list[wire.Request],
    config: SchedulerConfig = NO_SPECULATION,
    pods: Sequence[int] = (1,),
    adapters: Sequence[wire.LoadAdapter] = (),
) -> tuple[list[Served], Steps]:
    def work(runner: ModelRunner) -> tuple[list[Served], Steps]:
        counter = CountingRunner(runner)
        served = serve(counter, submitted, LIMITS, config, loader=runner.adapters, adapters=adapters)
        step = runner.device_step
        if not isinstance(step, DeviceStep):
            return served, Steps(0, 0, Counter(), counter.num_accepted)
        graphs = step.graphs.num_replays.total(), step.adapted_graphs.num_replays.total()
        return served, Steps(step.num_launched, sum(graphs), step.obstacles, counter.num_accepted, graphs[1])

    return on_ranks(folder, pods, build, work)


def check(
    folder: Path,
    submitted: list[wire.Request],
    config: SchedulerConfig = NO_SPECULATION,
    pods: Sequence[int] = (1,),
    adapters: Sequence[wire.LoadAdapter] = (),
) -> Steps:
    """Compares the device path of the ranks with the host path of one rank; returns the steps of rank 0."""
    with lagging(0):
        expected, _ = answers(folder, modified(HOST, max_loras=len(adapters)), submitted, config, adapters=adapters)
    device = modified(DEVICE, max_loras=len(adapters), kernels=Kernels(triton=True))
    found, steps = answers(folder, device, submitted, config, pods, adapters)
    for request, one, other in zip(submitted, found, expected, strict=True):
        assert (one.tokens, one.finish) == (other.tokens, other.finish), request.id
        for detail, same in zip(one.details, other.details, strict=True):
            assert (detail is None) == (same is None)
            if detail is not None and same is not None:
                assert detail.logprob == pytest.approx(same.logprob, abs=1e-4)
                assert (detail.rank, detail.top_ids) == (same.rank, same.top_ids)
    return steps


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])  # the interpreter takes its time
def test_graphs_and_eager_steps_sample_the_same_tokens(folder: Path, lag: int) -> None:
    """Prompts in chunks are eager steps, decodes are graphs; one has a row of padding."""
    with lagging(lag):
        steps = check(folder, [limited(one, size) for one, size in zip(chosen(ON_DEVICE), (3, 5, 5, 5), strict=True)])
    assert steps.launched > steps.graphs >= NUM_TOKENS - 2
    assert not steps.obstacles


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_graphs_add_the_adapters_of_their_rows(folder: Path, tmp_path: Path, lag: int) -> None:
    """Adapters are loaded after the captures; a row is used again with another one."""
    frames = [load_frame(save_adapter(tmp_path / name, folder, len(name), rank=3), name) for name in ("a", "bc")]
    owners = [frames[0].adapter, frames[1].adapter, None, frames[0].adapter, frames[1].adapter]
    sizes = zip(chosen([*ON_DEVICE, "greedy"]), owners, (3, 5, 5, 5, 3), strict=True)
    submitted = [replace(limited(one, size), adapter=adapter) for one, adapter, size in sizes]
    with lagging(lag):
        steps = check(folder, submitted, SchedulerConfig(max_loras=2), adapters=frames)
    assert steps.launched > steps.graphs >= steps.adapted_graphs >= NUM_TOKENS - 2
    assert not steps.obstacles


@pytest.mark.slow
def test_logprobs_of_the_device_are_those_of_the_host(folder: Path) -> None:
    with lagging(1):
        steps = check(folder, chosen(ON_DEVICE, logprobs=2, num_tokens=4))
    assert steps.launched > 3 and not steps.graphs and not steps.obstacles


@pytest.mark.slow
def test_rows_of_the_host_and_the_device_share_steps(folder: Path) -> None:
    """A row with penalties stays on the host after its first step there, also when the other rows have ended."""
    submitted = [limited(one, size) for one, size in zip(chosen(["grammar", "penalties", "seeded"]), (2, 6, 6), strict=True)]
    with lagging(1):
        steps = check(folder, submitted)
    assert steps.obstacles["host rows"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("config", [NGRAMS, NGRAM_TREES], ids=["chains", "trees"])
def test_draft_tokens_are_verified_on_the_device(folder: Path, config: SchedulerConfig) -> None:
    submitted = [limited(one, 9) for one in repeating()[:3]]
    steps = check(folder, [replace(one, sampling=replace(one.sampling, logprobs=None)) for one in submitted], config)
    assert steps.launched > 3 and not steps.obstacles
    assert steps.accepted > 2


@pytest.mark.slow
@pytest.mark.parametrize("pods", [[2], [1, 1, 1]], ids=str)
def test_several_ranks_sample_on_their_devices(folder: Path, pods: list[int]) -> None:
    """Three ranks have uneven heads and vocabularies. A row with a grammar ends first: the ranks get its tokens from rank 0."""
    names = ["grammar", "seeded", "filters", "penalties"]
    submitted = [limited(one, size) for one, size in zip(chosen(names), (1, 4, 6, 5), strict=True)]
    with lagging(1):
        steps = check(folder, submitted, pods=pods)
    assert steps.obstacles["host rows"] > 0 and steps.graphs > 1 and steps.launched > steps.graphs


@pytest.mark.slow
def test_draft_tokens_are_verified_on_two_devices(folder: Path) -> None:
    submitted = [limited(one, 9) for one in repeating()[:3]]
    steps = check(folder, [replace(one, sampling=replace(one.sampling, logprobs=None)) for one in submitted], NGRAMS, pods=[2])
    assert steps.launched > 3 and not steps.obstacles
    assert steps.accepted > 2


@pytest.mark.slow
def test_penalties_with_draft_tokens_are_verified_by_the_host(folder: Path) -> None:
    steps = check(folder, [limited(repeating()[at], 12) for at in (3, 0)], NGRAMS)
    assert steps.obstacles["penalties with drafts"] > 0 and steps.obstacles["host rows"] > 0


@pytest.mark.slow
def test_device_pools_the_vectors_of_the_host(folder: Path) -> None:
    """Beside decodes, in chunks; the steps without an embedding are graphs again."""
    sampling = wire.Sampling(max_tokens=0, seed=0)
    embeddings = [
        wire.Request(id=pooling, epoch=0, prompt=list(range(60)), delivered=[], sampling=sampling, pooling=pooling)
        for pooling in get_args(wire.Pooling)
    ]
    submitted = [*embeddings, *chosen(ON_DEVICE[:1])]
    with lagging(0):
        expected, _ = answers(folder, HOST, submitted)
    with lagging(1):
        found, steps = answers(folder, DEVICE, submitted)
    assert steps.launched > steps.graphs > 0 and not steps.obstacles
    assert found[-1].tokens == expected[-1].tokens
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert (one.finish, one.tokens) == ("stop", [])
        np.testing.assert_allclose(np.frombuffer(one.vector, "<f4"), np.frombuffer(other.vector, "<f4"), atol=1e-4)
