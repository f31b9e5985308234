"""Tokens with draft trees equal those without, for all proposers. In float64, without near-ties.

Tests pair proposers, shapes, groups and disturbances; `bench.speculation.product` runs the full product.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_api import wire
from phalanx_api.speculation import Method, Speculation, Tree, TreeShape
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.model.source import ModelImpl
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.groups import GROUPS
from tests.runtime.equality.oracle import Oracle
from tests.runtime.equality.requests import FIELDS, REPEATING, ROOMY, assert_equal, repeating, requests
from tests.runtime.equality.trees import LIMITS, make_config
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import save_tiny

REPLAYED = 9
"""Tokens delivered before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("trees") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    """Answers without draft tokens."""
    return run(folder, requests(), Build(torch.float64, num_pages=200), SchedulerConfig())[0]


@pytest.fixture(scope="module")
def proposers(folder: Path, plain: list[Served]) -> dict[str, dict[str, Any]]:
    """Fields of Build, by proposer."""
    draft = save_draft(folder, folder.parent / "draft", noise=0.08)
    exit = save_exit(folder, folder.parent / "exit.safetensors", noise=0.03)
    twin = save_draft(folder, folder.parent / "twin", noise=0.0)
    oracle = Oracle({one.sampling.seed: whole.tokens for one, whole in zip(requests(), plain, strict=True)})
    return {
        "ngram": {},
        "oracle": {"proposer": oracle},
        "draft": {"speculative": {"speculative_method": "draft", "draft_dir": str(draft)}},
        "twin": {"speculative": {"speculative_method": "draft", "draft_dir": str(twin)}},
        "self_draft": {"speculative": {"speculative_method": "self_draft", "draft_exit": str(exit)}},
    }


def run(
    folder: Path, submitted: list[wire.Request], setup: Build, config: SchedulerConfig, limits: Limits = ROOMY, pods: Any = (1,)
) -> tuple[list[Served], CountingRunner]:
    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, submitted, limits, config, runner.fitting), counter

    return on_ranks(folder, pods, setup, work)


@pytest.mark.parametrize(
    ("proposer", "shape", "group", "limits"),
    [
        ("oracle", "static", "one", "preempted"),
        ("oracle", "static", "tp2", "together"),
        ("oracle", "static", "pp2 x tp2", "chunks of 7"),
        ("draft", "best_first", "one", "chunks of 7"),
        ("draft", "static", "tp2", "preempted"),
        ("draft", "best_first", "pp2", "together"),
        ("self_draft", "best_first", "tp2", "chunks of 7"),
        ("self_draft", "static", "pp2", "preempted"),
        ("self_draft", "best_first", "one", "together"),
        ("draft", "best_first", "pp2 x tp2", "preempted"),
    ],
)
def test_every_sampling_mode_is_equal_with_trees(
    folder: Path, plain: list[Served], proposers: dict[str, Any], proposer: str, shape: TreeShape, group: str, limits: str
) -> None:
    (pods, stages), (bounds, num_pages) = GROUPS[group], LIMITS[limits]
    setup = Build(torch.float64, num_pages=num_pages, stages=stages, **proposers[proposer])
    served, counter = run(
        folder, requests(), setup, make_config("self_draft" if proposer == "self_draft" else "draft", shape), bounds, pods
    )
    assert_equal(served, plain)
    assert counter.num_branched > 0, "later branches were accepted"
    assert 0.1 < counter.num_accepted / counter.num_proposed < 0.9
    if limits == "preempted":
        assert len(counter.admitted) > len(FIELDS) and counter.num_cut > 0


@pytest.mark.parametrize(("group", "limits"), [("one", "together"), ("tp2", "preempted"), ("pp2", "chunks of 7")])
def test_lookup_trees_sample_equal_tokens(folder: Path, group: str, limits: str) -> None:
    (pods, stages), (bounds, num_pages) = GROUPS[group], LIMITS[limits]
    submitted = [msgspec.structs.replace(one, prompt=one.prompt[: 20 + n]) for n, one in enumerate(repeating())]
    [whole, _] = run(folder, submitted, Build(torch.float64, num_pages=200), SchedulerConfig())
    setup = Build(torch.float64, num_pages=num_pages, stages=stages)
    served, counter = run(folder, submitted, setup, make_config("ngram", widths=(4, 2, 2)), bounds, pods)
    assert_equal(served, whole, list(REPEATING))
    assert counter.num_branched > 0 and 0.1 < counter.num_accepted / counter.num_proposed < 0.9


