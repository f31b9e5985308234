"""Tokens with trees of proposals are those without, whoever proposes and whatever disturbs. In float64: no excuse.

Pairs of who proposes, in which shape, where, and how it is disturbed; all together are run by `bench.speculation.product`.
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
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.model.source import Level
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.oracle import Oracle
from tests.runtime.equality.test_sampling import FIELDS, ROOMY, assert_equal, requests
from tests.runtime.equality.test_speculation import GROUPS, REPEATING, repeating
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import Served, Watched, serve
from tests.runtime.tiny import save_tiny

REPLAYED = 9
"""Tokens that were delivered before."""
LIMITS: dict[str, tuple[Limits, int]] = {
    "together": (ROOMY, 200),
    "chunks of 7": (Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=26), 200),
    "preempted": (Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64), 11),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("trees") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    """What each of the requests gets without proposals."""
    return run(folder, requests(), Build(torch.float64, num_pages=200), SchedulerConfig())[0]


@pytest.fixture(scope="module")
def ways(folder: Path, plain: list[Served]) -> dict[str, dict[str, Any]]:
    """How a group is built that proposes so."""
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


def rules(method: Method, shape: TreeShape = "best_first", widths: tuple[int, ...] = (3, 2), most: int = 8) -> SchedulerConfig:
    tree = Tree(list(widths), shape)
    return SchedulerConfig(
        speculating=SpeculationConfig(method=method, num_tokens=most, is_adaptive=False, drafts=frozenset({method}), tree=tree)
    )


def run(
    folder: Path, asked: list[wire.Request], made: Build, how: SchedulerConfig, limits: Limits = ROOMY, pods: Any = (1,)
) -> tuple[list[Served], Watched]:
    def work(runner: ModelRunner) -> tuple[list[Served], Watched]:
        watched = Watched(runner)
        return serve(watched, asked, limits, how, runner.fitting), watched

    return on_ranks(folder, pods, made, work)


@pytest.mark.parametrize(
    ("way", "shape", "group", "limits"),
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
    folder: Path, plain: list[Served], ways: dict[str, Any], way: str, shape: TreeShape, group: str, limits: str
) -> None:
    (pods, stages), (bounds, num_pages) = GROUPS[group], LIMITS[limits]
    made = Build(torch.float64, num_pages=num_pages, stages=stages, **ways[way])
    served, watched = run(folder, requests(), made, rules("self_draft" if way == "self_draft" else "draft", shape), bounds, pods)
    assert_equal(served, plain)
    assert watched.num_branched > 1, "branches other than the first were drawn"
    assert 0.1 < watched.num_accepted / watched.num_proposed < 0.9
    if limits == "preempted":
        assert len(watched.admitted) > len(FIELDS) and watched.num_cut > 0


@pytest.mark.parametrize(("group", "limits"), [("one", "together"), ("tp2", "preempted"), ("pp2", "chunks of 7")])
def test_lookup_trees_sample_equal_tokens(folder: Path, group: str, limits: str) -> None:
    (pods, stages), (bounds, num_pages) = GROUPS[group], LIMITS[limits]
    asked = [msgspec.structs.replace(one, prompt=one.prompt[: 20 + n]) for n, one in enumerate(repeating())]
    [whole, _] = run(folder, asked, Build(torch.float64, num_pages=200), SchedulerConfig())
    made = Build(torch.float64, num_pages=num_pages, stages=stages)
    served, watched = run(folder, asked, made, rules("ngram", widths=(4, 2, 2)), bounds, pods)
    assert_equal(served, whole, list(REPEATING))
    assert watched.num_branched > 0 and 0.1 < watched.num_accepted / watched.num_proposed < 0.9


@pytest.mark.parametrize("widths", [(), (3, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("way", ["ngram", "draft", "self_draft"])
def test_replayed_requests_sample_equal_tokens(folder: Path, ways: dict[str, Any], way: Method, widths: tuple[int, ...]) -> None:
    """A draft computes what others had drawn, and lookups find it."""
    asked = repeating() if way == "ngram" else requests()
    [whole, _] = run(folder, asked, Build(torch.float64, num_pages=200), SchedulerConfig())
    replayed = [
        msgspec.structs.replace(one, epoch=2, delivered=answer.tokens[:REPLAYED])
        for one, answer in zip(asked, whole, strict=True)
        if len(answer.tokens) > REPLAYED
    ]
    assert len(replayed) > 3
    served, watched = run(folder, replayed, Build(torch.float64, num_pages=200, **ways[way]), rules(way, widths=widths))
    answers = {one.id: [*one.delivered, *answer.tokens] for one, answer in zip(replayed, served, strict=True)}
    assert answers == {one.id: whole[int(one.id)].tokens for one in replayed}
    assert watched.num_accepted > 0 and bool(watched.num_branched) == bool(widths)


SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":20}},"required":["a","b"]}'


@pytest.mark.parametrize(
    ("way", "widths", "group"),
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
    folder: Path, ways: dict[str, Any], way: Method, widths: tuple[int, ...], group: str
) -> None:
    """Greedy and seeded, with penalties and without; lookups find the beginning of such an object in the prompt."""
    (pods, stages), prompt = GROUPS[group], list(b'{"a": 17, "b": "no"} {"a": 1, "b": "yes"} ')
    penalties: list[dict[str, Any]] = [{}, {}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.7}]
    asked = [
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
    [whole, _] = run(folder, asked, Build(torch.float64, num_pages=200), SchedulerConfig())
    made = Build(torch.float64, num_pages=200, stages=stages, **ways[way])
    served, watched = run(folder, asked, made, rules(way, widths=widths), pods=pods)
    assert [(one.tokens, one.finish) for one in served] == [(one.tokens, one.finish) for one in whole]
    assert 0 < watched.num_accepted < watched.num_proposed


@pytest.mark.parametrize("name", FIELDS)
def test_each_way_to_sample_alone_accepts_branches(folder: Path, plain: list[Served], ways: dict[str, Any], name: str) -> None:
    """The proposer is wrong now and then in the first place, and then right in the second."""
    at = list(FIELDS).index(name)
    made = Build(torch.float64, num_pages=200, **ways["oracle"])
    served, watched = run(folder, [requests()[at]], made, rules("draft", "static", (2, 2, 2, 2), 14))
    assert_equal(served, [plain[at]], [name])
    assert watched.num_branched > 0 and watched.num_accepted >= 0.5 * len(plain[at].tokens)


@pytest.mark.parametrize("shape", ["best_first", "static"])
@pytest.mark.parametrize("limits", LIMITS)
def test_target_as_draft_always_accepts_the_first_branch(
    folder: Path, ways: dict[str, Any], shape: TreeShape, limits: str
) -> None:
    """So its pages hold what they should behind every tree. Requests without state; some begin alike."""
    chance = torch.Generator().manual_seed(8)
    common = torch.randint(0, 250, (37,), generator=chance).tolist()
    prompts = [common, common, [*common[:21], 1, 2, 3], common[:5], [*common, 9], common[9:]]
    asked = [
        wire.Request(
            id=str(n),
            epoch=1,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=30, seed=n, temperature=0.9 * (n % 2)),
        )
        for n, prompt in enumerate(prompts)
    ]
    [whole, _] = run(folder, asked, Build(torch.float64, num_pages=200), SchedulerConfig())
    bounds, num_pages = LIMITS[limits]
    made = Build(torch.float64, num_pages=num_pages + 4, **ways["twin"])
    served, watched = run(folder, asked, made, rules("draft", shape, (2, 2), 6), bounds)
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    assert watched.num_branched == 0 and watched.num_accepted > 60


def test_later_requests_find_pages_filled_by_branches(folder: Path, plain: list[Served], ways: dict[str, Any]) -> None:
    """A second request goes on from prompt and output of the first: part of its prefix was computed in other slots."""
    at = list(FIELDS).index("seeded")
    one, first = requests()[at], plain[at].tokens
    later = msgspec.structs.replace(one, id="later", prompt=[*one.prompt, *first, 5, 6, 7], speculation=Speculation("none"))
    [[alone], _] = run(folder, [later], Build(torch.float64, num_pages=200), SchedulerConfig())
    made = Build(torch.float64, num_pages=200, **ways["oracle"])
    limits = replace(ROOMY, max_num_seqs=1)
    answers, watched = run(folder, [one, later], made, rules("draft", "static", (2, 2, 2, 2), 14), limits)
    assert answers[1].tokens == alone.tokens
    assert watched.num_branched > 1
    whole = len(one.prompt) + len(first) - 1 - watched.num_accepted + len(later.prompt) + len(alone.tokens) - 1
    computed = watched.num_computed - watched.num_proposed
    assert computed <= whole - (len(one.prompt) + len(first) - 1) // 8 * 8, "the later one found all full pages"


def test_requests_choose_their_own_trees(folder: Path, plain: list[Served], ways: dict[str, Any]) -> None:
    trees = [None, Tree([2, 2], "static"), Tree([]), Tree([3])]
    asked = [msgspec.structs.replace(one, speculation=Speculation(None, 6, trees[at % 4])) for at, one in enumerate(requests())]
    served, watched = run(folder, asked, Build(torch.float64, num_pages=200, **ways["draft"]), rules("draft"))
    assert_equal(served, plain)
    assert watched.num_branched > 0


def test_stop_token_inside_a_branch_ends_the_request(folder: Path, plain: list[Served], ways: dict[str, Any]) -> None:
    at = list(FIELDS).index("seeded")
    one, whole = requests()[at], plain[at].tokens
    for change in ({"stop_token_ids": [whole[3]]}, {"stop_token_ids": [whole[4]], "min_tokens": 3}, {"max_tokens": 5}):
        asked = msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, **change))
        [[expected], _] = run(folder, [asked], Build(torch.float64, num_pages=200), SchedulerConfig())
        made = Build(torch.float64, num_pages=200, **ways["oracle"])
        [served], watched = run(folder, [asked], made, rules("draft", "static", (2, 2, 2, 2), 14))
        assert (served.tokens, served.finish) == (expected.tokens, expected.finish)
        assert watched.num_accepted > 1


@pytest.mark.parametrize(("family", "level"), [("mistral", "fused"), ("qwen2", "transformers")], ids=["window", "any model"])
def test_all_windows_and_models_attend_only_to_the_branch(tmp_path: Path, family: str, level: Level) -> None:
    """A window is of positions: behind a tree it begins where it would behind the branch alone."""
    folder = save_tiny(tmp_path / "model", family, **({"sliding_window": 7} if family == "mistral" else {}))
    asked = [one for one, name in zip(requests(), FIELDS, strict=True) if name in ("greedy", "seeded", "penalties")]
    [whole, _] = run(folder, asked, Build(torch.float64, num_pages=200, level=level), SchedulerConfig())
    oracle = Oracle({one.sampling.seed: served.tokens for one, served in zip(asked, whole, strict=True)})
    made = Build(torch.float64, num_pages=200, level=level, proposer=oracle)
    served, watched = run(folder, asked, made, rules("draft", "static", (2, 2, 2, 2), 14))
    assert [one.tokens for one in served] == [one.tokens for one in whole]
    assert watched.num_branched > 3
