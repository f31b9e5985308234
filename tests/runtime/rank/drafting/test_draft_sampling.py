"""Drafts and n-gram lookups apply penalties, bias, bans, allowed tokens and grammar along the path."""

import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_api import wire
from phalanx_api.speculation import Tree
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig, accept_all
from phalanx_runtime.core.step_plan import DraftPath as Proposed
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.rank.drafting.draft_passes import draft
from phalanx_runtime.rank.drafting.draft_sampler import DraftPosition, DraftSampler
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.filters import make_draw
from phalanx_runtime.rank.sampling.grammar import RankGrammars, read_tokenizer
from phalanx_runtime.rank.sampling.gumbel import RankedTokens
from phalanx_runtime.rank.sampling.sampler import TorchSampler
from phalanx_runtime.rank.step.draft_paths import NO_TOKEN
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.requests import FIELDS, ROOMY
from tests.runtime.rank.drafting.draft_runs import make_config, run
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import EOS_ID, VOCAB_SIZE, save_tokenizer

TOKENS = 30
WORDS = wire.Grammar("regex", "([a-p]{3} ){99}")
STATELESS = {
    "seeded": {"temperature": 1.0},
    "bias": {"temperature": 0.9, "logit_bias": {3: 5.0, 9: -100.0}, "bad_words": [[3], [11]]},
    "few": {"temperature": 0.6, "allowed_token_ids": [3, 4, 5, 6]},
    "min tokens": {"temperature": 1.0, "min_tokens": TOKENS, "logit_bias": {EOS_ID: 50.0}, "stop_token_ids": [EOS_ID]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("draft_sampling") / "model")


@pytest.fixture(scope="module")
def twin(folder: Path) -> dict[str, str]:
    """The target as its own draft: always accepted if it has the state of the sampling rank."""
    return {"speculative_method": "draft", "draft_dir": str(save_draft(folder, folder.parent / "twin", noise=0.0))}


def requests(modes: dict[str, dict[str, Any]]) -> list[wire.Request]:
    prompts = [[(7 * n + 3 * at) % 200 for at in range(5 + 4 * n)] for n in range(len(modes))]
    return [
        wire.Request(
            id=str(n), epoch=1, prompt=prompt, delivered=[], sampling=wire.Sampling(max_tokens=TOKENS, seed=7 + n, **mode)
        )
        for n, (prompt, mode) in enumerate(zip(prompts, modes.values(), strict=True))
    ]


@pytest.mark.parametrize(
    ("modes", "pods", "stages"),
    [
        (FIELDS | {"grammar": {"temperature": 1.0, "grammar": WORDS}}, [1], 1),
        (FIELDS | {"grammar": {"temperature": 1.0, "grammar": WORDS}}, [2], 1),
        (FIELDS | {"grammar": {"temperature": 1.0, "grammar": WORDS}}, [2], 2),
        (FIELDS | {"grammar": {"temperature": 1.0, "grammar": WORDS}}, [4], 2),
        (STATELESS, [1], 1),
        (STATELESS, [3], 3),
    ],
    ids=["every mode", "every mode, tp2", "every mode, pp2", "every mode, pp2 x tp2", "without state", "without state, pp3"],
)
def test_a_draft_that_is_the_target_is_never_wrong(
    folder: Path, twin: dict[str, str], modes: dict[str, Any], pods: list[int], stages: int
) -> None:
    [plain, _] = run(folder, requests(modes), Build(torch.float64, num_pages=200), SchedulerConfig())
    setup = Build(torch.float64, num_pages=200, stages=stages, speculative=twin)
    served, counter = run(folder, requests(modes), setup, make_config("draft"), pods=pods)
    assert [one.tokens for one in served] == [one.tokens for one in plain]
    assert counter.num_accepted == counter.num_proposed > 60


def test_self_drafts_apply_the_grammar(folder: Path) -> None:
    """A wrong exit is accepted where few tokens are allowed."""
    exit = save_exit(folder, folder.parent / "exit.safetensors")
    setup = Build(torch.float64, num_pages=200, speculative={"speculative_method": "self_draft", "draft_exit": str(exit)})
    modes: dict[str, dict[str, Any]] = {
        "one": {"allowed_token_ids": [5]},
        "words": {"grammar": wire.Grammar("regex", "(ab){99}")},
    }
    served, counter = run(folder, requests(modes), setup, make_config("self_draft"))
    assert [len(one.tokens) for one in served] == [TOKENS, TOKENS]
    assert counter.num_accepted == counter.num_proposed > 30


@pytest.mark.parametrize("widths", [[], [2, 2]], ids=["chain", "tree"])
def test_positions_after_a_grammars_end_are_not_drafted(folder: Path, twin: dict[str, str], widths: list[int]) -> None:
    """Three letters follow the first one; eight draft tokens are allowed."""
    modes: dict[str, dict[str, Any]] = {"one": {"grammar": wire.Grammar("regex", "ab[a-c]c"), "stop_token_ids": [EOS_ID]}}
    config = SchedulerConfig(
        speculation=SpeculationConfig(
            method="draft", num_tokens=8, is_adaptive=False, draft_methods=frozenset({"draft"}), tree=Tree(widths)
        )
    )
    served, counter = run(folder, requests(modes), Build(torch.float64, num_pages=200, speculative=twin), config)
    assert served[0].finish == "stop" and 0 < counter.num_accepted < 5
    assert counter.num_undrafted >= (4 if not widths else 1)
    assert counter.num_accepted + counter.num_undrafted <= counter.num_proposed


def make_sampler(tmp_path: Path) -> TorchSampler:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return TorchSampler(VOCAB_SIZE, RankGrammars(partial(read_tokenizer, tmp_path, VOCAB_SIZE), VOCAB_SIZE))


def test_sampling_ahead_leaves_the_row_unchanged(tmp_path: Path) -> None:
    sampler, rng = make_sampler(tmp_path), torch.Generator().manual_seed(2)
    sampling = wire.Sampling(
        max_tokens=50, seed=3, temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.7, bad_words=[[97, 98]], grammar=WORDS
    )
    new = NewRow(0, sampling, 2, [1, 2, 97, 97])
    logits = 3 * torch.randn((7, VOCAB_SIZE), generator=rng)
    sampler.admit(new)
    along = [sampler.sample(logits[at : at + 1], [(0, 2 + at)]).tokens[0] for at in range(6)]
    sampler.admit(new)
    draft_sampler = DraftSampler(sampler.rows)
    path: list[int] = []
    for at in range(6):
        path += draft_sampler.sample(logits[at : at + 1], [DraftPosition(0, make_draw(sampling, 2 + at), tuple(path))])[0].tokens
    assert path == along
    for count in (1, 4):
        [again] = draft_sampler.sample(logits[:1], [DraftPosition(0, make_draw(sampling, 2))], count)
        assert again.tokens[:1] == along[:1], "positions may repeat, in any order"
        [again] = draft_sampler.sample(logits[2:3], [DraftPosition(0, make_draw(sampling, 4), tuple(along[:2]))], count)
        assert again.tokens[:1] == along[2:3] and len(again.tokens) == len(again.log_shares) == count
    assert [sampler.sample(logits[at : at + 1], [(0, 2 + at)]).tokens[0] for at in range(6)] == along


def test_nothing_is_drafted_where_no_token_is_allowed(tmp_path: Path) -> None:
    sampler = make_sampler(tmp_path)
    new = NewRow(0, wire.Sampling(max_tokens=9, seed=1, temperature=0.0, grammar=wire.Grammar("regex", "ab")), 1, [1, 97, 98])
    sampler.admit(new)
    logits = torch.zeros((1, VOCAB_SIZE))
    for count in (1, 3):
        positions = [DraftPosition(0, make_draw(new.sampling, 2))]
        assert DraftSampler(sampler.rows).sample(logits, positions, count) == [RankedTokens([], [])]


@pytest.mark.parametrize(
    ("sampling", "tokens", "count"),
    [
        ({}, [5, 6, 7], 3),
        ({"allowed_token_ids": [5, 6]}, [5, 6, 7, 5], 2),
        ({"bad_words": [[6]]}, [5, 6, 7], 1),
        ({"bad_words": [[2, 5, 6]]}, [5, 6, 7], 1),
        ({"bad_words": [[5, 7]]}, [5, 6, 7], 3),
        ({"min_tokens": 3, "stop_token_ids": [7]}, [7, 5], 0),
        ({"min_tokens": 3, "stop_token_ids": [7]}, [5, 5, 7], 3),
        ({"grammar": wire.Grammar("regex", "[ab]+c")}, [97, 98, 100, 97], 2),
        ({"grammar": wire.Grammar("regex", "[ab]+c"), "bad_words": [[97, 98]]}, [97, 98, 99], 1),
        ({"bad_words": [[VOCAB_SIZE]]}, [5], 0),
    ],
    ids=["plain", "allowed", "word", "word across", "no word", "early end", "end", "grammar", "both", "invalid"],
)
def test_allowed_length_of_a_lookup(tmp_path: Path, sampling: dict[str, Any], tokens: list[int], count: int) -> None:
    sampler = make_sampler(tmp_path)
    sampler.admit(NewRow(0, wire.Sampling(max_tokens=9, seed=1, **sampling), 2, [1, 2]))
    assert sampler.num_fitting(0, tokens, 1) == count
    assert sampler.num_fitting(0, tokens, 1) == count, "the state is unchanged"
    assert sampler.num_fitting(1, tokens, 1) == len(tokens), "a row that is not admitted"


class Unsearchable(list[int]):
    """A list that must not be searched."""

    def __contains__(self, _: object) -> bool:
        raise AssertionError("searched")


def test_allowed_tokens_are_found_without_scanning_the_vocabulary(tmp_path: Path) -> None:
    """Neither the context nor the bans are copied, and the allowed tokens are not searched."""
    sampler = make_sampler(tmp_path)
    few = Unsearchable(range(VOCAB_SIZE - 1))
    banned = [[token] for token in range(VOCAB_SIZE - 10)] * 200
    words = [*banned, [VOCAB_SIZE - 3, VOCAB_SIZE - 2, VOCAB_SIZE - 4]]
    history = [7] * 200_000 + [VOCAB_SIZE - 3]
    sampler.admit(
        NewRow(0, wire.Sampling(max_tokens=9, seed=1, allowed_token_ids=few, bad_words=words), len(history) - 1, history)
    )
    tracemalloc.start()
    count = sampler.num_fitting(0, [VOCAB_SIZE - 2, VOCAB_SIZE - 4, VOCAB_SIZE - 3], 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 1, "the bad word starts in the context"
    assert peak < 50_000


def test_lookups_end_where_no_token_is_allowed(folder: Path) -> None:
    submitted = [
        wire.Request(
            id="few",
            epoch=1,
            prompt=[3, 4, 5, 9, 3, 4, 5, 9, 3, 4],
            delivered=[],
            sampling=wire.Sampling(max_tokens=24, seed=5, temperature=0.7, allowed_token_ids=[3, 4, 5]),
        ),
        wire.Request(
            id="words",
            epoch=1,
            prompt=[97, 98, 99, 97, 98],
            delivered=[],
            sampling=wire.Sampling(max_tokens=24, seed=4, grammar=wire.Grammar("regex", "([abc]{2}d)*")),
        ),
    ]
    config = SchedulerConfig(speculation=SpeculationConfig(method="ngram", num_tokens=5, is_adaptive=False))

    def work(has_fitting: bool, runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, submitted, ROOMY, config, runner.fitting if has_fitting else accept_all), counter

    (unfitted, before), (fitted, after) = (
        on_ranks(folder, [1], Build(torch.float64, num_pages=200), partial(work, has_fitting)) for has_fitting in (False, True)
    )
    assert [one.tokens for one in fitted] == [one.tokens for one in unfitted]
    assert after.num_accepted == before.num_accepted > 0
    assert after.num_proposed < before.num_proposed


def test_draft_stops_after_a_stop_token() -> None:
    """The first path ends with its first token, the other with its second (min_tokens): the second pass has one row."""
    new = {
        row: NewRow(row, wire.Sampling(max_tokens=9, seed=row, temperature=0.0, stop_token_ids=[7], min_tokens=2))
        for row in (0, 1)
    }
    paths = [Proposed(request=0, depth=3, is_drafted=True), Proposed(request=1, depth=3, is_drafted=True)]
    plan = StepPlan(
        step=1,
        admitted=[],
        rows=[0, 1],
        starts=[4, 4],
        counts=[4, 4],
        pages=[[], []],
        tokens=[1, 0, 0, 0, 2, 0, 0, 0],
        draws=[(0, 1), (1, 0)],
        paths=paths,
    )
    passes: list[list[int]] = []

    def states(draft_plan: StepPlan) -> torch.Tensor:
        passes.append(list(draft_plan.rows))
        return torch.zeros((len(draft_plan.rows), 1))

    def sample(hidden: torch.Tensor, positions: Any, count: int) -> list[RankedTokens]:
        return [RankedTokens([7], [0.0]) for _ in positions]

    drafted = [one.tokens for one in draft(plan, new, states, sample)]
    assert drafted == [[7, NO_TOKEN, NO_TOKEN], [7, 7, NO_TOKEN]]
    assert passes == [[0, 1], [1]]
