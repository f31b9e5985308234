"""Tokens with proposals are those without: by a proposer that is right two times of three, and by lookups. In float64: no excuse.

Each pairs ways to sample with ways to be disturbed; all of them together are run by `bench.speculation.product`.
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
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.oracle import Oracle
from tests.runtime.equality.test_sampling import FIELDS, NUM_TOKENS, ROOMY, assert_equal, requests
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import Served, Watched, serve
from tests.runtime.tiny import EOS_ID, save_tiny

DRAFTS = SchedulerConfig(
    speculating=SpeculationConfig(method="draft", num_tokens=5, is_adaptive=False, drafts=frozenset({"draft"}))
)
LOOKUPS = SchedulerConfig(speculating=SpeculationConfig(method="ngram", num_tokens=5, is_adaptive=False))
PLAIN = SchedulerConfig()
GROUPS: dict[str, tuple[list[int], int]] = {"one": ([1], 1), "tp2": ([2], 1), "pp2": ([2], 2), "pp2 x tp2": ([4], 2)}
groups = pytest.mark.parametrize(("pods", "stages"), GROUPS.values(), ids=GROUPS.keys())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("speculation") / "model", "qwen2", num_hidden_layers=2)


def build(num_pages: int = 200, stages: int = 1, oracle: Oracle | None = None) -> Build:
    return Build(torch.float64, num_pages=num_pages, stages=stages, proposer=oracle)


def run(
    folder: Path,
    asked: list[wire.Request],
    rules: SchedulerConfig,
    limits: Limits = ROOMY,
    made: Build | None = None,
    pods: Any = (1,),
) -> tuple[list[Served], Watched]:
    def work(runner: ModelRunner) -> tuple[list[Served], Watched]:
        watched = Watched(runner)
        return serve(watched, asked, limits, rules), watched

    return on_ranks(folder, pods, made or build(), work)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    """What each of the requests gets without proposals."""
    return run(folder, requests(), PLAIN)[0]


@pytest.fixture(scope="module")
def oracle(plain: list[Served]) -> Oracle:
    return Oracle({one.sampling.seed: whole.tokens for one, whole in zip(requests(), plain, strict=True)})


def assert_path_taken(watched: Watched, least: float = 0.2) -> None:
    assert watched.num_proposed > 20
    share = watched.num_accepted / watched.num_proposed
    assert least <= share <= 0.9, f"{share:.0%} of {watched.num_proposed} proposals were accepted"


@groups
def test_every_sampling_mode_is_equal_with_drafts(
    folder: Path, plain: list[Served], oracle: Oracle, pods: list[int], stages: int
) -> None:
    served, watched = run(folder, requests(), DRAFTS, made=build(stages=stages, oracle=oracle), pods=pods)
    assert_equal(served, plain)
    assert_path_taken(watched)


@pytest.mark.parametrize("name", FIELDS)
def test_each_way_to_sample_alone_takes_fewer_steps(folder: Path, plain: list[Served], oracle: Oracle, name: str) -> None:
    at = list(FIELDS).index(name)
    served, watched = run(folder, [requests()[at]], DRAFTS, made=build(oracle=oracle))
    assert_equal(served, [plain[at]], [name])
    assert watched.num_accepted >= 0.3 * len(plain[at].tokens), "many tokens came in runs"


@pytest.mark.parametrize("stages", [1, 2])
def test_prompt_chunks_and_few_rows_sample_equal_tokens(folder: Path, plain: list[Served], oracle: Oracle, stages: int) -> None:
    limits = Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=13)
    served, watched = run(folder, requests(), DRAFTS, limits, build(stages=stages, oracle=oracle), [stages])
    assert_equal(served, plain)
    assert_path_taken(watched)


@pytest.mark.parametrize("rules", [DRAFTS, LOOKUPS], ids=["drafts", "lookups"])
@pytest.mark.parametrize("stages", [1, 2])
def test_preempted_requests_sample_equal_tokens(
    folder: Path, plain: list[Served], oracle: Oracle, stages: int, rules: SchedulerConfig
) -> None:
    made = build(11, stages, oracle)
    served, watched = run(
        folder, requests(), rules, Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64), made, [stages]
    )
    assert len(watched.admitted) > len(FIELDS), "some were preempted"
    assert_equal(served, plain)
    assert watched.num_proposed > 0
    if rules is DRAFTS:
        assert watched.num_accepted > 0
        assert watched.num_cut > 0, "pages of rejected proposals were given back and taken again"


@pytest.mark.parametrize("delivered", [1, 5, 13])
def test_replayed_requests_sample_equal_tokens(folder: Path, plain: list[Served], oracle: Oracle, delivered: int) -> None:
    replayed = [
        wire.Request(id=one.id, epoch=2, prompt=one.prompt, delivered=whole.tokens[:delivered], sampling=one.sampling)
        for one, whole in zip(requests(), plain, strict=True)
        if len(whole.tokens) > delivered
    ]
    served, watched = run(folder, replayed, DRAFTS, made=build(oracle=oracle))
    rest = {one.id: answer for one, answer in zip(replayed, served, strict=True)}
    for number, whole in enumerate(plain):
        if str(number) in rest:
            assert rest[str(number)].tokens == whole.tokens[delivered:]
    assert watched.num_accepted > 0


@pytest.mark.parametrize("stages", [1, 2])
def test_later_requests_find_pages_filled_by_runs(folder: Path, plain: list[Served], stages: int) -> None:
    """A second request goes on from prompt and output of the first: its prefix was computed, in part, as proposals."""
    one = next(r for r, name in zip(requests(), FIELDS, strict=True) if name == "seeded")
    first = plain[list(FIELDS).index("seeded")].tokens
    later = msgspec.structs.replace(one, id="later", prompt=[*one.prompt, *first, 5, 6, 7])
    [alone] = run(folder, [later], PLAIN)[0]
    oracle = Oracle({one.sampling.seed: first})

    def work(runner: ModelRunner) -> tuple[list[int], int, int]:
        watched = Watched(runner)
        scheduler_limits = replace(ROOMY, max_num_seqs=1)
        answers = serve(watched, [one, msgspec.structs.replace(later, speculation=Speculation("none"))], scheduler_limits, DRAFTS)
        return answers[1].tokens, watched.num_computed - watched.num_proposed, watched.num_accepted

    tokens, computed, accepted = on_ranks(folder, [stages], build(stages=stages, oracle=oracle), work)
    assert tokens == alone.tokens
    assert accepted > 5
    whole = len(one.prompt) + len(first) - 1 - accepted + len(later.prompt) + len(alone.tokens) - 1
    assert computed <= whole - (len(one.prompt) + len(first) - 1) // 8 * 8, "the later one found all full pages"


def test_siblings_share_their_prompt_and_speculate_each_for_itself(folder: Path) -> None:
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
    served, watched = run(folder, siblings, DRAFTS, made=build(oracle=oracle))
    assert [answer.tokens for answer in served] == [answer.tokens for answer in whole]
    assert_path_taken(watched)


def test_speculating_and_plain_requests_share_steps(folder: Path, plain: list[Served], oracle: Oracle) -> None:
    methods: list[Speculation] = [Speculation("none"), Speculation(), Speculation("ngram", 2), Speculation(None, 1)]
    asked = [msgspec.structs.replace(one, speculation=methods[at % 4]) for at, one in enumerate(requests())]
    served, watched = run(folder, asked, DRAFTS, made=build(oracle=oracle))
    assert_equal(served, plain)
    assert watched.num_accepted > 0
    assert watched.num_mixed > 0, "some steps had both"


REPEATING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded, few tokens allowed": {"temperature": 0.5, "allowed_token_ids": [3, 4, 5]},
    "bias": {"temperature": 0.7, "logit_bias": {7: 14.0, 8: 14.0}},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.3, "allowed_token_ids": [3, 4]},
    "grammar": {"temperature": 1.0, "grammar": wire.Grammar("regex", "(ab|abc){20}")},
    "filters": {"temperature": 0.6, "top_k": 3, "min_p": 0.05},
}


def repeating() -> list[wire.Request]:
    prompts = [[(7 * at + 3) % 40 for at in range(9)] * 3 for _ in REPEATING]
    return [
        wire.Request(
            id=str(n),
            epoch=0,
            prompt=prompts[n],
            delivered=[],
            sampling=wire.Sampling(max_tokens=40, seed=n, **{"stop_token_ids": [EOS_ID], "logprobs": 1, **fields}),
        )
        for n, fields in enumerate(REPEATING.values())
    ]


@groups
def test_lookups_sample_equal_tokens(folder: Path, pods: list[int], stages: int) -> None:
    whole = run(folder, repeating(), PLAIN)[0]
    served, watched = run(folder, repeating(), LOOKUPS, made=build(stages=stages), pods=pods)
    assert_equal(served, whole, list(REPEATING))
    assert_path_taken(watched)


def test_stop_token_inside_a_run_ends_the_request(folder: Path, plain: list[Served]) -> None:
    at = list(FIELDS).index("seeded")
    one, whole = requests()[at], plain[at].tokens
    cases: list[Callable[[wire.Sampling], wire.Sampling]] = [
        lambda s: msgspec.structs.replace(s, stop_token_ids=[whole[6]]),
        lambda s: msgspec.structs.replace(s, stop_token_ids=[whole[7]], min_tokens=3),
        lambda s: msgspec.structs.replace(s, max_tokens=7),
    ]
    for change in cases:
        asked = msgspec.structs.replace(one, sampling=change(one.sampling))
        [expected] = run(folder, [asked], PLAIN)[0]
        [served], watched = run(folder, [asked], DRAFTS, made=build(oracle=Oracle({one.sampling.seed: whole})))
        assert (served.tokens, served.finish) == (expected.tokens, expected.finish)
        assert watched.num_accepted > 1
