"""Tokens with draft tokens equal those without, by an oracle and by n-gram lookups. In float64, without near-ties.

Tests pair sampling modes with disturbances; `bench.speculation.product` runs the full product.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.speculation import Speculation
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.drafting.proposer import NO_PROPOSER, Proposer
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.groups import groups
from tests.runtime.equality.oracle import Oracle
from tests.runtime.equality.requests import FIELDS, NUM_TOKENS, REPEATING, ROOMY, assert_equal, repeating, requests
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

DRAFTS = SchedulerConfig(
    speculation=SpeculationConfig(method="draft", num_tokens=5, is_adaptive=False, draft_methods=frozenset({"draft"}))
)
LOOKUPS = SchedulerConfig(speculation=SpeculationConfig(method="ngram", num_tokens=5, is_adaptive=False))
PLAIN = SchedulerConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("speculation") / "model", "qwen2", num_hidden_layers=2)


def build(num_pages: int = 200, stages: int = 1, oracle: Proposer = NO_PROPOSER) -> Build:
    return Build(torch.float64, num_pages=num_pages, stages=stages, proposer=oracle)


def run(
    folder: Path,
    submitted: list[wire.Request],
    config: SchedulerConfig,
    limits: Limits = ROOMY,
    setup: Build | None = None,
    pods: Any = (1,),
) -> tuple[list[Served], CountingRunner]:
    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, submitted, limits, config), counter

    return on_ranks(folder, pods, setup or build(), work)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    """Answers without draft tokens."""
    return run(folder, requests(), PLAIN)[0]


@pytest.fixture(scope="module")
def oracle(plain: list[Served]) -> Oracle:
    return Oracle({one.sampling.seed: whole.tokens for one, whole in zip(requests(), plain, strict=True)})


def assert_speculated(counter: CountingRunner, least: float = 0.2) -> None:
    assert counter.num_proposed > 20
    share = counter.num_accepted / counter.num_proposed
    assert least <= share <= 0.9, f"{share:.0%} of {counter.num_proposed} draft tokens were accepted"


@groups
def test_every_sampling_mode_is_equal_with_drafts(
    folder: Path, plain: list[Served], oracle: Oracle, pods: list[int], stages: int
) -> None:
    served, counter = run(folder, requests(), DRAFTS, setup=build(stages=stages, oracle=oracle), pods=pods)
    assert_equal(served, plain)
    assert_speculated(counter)


@pytest.mark.parametrize("name", FIELDS)
def test_each_sampling_mode_alone_takes_fewer_steps(folder: Path, plain: list[Served], oracle: Oracle, name: str) -> None:
    at = list(FIELDS).index(name)
    served, counter = run(folder, [requests()[at]], DRAFTS, setup=build(oracle=oracle))
    assert_equal(served, [plain[at]], [name])
    assert counter.num_accepted >= 0.3 * len(plain[at].tokens), "many tokens are in runs"


@pytest.mark.parametrize("stages", [1, 2])
def test_prompt_chunks_and_few_rows_sample_equal_tokens(folder: Path, plain: list[Served], oracle: Oracle, stages: int) -> None:
    limits = Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=13)
    served, counter = run(folder, requests(), DRAFTS, limits, build(stages=stages, oracle=oracle), [stages])
    assert_equal(served, plain)
    assert_speculated(counter)


@pytest.mark.parametrize("config", [DRAFTS, LOOKUPS], ids=["drafts", "lookups"])
@pytest.mark.parametrize("stages", [1, 2])
def test_preempted_requests_sample_equal_tokens(
    folder: Path, plain: list[Served], oracle: Oracle, stages: int, config: SchedulerConfig
) -> None:
    setup = build(11, stages, oracle)
    served, counter = run(
        folder, requests(), config, Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64), setup, [stages]
    )
    assert len(counter.admitted) > len(FIELDS), "requests were preempted"
    assert_equal(served, plain)
    assert counter.num_proposed > 0
    if config is DRAFTS:
        assert counter.num_accepted > 0
        assert counter.num_cut > 0, "pages of rejected draft tokens were freed and allocated again"


@pytest.mark.parametrize("delivered", [1, 5, 13])
def test_replayed_requests_sample_equal_tokens(folder: Path, plain: list[Served], oracle: Oracle, delivered: int) -> None:
    replayed = [
        wire.Request(id=one.id, epoch=2, prompt=one.prompt, delivered=whole.tokens[:delivered], sampling=one.sampling)
        for one, whole in zip(requests(), plain, strict=True)
        if len(whole.tokens) > delivered
    ]
    served, counter = run(folder, replayed, DRAFTS, setup=build(oracle=oracle))
    rest = {one.id: answer for one, answer in zip(replayed, served, strict=True)}
    for number, whole in enumerate(plain):
        if str(number) in rest:
            assert rest[str(number)].tokens == whole.tokens[delivered:]
    assert counter.num_accepted > 0


@pytest.mark.parametrize("stages", [1, 2])
def test_later_requests_find_pages_filled_by_runs(folder: Path, plain: list[Served], stages: int) -> None:
    """A second request continues the first: a part of its prefix was computed as draft tokens."""
    one = next(r for r, name in zip(requests(), FIELDS, strict=True) if name == "seeded")
    first = plain[list(FIELDS).index("seeded")].tokens
    later = msgspec.structs.replace(one, id="later", prompt=[*one.prompt, *first, 5, 6, 7])
    [alone] = run(folder, [later], PLAIN)[0]
    oracle = Oracle({one.sampling.seed: first})

    def work(runner: ModelRunner) -> tuple[list[int], int, int]:
        counter = CountingRunner(runner)
        scheduler_limits = replace(ROOMY, max_num_seqs=1)
        answers = serve(counter, [one, msgspec.structs.replace(later, speculation=Speculation("none"))], scheduler_limits, DRAFTS)
        return answers[1].tokens, counter.num_computed - counter.num_proposed, counter.num_accepted

    tokens, computed, accepted = on_ranks(folder, [stages], build(stages=stages, oracle=oracle), work)
    assert tokens == alone.tokens
    assert accepted > 5
    whole = len(one.prompt) + len(first) - 1 - accepted + len(later.prompt) + len(alone.tokens) - 1
    assert computed <= whole - (len(one.prompt) + len(first) - 1) // 8 * 8, "the later one found all full pages"


def test_siblings_share_their_prompt_and_speculate_separately(folder: Path) -> None:
    prompt = requests()[7].prompt
    siblings = [
        wire.Request(
            id=str(seed),
            epoch=1,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=NUM_TOKENS, seed=seed, temperature=1.0),
        )
        for seed in range(4)
    ]
    whole = run(folder, siblings, PLAIN)[0]
    oracle = Oracle({seed: answer.tokens for seed, answer in enumerate(whole)})
    served, counter = run(folder, siblings, DRAFTS, setup=build(oracle=oracle))
    assert [answer.tokens for answer in served] == [answer.tokens for answer in whole]
    assert_speculated(counter)


def test_speculating_and_plain_requests_share_steps(folder: Path, plain: list[Served], oracle: Oracle) -> None:
    methods: list[Speculation] = [Speculation("none"), Speculation(), Speculation("ngram", 2), Speculation(None, 1)]
    submitted = [msgspec.structs.replace(one, speculation=methods[at % 4]) for at, one in enumerate(requests())]
    served, counter = run(folder, submitted, DRAFTS, setup=build(oracle=oracle))
    assert_equal(served, plain)
    assert counter.num_accepted > 0
    assert counter.num_mixed > 0, "steps had both"


@groups
def test_lookups_sample_equal_tokens(folder: Path, pods: list[int], stages: int) -> None:
    whole = run(folder, repeating(), PLAIN)[0]
    served, counter = run(folder, repeating(), LOOKUPS, setup=build(stages=stages), pods=pods)
    assert_equal(served, whole, list(REPEATING))
    assert_speculated(counter)


def test_stop_token_inside_a_run_ends_the_request(folder: Path, plain: list[Served]) -> None:
    at = list(FIELDS).index("seeded")
    one, whole = requests()[at], plain[at].tokens
    cases: list[Callable[[wire.Sampling], wire.Sampling]] = [
        lambda s: msgspec.structs.replace(s, stop_token_ids=[whole[6]]),
        lambda s: msgspec.structs.replace(s, stop_token_ids=[whole[7]], min_tokens=3),
        lambda s: msgspec.structs.replace(s, max_tokens=7),
    ]
    for change in cases:
        submitted = msgspec.structs.replace(one, sampling=change(one.sampling))
        [expected] = run(folder, [submitted], PLAIN)[0]
        [served], counter = run(folder, [submitted], DRAFTS, setup=build(oracle=Oracle({one.sampling.seed: whole})))
        assert (served.tokens, served.finish) == (expected.tokens, expected.finish)
        assert counter.num_accepted > 1
