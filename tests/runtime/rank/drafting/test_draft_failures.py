"""A draft that fails in a step is dropped: its group continues without, reports why, and tokens are equal."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx_api.speculation import Method
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.errors import DraftLost
from phalanx_runtime.model.attention.paged import LayerCache, StepBatch
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.exit import Exit, read_exit
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.drafting.draft_model import DraftModel, RemoteDraft
from phalanx_runtime.rank.drafting.proposer import Proposer
from phalanx_runtime.rank.drafting.self_draft import SelfDraft
from phalanx_runtime.rank.memory.kv_cache import make_caches, page_bytes
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.groups import GROUPS, groups
from tests.runtime.equality.requests import ROOMY, assert_equal, requests
from tests.runtime.rank.drafting.draft_runs import make_config
from tests.runtime.ranks import PAGE_SIZE, PLAIN, Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("failures") / "model")


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return save_draft(folder, folder.parent / "draft")


@pytest.fixture(scope="module")
def exit(folder: Path) -> Path:
    return save_exit(folder, folder.parent / "exit.safetensors")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    return on_ranks(folder, [1], Build(torch.float64, num_pages=200), lambda runner: serve(runner, requests(), ROOMY))


class FailingModel:
    """A model that fails after `steps` steps."""

    def __init__(self, inner: Model, steps: int) -> None:
        self._inner = inner
        self.steps = steps
        self.kv, self.num_bytes, self.positions = inner.kv, inner.num_bytes, inner.positions
        self.vocab_size, self.width, self.embedding_size = inner.vocab_size, inner.width, 0

    def hidden(self, batch: StepBatch, caches: list[LayerCache], stage_input: Tensor | None = None) -> Tensor:
        self.steps -= 1
        if self.steps < 0:
            raise RuntimeError("out of memory")
        return self._inner.hidden(batch, caches, stage_input)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._inner.logits(hidden)

    def pooled_states(self, hidden: Tensor) -> Tensor:
        return hidden


@dataclass(frozen=True, slots=True)
class FailingExit(Exit):
    """An exit that fails after `calls`."""

    calls: Iterator[int]

    def __call__(self, states: Tensor) -> Tensor:
        if next(self.calls, None) is None:
            raise RuntimeError("out of memory")
        return Exit.__call__(self, states)


def failing_model(
    draft: Path, steps: int, target: Model, caches: list[LayerCache], pool: PoolShape, peers: Collective
) -> Proposer:
    if peers.rank:
        return RemoteDraft(peers)
    form = LoadOptions(dtype=torch.float64, device=CPU, kernels=PLAIN, positions=256)
    model = FailingModel(open_model(draft).load(SoloCollective(), form, stage=Stage()), steps)
    own = make_caches(model.kv, pool.num_pages, PAGE_SIZE, torch.float64, CPU)
    shape = CacheShape(PAGE_SIZE, model.kv.kv_heads, page_bytes(model.kv, PAGE_SIZE, torch.float64) // 4)
    return DraftModel(model, own, BatchBuilder(shape, torch.float64, CPU), model.vocab_size, peers)


def failing_exit(exit: Path, steps: int, target: Model, caches: list[LayerCache], pool: PoolShape, peers: Collective) -> Proposer:
    assert isinstance(target, Decoder)
    loaded = read_exit(exit, torch.float64, CPU)
    exit_layer = FailingExit(loaded.card, loaded.weight, loaded.bias, iter(range(steps)))
    return SelfDraft(target, caches, peers, loaded.card.num_layers, exit_layer)


def run(folder: Path, method: Method, setup: Build, pods: list[int]) -> tuple[list[Served], CountingRunner]:
    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        served = serve(counter, requests(), ROOMY, make_config(method))
        assert runner.draft_failure == counter.draft_failure
        assert runner.page_access().open_draft() is None, "its pages are incomplete"
        return served, counter

    return on_ranks(folder, pods, setup, work)


def assert_continued(counter: CountingRunner, messages: list[str], steps: int, why: str) -> None:
    assert counter.draft_failure == why
    assert sum("the group continues without speculation" in message for message in messages) == 1
    num_plans = counter.most_in_flight + steps // 4  # plans with 4 passes each, and those setup before the failure was known
    assert counter.num_proposed <= 8 * 4 * num_plans, "later plans have no drafts"


@pytest.mark.parametrize("steps", [0, 1, 9])
@groups
def test_a_draft_model_that_fails_is_dropped(
    folder: Path, draft: Path, plain: list[Served], caplog: pytest.LogCaptureFixture, pods: list[int], stages: int, steps: int
) -> None:
    """The other ranks of the stage and later stages receive empty drafts."""
    setup = Build(torch.float64, num_pages=200, stages=stages, make_proposer=partial(failing_model, draft, steps))
    with caplog.at_level(logging.ERROR):
        served, counter = run(folder, "draft", setup, pods)
    assert_equal(served, plain)
    assert_continued(counter, caplog.messages, steps, "a step of the draft model failed: out of memory")


@pytest.mark.parametrize("steps", [0, 1, 9])
@pytest.mark.parametrize("group", ["one", "pp2"])
def test_failing_self_draft_is_dropped(
    folder: Path, exit: Path, plain: list[Served], caplog: pytest.LogCaptureFixture, group: str, steps: int
) -> None:
    pods, stages = GROUPS[group]
    setup = Build(torch.float64, num_pages=200, stages=stages, make_proposer=partial(failing_exit, exit, steps))
    with caplog.at_level(logging.ERROR):
        served, counter = run(folder, "self_draft", setup, pods)
    assert_equal(served, plain)
    assert_continued(counter, caplog.messages, steps, "a step of the self-draft failed: out of memory")


def test_failing_exit_layers_on_ranks_end_the_incarnation(folder: Path, exit: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other ranks wait in a pass, so the supervisor restarts the group without the draft."""
    setup = Build(torch.float64, num_pages=200, make_proposer=partial(failing_exit, exit, 3))
    with pytest.raises(DraftLost, match="a step of the self-draft failed: out of memory"):
        run(folder, "self_draft", setup, [2])
    assert any("the group restarts without speculation" in message for message in caplog.messages)
    assert not any("continues" in message for message in caplog.messages)
