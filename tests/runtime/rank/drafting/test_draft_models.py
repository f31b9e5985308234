"""Tokens with drafts are those without, by a draft model and by the target's first layers. In float64: no excuse."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.speculation import Method, Speculation
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.test_sampling import FIELDS, ROOMY, assert_equal, requests
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import Served, Watched, serve

METHODS = ("draft", "self_draft")
GROUPS: dict[str, tuple[list[int], int]] = {"one": ([1], 1), "tp2": ([2], 1), "pp2": ([2], 2), "pp2 x tp2": ([4], 2)}
groups = pytest.mark.parametrize(("pods", "stages"), GROUPS.values(), ids=GROUPS.keys())
methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("drafts") / "model")


@pytest.fixture(scope="module")
def drafts(folder: Path) -> dict[str, dict[str, Any]]:
    """What a rank is told, by method."""
    draft = save_draft(folder, folder.parent / "draft")
    exit = save_exit(folder, folder.parent / "exit.safetensors")
    return {
        "draft": {"speculative_method": "draft", "draft_dir": str(draft)},
        "self_draft": {"speculative_method": "self_draft", "draft_exit": str(exit)},
    }


def rules(method: Method, num_tokens: int = 4) -> SchedulerConfig:
    return SchedulerConfig(
        speculating=SpeculationConfig(method=method, num_tokens=num_tokens, is_adaptive=False, drafts=frozenset({method}))
    )


def run(
    folder: Path, asked: list[wire.Request], made: Build, how: SchedulerConfig, limits: Limits = ROOMY, pods: Any = (1,)
) -> tuple[list[Served], Watched]:
    def work(runner: ModelRunner) -> tuple[list[Served], Watched]:
        watched = Watched(runner)
        return serve(watched, asked, limits, how), watched

    return on_ranks(folder, pods, made, work)


@pytest.fixture(scope="module")
def twin(folder: Path) -> dict[str, str]:
    """A draft that is the target itself: on requests without state it is never wrong, if its pages hold what they should."""
    return {"speculative_method": "draft", "draft_dir": str(save_draft(folder, folder.parent / "twin", noise=0.0))}


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    return run(folder, requests(), Build(torch.float64, num_pages=200), SchedulerConfig())[0]


def assert_path_taken(watched: Watched) -> None:
    share = watched.num_accepted / max(1, watched.num_proposed)
    assert watched.num_proposed > 20 and 0.1 <= share <= 0.95, f"{share:.0%} of {watched.num_proposed} proposals were accepted"


@methods
def test_draft_time_uses_the_clock_of_steps(folder: Path, drafts: dict[str, dict[str, Any]], method: Method) -> None:
    def work(runner: ModelRunner) -> set[float]:
        runner.clock = partial(next, itertools.count(0.0, 0.25))
        watched = Watched(runner)
        serve(watched, requests()[:2], ROOMY, rules(method))
        return watched.draft_times

    assert on_ranks(folder, [1], Build(torch.float64, num_pages=200, speculative=drafts[method]), work) == {0.25}


@methods
@groups
def test_every_sampling_mode_is_equal_with_a_draft(
    folder: Path, drafts: dict[str, Any], plain: list[Served], method: Method, pods: list[int], stages: int
) -> None:
    made = Build(torch.float64, num_pages=200, stages=stages, speculative=drafts[method])
    served, watched = run(folder, requests(), made, rules(method), pods=pods)
    assert_equal(served, plain)
    assert_path_taken(watched)


@methods
@pytest.mark.parametrize("stages", [1, 2])
def test_prompt_chunks_sample_equal_tokens(
    folder: Path, drafts: dict[str, Any], plain: list[Served], method: Method, stages: int
) -> None:
    made = Build(torch.float64, num_pages=200, stages=stages, speculative=drafts[method])
    limits = Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=13)
    served, watched = run(folder, requests(), made, rules(method), limits, [stages])
    assert_equal(served, plain)
    assert_path_taken(watched)


@methods
@pytest.mark.parametrize("stages", [1, 2])
def test_preempted_requests_sample_equal_tokens(
    folder: Path, drafts: dict[str, Any], plain: list[Served], method: Method, stages: int
) -> None:
    how = rules(method, 6 if method == "draft" else 4)  # some are rejected with their pages
    made = Build(torch.float64, num_pages=11, stages=stages, speculative=drafts[method])
    served, watched = run(
        folder, requests(), made, how, Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64), [stages]
    )
    assert len(watched.admitted) > len(FIELDS), "some were preempted"
    assert_equal(served, plain)
    assert watched.num_accepted > 0 and watched.num_cut > 0


@methods
def test_prompt_logprobs_are_complete_with_drafts(folder: Path, drafts: dict[str, Any], method: Method) -> None:
    asked = requests(prompt_logprobs=1)
    whole = run(folder, asked, Build(torch.float64, num_pages=200), SchedulerConfig())[0]
    made = Build(torch.float64, num_pages=200, speculative=drafts[method])
    served, watched = run(
        folder, asked, made, rules(method), Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=13)
    )
    assert_equal(served, whole)
    assert [sorted(one.prompt_details) for one in served] == [sorted(one.prompt_details) for one in whole]
    assert_path_taken(watched)


def stateless() -> list[wire.Request]:
    """Requests whose draws depend on nothing but scores; some begin alike, and go on from what others drew."""
    chance = torch.Generator().manual_seed(8)
    common = torch.randint(0, 250, (37,), generator=chance).tolist()
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}]
    prompts = [common, common, [*common[:21], 1, 2, 3], common[:5], [*common, 9], common[9:]]
    return [
        wire.Request(
            id=str(n), epoch=1, prompt=prompt, delivered=[], sampling=wire.Sampling(max_tokens=30, seed=n, **ways[n % 3])
        )
        for n, prompt in enumerate(prompts)
    ]


TIGHT: dict[str, tuple[Limits, int]] = {
    "together": (ROOMY, 200),
    "chunks of 7": (Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=7), 200),
    "one by one": (Limits(max_model_len=120, max_num_seqs=1, max_num_batched_tokens=11), 200),
    "few pages": (Limits(max_model_len=72, max_num_seqs=6, max_num_batched_tokens=64), 16),
}


@pytest.mark.parametrize(("pods", "stages"), [([1], 1), ([2], 2)], ids=["one", "pp2"])
@pytest.mark.parametrize(("limits", "num_pages"), TIGHT.values(), ids=TIGHT.keys())
def test_a_draft_that_is_the_target_is_never_wrong(
    folder: Path, twin: dict[str, str], limits: Limits, num_pages: int, pods: list[int], stages: int
) -> None:
    """So its pages hold what they should: prompts in chunks, shared beginnings, copies, and what was preempted."""
    [whole, _] = run(folder, stateless(), Build(torch.float64, num_pages=200), SchedulerConfig())
    made = Build(torch.float64, num_pages=num_pages, stages=stages, speculative=twin)
    served, watched = run(folder, stateless(), made, rules("draft"), limits, pods)
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    if num_pages < 100:
        assert len(watched.admitted) > len(served), "some were preempted"
    assert watched.num_proposed > 10
    assert watched.num_accepted == watched.num_proposed, "every proposal is what the target draws"


def test_draft_catches_up_with_tokens_decoded_without_it(folder: Path, twin: dict[str, str]) -> None:
    """Requests that wait for others' prompts are decoded plainly meanwhile; depths differ from step to step."""
    asked = [msgspec.structs.replace(one, speculation=Speculation(None, n % 3)) for n, one in enumerate(stateless())]
    [whole, _] = run(folder, asked, Build(torch.float64, num_pages=200), SchedulerConfig())
    made = Build(torch.float64, num_pages=200, speculative=twin)
    how = SchedulerConfig(
        speculating=SpeculationConfig(method="draft", num_tokens=4, is_adaptive=True, drafts=frozenset({"draft"}))
    )
    served, watched = run(folder, asked, made, how, Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=17))
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    assert 0 < watched.num_proposed < sum(len(one.tokens) for one in whole)
    assert watched.num_accepted == watched.num_proposed
