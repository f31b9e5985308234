"""Draft trees: candidates, growth, tree attention and verification."""

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import ROOT, chain, draft_grade, draft_grades, is_chain, levels, restrict_tree, sibling_ranks
from phalanx_runtime.core.speculation.candidates import CandidateTree, drafted_candidate, ngram_candidate
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan, TreeBounds
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, PagedAttention
from phalanx_runtime.rank.drafting.draft_passes import BestFirst, FixedTree
from phalanx_runtime.rank.sampling.filters import Draw
from phalanx_runtime.rank.sampling.gumbel import RankedTokens, sample, sample_ranked
from phalanx_runtime.rank.sampling.sampler import TorchSampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.draft_paths import (
    NO_TOKEN,
    DraftedPath,
    chosen_shapes,
    empty_paths,
    encode_paths,
    fill_encoded_paths,
    fill_paths,
)
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.runtime.rank.sampling.sampled import logits_after
from tests.runtime.rank.step.tree_plans import plan_of

SHAPE = [ROOT, 0, 1, ROOT, 3, 0]
"""Own token - 0 - 1 - 2, with 5 after 0 too; 3 - 4."""
shapes = st.lists(st.integers(0, 8), min_size=1, max_size=9).map(
    lambda raw: [at - 1 - min(far, at) for at, far in enumerate(raw)]
)


def branch(parents: Sequence[int], node: int) -> list[int]:
    return [] if node == ROOT else [*branch(parents, parents[node]), node]


@given(shapes)
def test_levels_and_places_follow_from_parents(parents: list[int]) -> None:
    assert list(levels(tuple(parents))) == [len(branch(parents, node)) - 1 for node in range(len(parents))]
    assert list(sibling_ranks(tuple(parents))) == [parents[:node].count(parent) for node, parent in enumerate(parents)]
    assert is_chain(parents) == (parents == chain(len(parents)))
    kept = branch(parents, len(parents) - 1)
    assert restrict_tree(parents, kept) == chain(len(kept))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 4), st.randoms(use_true_random=False))
def test_offered_tree_is_the_most_likely_one(widths: list[int], count: int, rng: random.Random) -> None:
    shares: dict[int, float] = {}

    def share(grade: int) -> float:
        return shares.setdefault(grade, rng.uniform(0.05, 0.33))

    found = drafted_candidate(share, count, widths)
    assert_whole(found, count)
    assert found.grades == draft_grades(found.parents)
    width = [*widths, *[1] * count]
    nodes = [line for size in range(1, count + 1) for line in product(range(3), repeat=size) if fits(line, width)]

    def chance(line: tuple[int, ...]) -> float:
        best, most = 1.0, 1.0
        for level, place in enumerate(line):
            most = min(best * share(draft_grade(level, at)) for at in range(place + 1))
            best = most
        return best

    assert sum(found.chances) == pytest.approx(sum(sorted(map(chance, nodes), reverse=True)[:count]))


def fits(line: tuple[int, ...], width: list[int]) -> bool:
    return all(place < width[level] for level, place in enumerate(line))


def assert_whole(found: CandidateTree, count: int) -> None:
    assert len(found.parents) == len(found.levels) == len(found.grades) == len(found.chances) <= count
    assert list(levels(tuple(found.parents))) == found.levels
    assert found.chances == sorted(found.chances, reverse=True)
    assert all(parent < node for node, parent in enumerate(found.parents))


def test_lookup_branches_with_one_prefix_are_merged() -> None:
    def share(grade: int) -> float:
        return 0.5 if grade < 8 else 0.25

    lines = [([1, 2, 3], 5), ([1, 2, 4], 4), ([7, 8, 9], 3), ([1, 5, 6], 2)]
    found = ngram_candidate(share, 9, [2, 1, 2], lines)
    assert_whole(found, 9)
    branches = {tuple(found.tokens[at] for at in branch(found.parents, node)) for node in range(len(found.parents))}
    assert branches == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (7,), (7, 8), (7, 8, 9)}, "one child after 1"
    assert ngram_candidate(share, 2, [], lines).tokens == [1, 2] and ngram_candidate(share, 9, [], lines).tokens == [1, 2, 3]


def ranked(tokens: Sequence[int], shares: Sequence[float]) -> RankedTokens:
    return RankedTokens(list(tokens), [math.log(share) if share else -math.inf for share in shares])


def test_fixed_shape_is_filled_level_by_level() -> None:
    one = FixedTree(SHAPE)
    one.add(ROOT, ranked([10, 11, 12], [0.5, 0.3, 0.1]), ())
    assert one.next_nodes() == [0, 3] and one.slots == [0, 3] and one.num_children(0) == 2
    one.add(0, ranked([20, 21], [0.5, 0.3]), ())
    one.add(3, ranked([30], [0.9]), ())
    assert one.next_nodes() == [1] and one.branch(1) == (10, 20)
    one.add(1, ranked([40, 41], [0.5, 0.4]), ())
    assert one.next_nodes() == []
    assert one.slots == [0, 3, 1] and one.drafted() == DraftedPath([10, 20, 40, 11, 30, 21])


