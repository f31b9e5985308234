"""Tokens with a draft model or self-draft equal those without, in float64 without near-ties."""

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
from tests.runtime.equality.groups import groups
from tests.runtime.equality.requests import FIELDS, ROOMY, assert_equal, requests
from tests.runtime.rank.drafting.draft_runs import make_config, run
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve

METHODS = ("draft", "self_draft")
methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("drafts") / "model")


@pytest.fixture(scope="module")
def drafts(folder: Path) -> dict[str, dict[str, Any]]:
    """Speculation fields of a RankSpec, by method."""
    draft = save_draft(folder, folder.parent / "draft")
    exit = save_exit(folder, folder.parent / "exit.safetensors")
    return {
        "draft": {"speculative_method": "draft", "draft_dir": str(draft)},
        "self_draft": {"speculative_method": "self_draft", "draft_exit": str(exit)},
    }


@pytest.fixture(scope="module")
def twin(folder: Path) -> dict[str, str]:
    """The target as its own draft: always accepted for requests without state, if its pages are right."""
    return {"speculative_method": "draft", "draft_dir": str(save_draft(folder, folder.parent / "twin", noise=0.0))}


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    return run(folder, requests(), Build(torch.float64, num_pages=200), SchedulerConfig())[0]


def assert_speculated(counter: CountingRunner) -> None:
    share = counter.num_accepted / max(1, counter.num_proposed)
    assert counter.num_proposed > 20 and 0.1 <= share <= 0.95, f"{share:.0%} of {counter.num_proposed} draft tokens were accepted"


@methods
def test_draft_time_uses_the_clock_of_steps(folder: Path, drafts: dict[str, dict[str, Any]], method: Method) -> None:
    def work(runner: ModelRunner) -> set[float]:
        runner.clock = partial(next, itertools.count(0.0, 0.25))
        counter = CountingRunner(runner)
        serve(counter, requests()[:2], ROOMY, make_config(method))
        return counter.draft_times

    assert on_ranks(folder, [1], Build(torch.float64, num_pages=200, speculative=drafts[method]), work) == {0.25}


@methods
@groups
def test_every_sampling_mode_is_equal_with_a_draft(
    folder: Path, drafts: dict[str, Any], plain: list[Served], method: Method, pods: list[int], stages: int
) -> None:
    setup = Build(torch.float64, num_pages=200, stages=stages, speculative=drafts[method])
    served, counter = run(folder, requests(), setup, make_config(method), pods=pods)
    assert_equal(served, plain)
    assert_speculated(counter)


@methods
@pytest.mark.parametrize("stages", [1, 2])
def test_prompt_chunks_sample_equal_tokens(
    folder: Path, drafts: dict[str, Any], plain: list[Served], method: Method, stages: int
) -> None:
    setup = Build(torch.float64, num_pages=200, stages=stages, speculative=drafts[method])
    limits = Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=13)
    served, counter = run(folder, requests(), setup, make_config(method), limits, [stages])
    assert_equal(served, plain)
    assert_speculated(counter)


@methods
@pytest.mark.parametrize("stages", [1, 2])
def test_preempted_requests_sample_equal_tokens(
    folder: Path, drafts: dict[str, Any], plain: list[Served], method: Method, stages: int
) -> None:
    config = make_config(method, 6 if method == "draft" else 4)  # some are rejected with their pages
    setup = Build(torch.float64, num_pages=11, stages=stages, speculative=drafts[method])
    served, counter = run(
        folder, requests(), setup, config, Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64), [stages]
    )
    assert len(counter.admitted) > len(FIELDS), "requests were preempted"
    assert_equal(served, plain)
    assert counter.num_accepted > 0 and counter.num_cut > 0


@methods
def test_prompt_logprobs_are_complete_with_drafts(folder: Path, drafts: dict[str, Any], method: Method) -> None:
    submitted = requests(prompt_logprobs=1)
    whole = run(folder, submitted, Build(torch.float64, num_pages=200), SchedulerConfig())[0]
    setup = Build(torch.float64, num_pages=200, speculative=drafts[method])
    served, counter = run(
        folder, submitted, setup, make_config(method), Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=13)
    )
    assert_equal(served, whole)
    assert [sorted(one.prompt_details) for one in served] == [sorted(one.prompt_details) for one in whole]
    assert_speculated(counter)


def stateless() -> list[wire.Request]:
    """Requests without sampling state; some share prefixes."""
    rng = torch.Generator().manual_seed(8)
    common = torch.randint(0, 250, (37,), generator=rng).tolist()
    modes: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}]
    prompts = [common, common, [*common[:21], 1, 2, 3], common[:5], [*common, 9], common[9:]]
    return [
        wire.Request(
            id=str(n), epoch=1, prompt=prompt, delivered=[], sampling=wire.Sampling(max_tokens=30, seed=n, **modes[n % 3])
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
    """So its pages are right after prompt chunks, prefix sharing, copies and preemptions."""
    [whole, _] = run(folder, stateless(), Build(torch.float64, num_pages=200), SchedulerConfig())
    setup = Build(torch.float64, num_pages=num_pages, stages=stages, speculative=twin)
    served, counter = run(folder, stateless(), setup, make_config("draft"), limits, pods)
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    if num_pages < 100:
        assert len(counter.admitted) > len(served), "requests were preempted"
    assert counter.num_proposed > 10
    assert counter.num_accepted == counter.num_proposed, "every draft token equals the target's sample"


def test_draft_catches_up_with_tokens_decoded_without_it(folder: Path, twin: dict[str, str]) -> None:
    """Requests decode plainly while others compute prompts; depths differ from step to step."""
    submitted = [msgspec.structs.replace(one, speculation=Speculation(None, n % 3)) for n, one in enumerate(stateless())]
    [whole, _] = run(folder, submitted, Build(torch.float64, num_pages=200), SchedulerConfig())
    setup = Build(torch.float64, num_pages=200, speculative=twin)
    config = SchedulerConfig(
        speculation=SpeculationConfig(method="draft", num_tokens=4, is_adaptive=True, draft_methods=frozenset({"draft"}))
    )
    served, counter = run(folder, submitted, setup, config, Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=17))
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    assert 0 < counter.num_proposed < sum(len(one.tokens) for one in whole)
    assert counter.num_accepted == counter.num_proposed