@pytest.mark.parametrize("widths", [(), (3, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("proposer", ["ngram", "draft", "self_draft"])
def test_replayed_requests_sample_equal_tokens(
    folder: Path, proposers: dict[str, Any], proposer: Method, widths: tuple[int, ...]
) -> None:
    """Drafts backfill the delivered tokens, and n-gram lookups search them."""
    submitted = repeating() if proposer == "ngram" else requests()
    [whole, _] = run(folder, submitted, Build(torch.float64, num_pages=200), SchedulerConfig())
    replayed = [
        msgspec.structs.replace(one, epoch=2, delivered=answer.tokens[:REPLAYED])
        for one, answer in zip(submitted, whole, strict=True)
        if len(answer.tokens) > REPLAYED
    ]
    assert len(replayed) > 3
    served, counter = run(
        folder, replayed, Build(torch.float64, num_pages=200, **proposers[proposer]), make_config(proposer, widths=widths)
    )
    answers = {one.id: [*one.delivered, *answer.tokens] for one, answer in zip(replayed, served, strict=True)}
    assert answers == {one.id: whole[int(one.id)].tokens for one in replayed}
    assert counter.num_accepted > 0 and bool(counter.num_branched) == bool(widths)


SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":20}},"required":["a","b"]}'


@pytest.mark.parametrize(
    ("proposer", "widths", "group"),
    [
        ("ngram", (), "pp2"),
        ("ngram", (3, 2), "tp2"),
        ("draft", (), "tp2"),
        ("draft", (3, 2), "pp2"),
        ("self_draft", (), "pp2"),
        ("self_draft", (3, 2), "one"),
    ],
)
def test_a_json_schema_gives_equal_tokens(
    folder: Path, proposers: dict[str, Any], proposer: Method, widths: tuple[int, ...], group: str
) -> None:
    """Greedy and seeded, with and without penalties; lookups find the start of an object in the prompt."""
    (pods, stages), prompt = GROUPS[group], list(b'{"a": 17, "b": "no"} {"a": 1, "b": "yes"} ')
    penalties: list[dict[str, Any]] = [{}, {}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.7}]
    submitted = [
        wire.Request(
            id=str(n),
            epoch=1,
            prompt=prompt[n:],
            delivered=[],
            sampling=wire.Sampling(
                max_tokens=36, seed=n, temperature=0.9 * (n % 2), grammar=wire.Grammar("json_schema", SCHEMA), **more
            ),
        )
        for n, more in enumerate(penalties)
    ]
    [whole, _] = run(folder, submitted, Build(torch.float64, num_pages=200), SchedulerConfig())
    setup = Build(torch.float64, num_pages=200, stages=stages, **proposers[proposer])
    served, counter = run(folder, submitted, setup, make_config(proposer, widths=widths), pods=pods)
    assert [(one.tokens, one.finish) for one in served] == [(one.tokens, one.finish) for one in whole]
    assert 0 < counter.num_accepted < counter.num_proposed


@pytest.mark.parametrize("name", FIELDS)
def test_each_sampling_mode_alone_accepts_branches(
    folder: Path, plain: list[Served], proposers: dict[str, Any], name: str
) -> None:
    """The second child is right where the first one is wrong."""
    at = list(FIELDS).index(name)
    setup = Build(torch.float64, num_pages=200, **proposers["oracle"])
    served, counter = run(folder, [requests()[at]], setup, make_config("draft", "static", (2, 2, 2, 2), 14))
    assert_equal(served, [plain[at]], [name])
    assert counter.num_branched > 0 and counter.num_accepted >= 0.5 * len(plain[at].tokens)


@pytest.mark.parametrize("shape", ["best_first", "static"])
@pytest.mark.parametrize("limits", LIMITS)
def test_target_as_draft_always_accepts_the_first_branch(
    folder: Path, proposers: dict[str, Any], shape: TreeShape, limits: str
) -> None:
    """So its pages are right after every tree. Requests without state; some share prefixes."""
    rng = torch.Generator().manual_seed(8)
    common = torch.randint(0, 250, (37,), generator=rng).tolist()
    prompts = [common, common, [*common[:21], 1, 2, 3], common[:5], [*common, 9], common[9:]]
    submitted = [
        wire.Request(
            id=str(n),
            epoch=1,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=30, seed=n, temperature=0.9 * (n % 2)),
        )
        for n, prompt in enumerate(prompts)
    ]
    [whole, _] = run(folder, submitted, Build(torch.float64, num_pages=200), SchedulerConfig())
    bounds, num_pages = LIMITS[limits]
    setup = Build(torch.float64, num_pages=num_pages + 4, **proposers["twin"])
    served, counter = run(folder, submitted, setup, make_config("draft", shape, (2, 2), 6), bounds)
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    assert counter.num_branched == 0 and counter.num_accepted > 60


def test_later_requests_find_pages_filled_by_branches(folder: Path, plain: list[Served], proposers: dict[str, Any]) -> None:
    """A second request continues the first: a part of its prefix was computed in other slots."""
    at = list(FIELDS).index("seeded")
    one, first = requests()[at], plain[at].tokens
    later = msgspec.structs.replace(one, id="later", prompt=[*one.prompt, *first, 5, 6, 7], speculation=Speculation("none"))
    [[alone], _] = run(folder, [later], Build(torch.float64, num_pages=200), SchedulerConfig())
    setup = Build(torch.float64, num_pages=200, **proposers["oracle"])
    limits = replace(ROOMY, max_num_seqs=1)
    answers, counter = run(folder, [one, later], setup, make_config("draft", "static", (2, 2, 2, 2), 14), limits)
    assert answers[1].tokens == alone.tokens
    assert counter.num_branched > 1
    whole = len(one.prompt) + len(first) - 1 - counter.num_accepted + len(later.prompt) + len(alone.tokens) - 1
    computed = counter.num_computed - counter.num_proposed
    assert computed <= whole - (len(one.prompt) + len(first) - 1) // 8 * 8, "the later one found all full pages"


def test_requests_choose_their_own_trees(folder: Path, plain: list[Served], proposers: dict[str, Any]) -> None:
    trees = [None, Tree([2, 2], "static"), Tree([]), Tree([3])]
    submitted = [
        msgspec.structs.replace(one, speculation=Speculation(None, 6, trees[at % 4])) for at, one in enumerate(requests())
    ]
    served, counter = run(folder, submitted, Build(torch.float64, num_pages=200, **proposers["draft"]), make_config("draft"))
    assert_equal(served, plain)
    assert counter.num_branched > 0


def test_stop_token_inside_a_branch_ends_the_request(folder: Path, plain: list[Served], proposers: dict[str, Any]) -> None:
    at = list(FIELDS).index("seeded")
    one, whole = requests()[at], plain[at].tokens
    for change in ({"stop_token_ids": [whole[3]]}, {"stop_token_ids": [whole[4]], "min_tokens": 3}, {"max_tokens": 5}):
        submitted = msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, **change))
        [[expected], _] = run(folder, [submitted], Build(torch.float64, num_pages=200), SchedulerConfig())
        setup = Build(torch.float64, num_pages=200, **proposers["oracle"])
        [served], counter = run(folder, [submitted], setup, make_config("draft", "static", (2, 2, 2, 2), 14))
        assert (served.tokens, served.finish) == (expected.tokens, expected.finish)
        assert counter.num_accepted > 1


@pytest.mark.parametrize(("family", "level"), [("mistral", "fused"), ("qwen2", "transformers")], ids=["window", "any model"])
def test_all_windows_and_models_attend_only_to_the_branch(tmp_path: Path, family: str, level: ModelImpl) -> None:
    """A window counts positions: after a tree it starts where it would after the branch alone."""
    folder = save_tiny(tmp_path / "model", family, **({"sliding_window": 7} if family == "mistral" else {}))
    submitted = [one for one, name in zip(requests(), FIELDS, strict=True) if name in ("greedy", "seeded", "penalties")]
    [whole, _] = run(folder, submitted, Build(torch.float64, num_pages=200, level=level), SchedulerConfig())
    oracle = Oracle({one.sampling.seed: served.tokens for one, served in zip(submitted, whole, strict=True)})
    setup = Build(torch.float64, num_pages=200, level=level, proposer=oracle)
    served, counter = run(folder, submitted, setup, make_config("draft", "static", (2, 2, 2, 2), 14))
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    assert counter.num_branched > 3
