"""Requests with adapters keep their tokens under chunks, batches, preemption, shared prefixes, speculation and moves, in float64.

The plain run has each request alone, on one rank, nothing shared; it equals that of weights with the adapter merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.wire.router import choice_seed
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.drafting.proposer import NO_PROPOSER, Proposer
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.adapters import load_frame, merge, save_adapter
from tests.runtime.equality.groups import groups
from tests.runtime.equality.oracle import Oracle
from tests.runtime.equality.requests import FIELDS, ROOMY, SHAPES, assert_equal, repeating, requests
from tests.runtime.moving_engines import running_groups
from tests.runtime.moving_requests import TOKENS, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

RULES = SchedulerConfig(max_loras=2)
ALONE = SchedulerConfig(max_loras=2, prefix_caching=False)
NAMES = ("first", "second")


@dataclass(frozen=True)
class Models:
    """A base model and its adapters."""

    base: Path
    frames: list[wire.LoadAdapter]

    def adapted(self, submitted: Sequence[wire.Request]) -> list[wire.Request]:
        """Returns the requests with no adapter, the first and the second one, in turn."""
        adapters = [None, *(frame.adapter for frame in self.frames)]
        return [msgspec.structs.replace(one, adapter=adapters[at % 3]) for at, one in enumerate(submitted)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("adapters")
    base = save_tiny(folder / "base", "qwen2", num_hidden_layers=2)
    paths = [save_adapter(folder / name, base, seed, rank=2 + 4 * seed) for seed, name in enumerate(NAMES)]
    return Models(base, [load_frame(path, name) for path, name in zip(paths, NAMES, strict=True)])


def build(stages: int = 1, num_pages: int = 200, proposer: Proposer = NO_PROPOSER, **more: Any) -> Build:
    return Build(torch.float64, num_pages=num_pages, stages=stages, max_loras=2, proposer=proposer, **more)


def run(
    models: Models,
    submitted: Sequence[wire.Request],
    setup: Build,
    pods: Sequence[int] = (1,),
    limits: Limits = ROOMY,
    rules: SchedulerConfig = RULES,
) -> tuple[list[Served], CountingRunner]:
    """Loads the adapters on all ranks and serves the requests."""

    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, submitted, limits, rules, loader=runner.adapters, adapters=models.frames), counter

    return on_ranks(models.base, pods, setup, work)


def alone(models: Models, submitted: Sequence[wire.Request]) -> list[Served]:
    return [run(models, [one], build(), rules=ALONE)[0][0] for one in submitted]


@pytest.fixture(scope="module")
def plain(models: Models) -> list[Served]:
    return alone(models, models.adapted(requests()))


def test_plain_runs_equal_those_of_merged_weights(models: Models, plain: list[Served], tmp_path: Path) -> None:
    folders = [models.base, *(merge(tmp_path / one.adapter.name, models.base, Path(one.path)) for one in models.frames)]
    for at, one in enumerate(requests()):
        folder = folders[at % 3]
        [merged] = on_ranks(folder, [1], Build(torch.float64), lambda runner, one=one: serve(runner, [one], ROOMY))  # type: ignore[misc]
        assert merged.tokens == plain[at].tokens
        if at % 3:
            [base] = on_ranks(models.base, [1], Build(torch.float64), lambda runner, one=one: serve(runner, [one], ROOMY))  # type: ignore[misc]
            assert base.tokens != merged.tokens, "the adapter changes the tokens"


@pytest.mark.parametrize("limits", SHAPES.values(), ids=SHAPES.keys())
@groups
def test_batches_and_chunks_with_adapters_change_no_token(
    models: Models, plain: list[Served], pods: list[int], stages: int, limits: Limits
) -> None:
    assert_equal(run(models, models.adapted(requests()), build(stages), pods, limits)[0], plain)


@groups
def test_preempted_requests_keep_their_adapter(models: Models, plain: list[Served], pods: list[int], stages: int) -> None:
    limits = Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64)
    served, counter = run(models, models.adapted(requests()), build(stages, num_pages=11), pods, limits)
    assert len(counter.admitted) > len(FIELDS), "requests were preempted"
    assert_equal(served, plain)


@groups
def test_only_requests_of_one_adapter_share_pages(models: Models, pods: list[int], stages: int) -> None:
    """Two choices of each, one after the other, of one prompt: the second of each adapter finds its pages, the first none."""
    one = requests()[-1]
    sampling = msgspec.structs.replace(one.sampling, temperature=1.0, grammar=None, stop_token_ids=[])
    both = [msgspec.structs.replace(sampling, seed=choice_seed(5, choice)) for choice in range(2)]
    adapters = [None, *(frame.adapter for frame in models.frames)]
    submitted = [msgspec.structs.replace(one, sampling=choice, adapter=adapter) for choice in both for adapter in adapters]
    in_turn = Limits(max_model_len=120, max_num_seqs=1, max_num_batched_tokens=64)
    served = run(models, submitted, build(stages), pods, in_turn)[0]
    assert [answer.cached_tokens > 0 for answer in served] == [False] * 3 + [True] * 3
    expected = alone(models, submitted)
    assert [answer.tokens for answer in served] == [answer.tokens for answer in expected]
    assert len({tuple(answer.tokens) for answer in expected}) == len(submitted)


@groups
def test_draft_tokens_leave_those_of_adapters_unchanged(
    models: Models, plain: list[Served], pods: list[int], stages: int
) -> None:
    submitted = models.adapted(requests())
    oracle = Oracle({one.sampling.seed: whole.tokens for one, whole in zip(submitted, plain, strict=True)})
    drafts = SpeculationConfig(method="draft", num_tokens=5, is_adaptive=False, draft_methods=frozenset({"draft"}))
    rules = replace(RULES, speculation=drafts)
    served, counter = run(models, submitted, build(stages, proposer=oracle), pods, rules=rules)
    assert_equal(served, plain)
    assert 0 < counter.num_accepted < counter.num_proposed


def test_lookups_and_self_drafts_leave_tokens_of_adapters_unchanged(models: Models) -> None:
    submitted = models.adapted(repeating())
    expected = alone(models, submitted)
    lookups = replace(RULES, speculation=SpeculationConfig(method="ngram", num_tokens=5, is_adaptive=False))
    served, counter = run(models, submitted, build(), rules=lookups)
    assert counter.num_accepted > 0
    assert [answer.tokens for answer in served] == [answer.tokens for answer in expected]
    method = SpeculationConfig(method="self_draft", num_tokens=3, is_adaptive=False, draft_methods=frozenset({"self_draft"}))
    setup = build(speculative={"speculative_method": "self_draft", "speculative_ratio": 0.5})
    served, counter = run(models, submitted, setup, rules=replace(RULES, speculation=method))
    assert counter.num_proposed > 0
    assert [answer.tokens for answer in served] == [answer.tokens for answer in expected]


@pytest.mark.parametrize(("pods", "stages"), [([1], 1), ([2], 2)], ids=["one", "pp2"])
def test_moved_and_replayed_requests_keep_their_adapter(models: Models, pods: list[int], stages: int) -> None:
    """Between groups that hold the adapters in other slots. A replay has the tokens that the client got already."""
    submitted = models.adapted([make_request(f"request {number}") for number in range(6)])
    rules = SchedulerConfig(model="tiny", max_loras=2)
    with running_groups(models.base, [pods, pods], build(stages), rules=rules) as field:
        for group, frames in zip(field.groups, (models.frames, models.frames[::-1]), strict=True):
            for frame in frames:
                group.channel.put(frame)
        plain = undisturbed(field.mover, submitted)
        expected = alone(models, submitted)
        assert [stream.tokens for stream in plain] == [answer.tokens for answer in expected]
        assert moved_back_and_forth(field.mover, submitted, plain) > 0
        replays = []
        for request, whole in zip(submitted, plain, strict=True):
            half = whole.tokens[: TOKENS // 3]
            replays.append(field.mover.submit(msgspec.structs.replace(request, delivered=half), group=1))
            replays[-1].tokens += half
        field.mover.until(lambda: all(replay.finish for replay in replays))
        assert [replay.tokens for replay in replays] == [whole.tokens for whole in plain]