def test_nothing_is_drafted_after_an_end() -> None:
    one = FixedTree(SHAPE)
    one.add(ROOT, ranked([10, 11], [0.5, 0.0]), {10})
    assert one.next_nodes() == [] and one.drafted() == DraftedPath([10, *[NO_TOKEN] * 5])
    best = BestFirst(4, TreeBounds([3, 2], 3))
    best.add(ROOT, ranked([10, 11, 12], [0.5, 0.3, 0.0]), {10})
    assert best.next_nodes() == [1] and best.branch(1) == (11,)
    best.add(1, ranked([], []), ())
    assert best.next_nodes() == []
    assert best.drafted() == DraftedPath([10, 11, NO_TOKEN, NO_TOKEN], [ROOT, ROOT, 1, 2])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 3), max_size=3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_best_first_keeps_the_likeliest_that_it_could_reach(
    count: int, widths: list[int], deepest: int, rng: random.Random
) -> None:
    """If the slots suffice for the most probable nodes, no tree of `count` nodes is more probable."""
    known: dict[tuple[int, ...], list[float]] = {}

    def shares(line: tuple[int, ...]) -> list[float]:
        return known.setdefault(line, sorted((rng.uniform(0.01, 0.6) for _ in range(3)), reverse=True))

    one = BestFirst(count, TreeBounds(widths, deepest))
    nodes = [ROOT]
    while nodes:
        for node in nodes:
            one.add(node, ranked([0, 1, 2], shares(one.branch(node))), ())
        nodes = one.next_nodes()
    drafted, slots = one.drafted(), one.slots
    assert len(slots) <= count and len(drafted.tokens) == len(drafted.parents) == count
    width = [*widths, *[1] * deepest]
    every = [line for size in range(1, deepest + 1) for line in product(range(3), repeat=size) if fits(line, width)]
    chance = {line: math.prod(shares(line[:at])[line[at]] for at in range(len(line))) for line in every}
    lines = [tuple(drafted.tokens[at] for at in branch(drafted.parents, node)) for node in range(count)]
    got = [chance[line] for line in lines if NO_TOKEN not in line]
    best = sorted(chance.values(), reverse=True)[:count]
    assert got == sorted(got, reverse=True)
    if len(slots) < count:
        assert got == pytest.approx(best[: len(got)]) and len(got) == len(best)


@pytest.mark.parametrize(
    "one",
    [
        Draw(seed=3, index=5, temperature=0.0),
        Draw(seed=3, index=5, temperature=0.8),
        Draw(seed=3, index=5, temperature=1.1, top_p=0.9, top_k=12, min_p=0.02),
    ],
    ids=["greedy", "sampled", "filtered"],
)
def test_first_of_several_is_the_sample_others_follow(one: Draw) -> None:
    scores = 2 * torch.randn((4, 40), generator=torch.Generator().manual_seed(2))
    several = sample_ranked(scores, [one] * 4, 20)
    assert [found.tokens[0] for found in several] == sample(scores, [one] * 4)
    for found in several:
        assert found.log_shares == sorted(found.log_shares, reverse=True) and len(set(found.tokens)) == 20
        assert sum(map(math.exp, found.log_shares)) <= 1 + 1e-5
    without = scores.clone()
    for at, found in enumerate(several):
        without[at, found.tokens[0]] = -math.inf
    if one.top_k is None:
        assert sample(without, [one] * 4) == [found.tokens[1] for found in several]


CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 3), st.sampled_from([None, 3, 100]), st.integers(0, 3))
def test_each_tree_token_attends_only_to_its_branch(parents: list[int], own: int, window: int | None, computed: int) -> None:
    """Each token gets the result of its branch as a chain."""
    heads, page, dim = 2, 4, 8
    own = 0 if computed else own
    computed = min(computed, len(parents) - 1)
    start = 5 + computed
    if own == 0 and computed == 0:
        own = 1
    plan = plan_of(parents, own, start, computed)
    made = BatchBuilder(CacheShape(page, heads, 1 << 10), torch.float64, CPU)
    batch = made.build(plan)
    first = start + own - computed  # slot of draft token 0
    tokens = plan.counts[0]
    expected_positions = [*range(start, start + own), *(first + level for level in levels(tuple(parents))[computed:])]
    at = [int(place) for place in batch.logits_indices[: plan.depths[0] + 1]]
    by_token = {int(token): place for place, token in enumerate(batch.tokens.tolist())}
    assert [int(batch.positions[by_token[token]]) for token in range(tokens)] == expected_positions
    assert [int(batch.tokens[place]) for place in at] == list(range(tokens))[-len(at) :]
    rng = torch.Generator().manual_seed(len(parents))
    q, k, v = (torch.randn(tokens + 1, n, dim, generator=rng, dtype=torch.float64) for n in (2 * heads, heads, heads))
    cache = LayerCache(*(torch.randn(10, heads, page, dim, generator=rng, dtype=torch.float64) for _ in range(2)))
    for form in (AttentionParams(window=window, slopes=torch.tensor([0.5, 0.1, 0.02, 0.0])), AttentionParams(block=4)):
        torch.testing.assert_close(*(attend(q, k, v, cache, batch, form) for attend in (PagedAttention(), DenseAttention())))
    form = AttentionParams(window=window)
    paged = PagedAttention()(q, k, v, cache, batch, form)
    torch.testing.assert_close(paged, DenseAttention()(q, k, v, cache, batch, form))
    for node in range(computed, len(parents)):
        line = branch(parents, node)
        slots = [first + one for one in line]
        table = torch.tensor(plan.pages[0])
        keys = [cache.k[table[slot // page], :, slot % page] for slot in [*range(first), *slots]]
        values = [cache.v[table[slot // page], :, slot % page] for slot in [*range(first), *slots]]
        here = by_token[own + node - computed]
        low = 0 if window is None else max(0, len(keys) - window)
        stacked = torch.stack(keys[low:]).repeat_interleave(2, 1)
        scores = torch.einsum("hd,thd->ht", q[here], stacked) * dim**-0.5
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), torch.stack(values[low:]).repeat_interleave(2, 1))
        torch.testing.assert_close(paged[here], expected.reshape(-1))


def test_strays_are_copied_to_their_slots() -> None:
    made = BatchBuilder(CacheShape(4, 2, 1 << 10), torch.float64, CPU)
    made.build(plan_of(SHAPE))
    sources, targets = made.stray_slots(
        StepPlan(
            step=2,
            admitted=[],
            rows=[0],
            starts=[9],
            counts=[1],
            pages=[[]],
            tokens=[50],
            draws=[(0, 3)],
            relocations=[(0, [8, 10])],
        )
    )
    slots = [(page * 2 + head) * 4 + at for page, at in ((4, 0), (4, 2)) for head in (0, 1)]
    assert sources.tolist() == slots
    assert targets.tolist() == [(page * 2 + head) * 4 + at for page, at in ((3, 3), (4, 0)) for head in (0, 1)]


def test_chosen_trees_are_filled_in_and_encoded() -> None:
    growth = TreeBounds([2, 2], 3)
    plan = StepPlan(
        step=1,
        admitted=[],
        rows=[0, 1],
        starts=[4, 4],
        counts=[4, 4],
        pages=[[], []],
        tokens=[1, 0, 0, 0, 2, 0, 0, 0],
        draws=[(0, 1), (1, 0)],
        paths=[
            DraftPath(request=0, depth=3, is_drafted=True, tree_bounds=growth),
            DraftPath(request=1, depth=3, is_drafted=True, parents=[ROOT, ROOT, 0]),
        ],
    )
    full = fill_paths(plan, [DraftedPath([7, 8, 9], [ROOT, 0, 0]), DraftedPath([4, 5, 6])])
    assert full.tokens == [1, 7, 8, 9, 2, 4, 5, 6]
    assert [path.parents for path in full.paths] == [[ROOT, 0, 0], [ROOT, ROOT, 0]]
    assert chosen_shapes(full) == [[ROOT, 0, 0]]
    assert fill_encoded_paths(plan, encode_paths(full)) == full
    line = fill_paths(plan, [DraftedPath([7, 8, 9], chain(3)), DraftedPath([4, 5, 6])])
    assert line.paths[0].parents == [] and chosen_shapes(line) == [chain(3)]
    assert fill_paths(plan, empty_paths(plan)).tokens == [1, *[NO_TOKEN] * 3, 2, *[NO_TOKEN] * 3]


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 1.0}], ids=["all at once", "one by one"])
def test_run_follows_the_sampled_branch(sampling: dict[str, Any]) -> None:
    """Each node has its own logits; a wrong row would sample other tokens."""
    request, prompt = wire.Sampling(max_tokens=20, seed=5, temperature=1.0, **sampling), [3, 1]
    plain = TorchSampler(16)
    plain.admit(NewRow(0, request, 2, prompt))
    sampled: list[int] = []
    for index in range(5):
        sampled += plain.sample(logits_after(prompt + sampled, 16)[None], [(0, index)]).tokens
    wrong = [token ^ 1 for token in sampled]
    tokens = [wrong[0], wrong[1], sampled[0], wrong[1], sampled[1], wrong[2], sampled[2], sampled[3] ^ 2]
    parents = [ROOT, 0, ROOT, 2, 2, 4, 4, 6]
    lines = [[], *([tokens[at] for at in branch(parents, node)] for node in range(len(parents)))]
    sampler = TorchSampler(16)
    sampler.admit(NewRow(0, request, 2, prompt))
    scores = torch.stack([logits_after(prompt + line, 16) for line in lines])
    found = sampler.sample(scores, [(0, 0)], [DraftedPath(tokens, parents)])
    assert (found.tokens, found.runs, found.taken) == (sampled[:4], [4], [(0, [2, 4, 6])])
