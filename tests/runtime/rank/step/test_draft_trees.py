"""Trees of proposals, piece by piece: which are offered, how drafts grow, what each token sees, and what is drawn."""

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
from phalanx_runtime.core.acceptance import draft_grade, draft_grades
from phalanx_runtime.core.draft_tree import OWN, chain, is_chain, levels, part, places
from phalanx_runtime.core.speculation.offers import CandidateTree, drafted, looked_up
from phalanx_runtime.core.step_plan import Growth, NewRow, Path, StepPlan
from phalanx_runtime.model.attention.paged import AttentionForm, DenseAttention, LayerCache, PagedAttention
from phalanx_runtime.rank.drafting.draft_passes import BestFirst, FixedTree
from phalanx_runtime.rank.sampling.draw import Draw, Rivals, draw, draw_several
from phalanx_runtime.rank.sampling.sampler import Sampler
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape
from phalanx_runtime.rank.step.paths import (
    NO_TOKEN,
    DraftedPath,
    drafted_numbers,
    filled,
    filled_by_numbers,
    grown_shapes,
    nothing,
)
from tests.runtime.rank.sampling.sampled import scores_after

SHAPE = [OWN, 0, 1, OWN, 3, 0]
"""Own token - 0 - 1 - 2, with 5 behind 0 too; 3 - 4."""
shapes = st.lists(st.integers(0, 8), min_size=1, max_size=9).map(
    lambda raw: [at - 1 - min(far, at) for at, far in enumerate(raw)]
)


def branch(parents: Sequence[int], node: int) -> list[int]:
    return [] if node == OWN else [*branch(parents, parents[node]), node]


@given(shapes)
def test_levels_and_places_follow_from_parents(parents: list[int]) -> None:
    assert list(levels(tuple(parents))) == [len(branch(parents, node)) - 1 for node in range(len(parents))]
    assert list(places(tuple(parents))) == [parents[:node].count(parent) for node, parent in enumerate(parents)]
    assert is_chain(parents) == (parents == chain(len(parents)))
    kept = branch(parents, len(parents) - 1)
    assert part(parents, kept) == chain(len(kept))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 4), st.randoms(use_true_random=False))
def test_offered_tree_is_the_most_likely_one(widths: list[int], count: int, chance: random.Random) -> None:
    shares: dict[int, float] = {}

    def share(grade: int) -> float:
        return shares.setdefault(grade, chance.uniform(0.05, 0.33))

    found = drafted(share, count, widths)
    assert_whole(found, count)
    assert found.grades == draft_grades(found.parents)
    width = [*widths, *[1] * count]
    nodes = [line for size in range(1, count + 1) for line in product(range(3), repeat=size) if fits(line, width)]

    def worth(line: tuple[int, ...]) -> float:
        best, most = 1.0, 1.0
        for level, place in enumerate(line):
            most = min(best * share(draft_grade(level, at)) for at in range(place + 1))
            best = most
        return best

    assert sum(found.chances) == pytest.approx(sum(sorted(map(worth, nodes), reverse=True)[:count]))


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
    found = looked_up(share, 9, [2, 1, 2], lines)
    assert_whole(found, 9)
    told = {tuple(found.tokens[at] for at in branch(found.parents, node)) for node in range(len(found.parents))}
    assert told == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (7,), (7, 8), (7, 8, 9)}, "behind 1 there is room for one"
    assert looked_up(share, 2, [], lines).tokens == [1, 2] and looked_up(share, 9, [], lines).tokens == [1, 2, 3]


def rivals(tokens: Sequence[int], shares: Sequence[float]) -> Rivals:
    return Rivals(list(tokens), [math.log(share) if share else -math.inf for share in shares])


def test_fixed_shape_is_filled_level_by_level() -> None:
    one = FixedTree(SHAPE)
    one.add(OWN, rivals([10, 11, 12], [0.5, 0.3, 0.1]), ())
    assert one.next() == [0, 3] and one.slots == [0, 3] and one.num_rivals(0) == 2
    one.add(0, rivals([20, 21], [0.5, 0.3]), ())
    one.add(3, rivals([30], [0.9]), ())
    assert one.next() == [1] and one.behind(1) == (10, 20)
    one.add(1, rivals([40, 41], [0.5, 0.4]), ())
    assert one.next() == []
    assert one.slots == [0, 3, 1] and one.drafted() == DraftedPath([10, 20, 40, 11, 30, 21])


def test_nothing_is_drafted_behind_an_end() -> None:
    one = FixedTree(SHAPE)
    one.add(OWN, rivals([10, 11], [0.5, 0.0]), {10})
    assert one.next() == [] and one.drafted() == DraftedPath([10, *[NO_TOKEN] * 5])
    best = BestFirst(4, Growth([3, 2], 3))
    best.add(OWN, rivals([10, 11, 12], [0.5, 0.3, 0.0]), {10})
    assert best.next() == [1] and best.behind(1) == (11,)
    best.add(1, rivals([], []), ())
    assert best.next() == []
    assert best.drafted() == DraftedPath([10, 11, NO_TOKEN, NO_TOKEN], [OWN, OWN, 1, 2])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 3), max_size=3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_best_first_keeps_the_likeliest_that_it_could_reach(
    count: int, widths: list[int], deepest: int, chance: random.Random
) -> None:
    """Where the slots suffice for all that are among the likeliest, no tree of so many is likelier."""
    known: dict[tuple[int, ...], list[float]] = {}

    def shares(line: tuple[int, ...]) -> list[float]:
        return known.setdefault(line, sorted((chance.uniform(0.01, 0.6) for _ in range(3)), reverse=True))

    one = BestFirst(count, Growth(widths, deepest))
    nodes = [OWN]
    while nodes:
        for node in nodes:
            one.add(node, rivals([0, 1, 2], shares(one.behind(node))), ())
        nodes = one.next()
    told, slots = one.drafted(), one.slots
    assert len(slots) <= count and len(told.tokens) == len(told.parents) == count
    width = [*widths, *[1] * deepest]
    every = [line for size in range(1, deepest + 1) for line in product(range(3), repeat=size) if fits(line, width)]
    worth = {line: math.prod(shares(line[:at])[line[at]] for at in range(len(line))) for line in every}
    lines = [tuple(told.tokens[at] for at in branch(told.parents, node)) for node in range(count)]
    got = [worth[line] for line in lines if NO_TOKEN not in line]
    best = sorted(worth.values(), reverse=True)[:count]
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
    ids=["greedy", "warm", "cut"],
)
def test_first_of_several_is_the_sample_others_follow(one: Draw) -> None:
    scores = 2 * torch.randn((4, 40), generator=torch.Generator().manual_seed(2))
    several = draw_several(scores, [one] * 4, 20)
    assert [found.tokens[0] for found in several] == draw(scores, [one] * 4)
    for found in several:
        assert found.shares == sorted(found.shares, reverse=True) and len(set(found.tokens)) == 20
        assert sum(map(math.exp, found.shares)) <= 1 + 1e-5
    without = scores.clone()
    for at, found in enumerate(several):
        without[at, found.tokens[0]] = -math.inf
    if one.top_k is None:
        assert draw(without, [one] * 4) == [found.tokens[1] for found in several]


def plan_of(parents: list[int], own: int = 1, start: int = 5, computed: int = 0) -> StepPlan:
    """Row 0 with a tree behind its own tokens, of which a draft has computed some before, and row 1 that decodes plainly."""
    count = own + len(parents) - computed
    path = Path(request=0, depth=len(parents) - computed if own else count - 1, parents=parents)
    rows = [NewRow(row, wire.Sampling(max_tokens=1, seed=row, temperature=0.0)) for row in (0, 1)]
    pages = [list(range(2, 8)), [8, 9]]
    return StepPlan(
        step=1,
        admitted=rows,
        rows=[0, 1],
        starts=[start, 6],
        counts=[count, 1],
        pages=pages,
        tokens=list(range(count + 1)),
        draws=[(0, 0), (1, 0)],
        paths=[path],
    )


CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 3), st.sampled_from([None, 3, 100]), st.integers(0, 3))
def test_each_tree_token_attends_only_to_its_branch(parents: list[int], own: int, window: int | None, computed: int) -> None:
    """As if each branch were a chain of its own: the same numbers for each of its tokens."""
    heads, page, dim = 2, 4, 8
    own = 0 if computed else own
    computed = min(computed, len(parents) - 1)
    start = 5 + computed
    if own == 0 and computed == 0:
        own = 1
    plan = plan_of(parents, own, start, computed)
    made = BatchBuilder(CacheShape(page, heads, 1 << 10), torch.float64, CPU)
    batch = made.build(plan)
    first = start + own - computed  # where proposal 0 lies
    tokens = plan.counts[0]
    wanted = [*range(start, start + own), *(first + level for level in levels(tuple(parents))[computed:])]
    at = [int(place) for place in batch.drawn[: plan.depths[0] + 1]]
    by_token = {int(token): place for place, token in enumerate(batch.tokens.tolist())}
    assert [int(batch.positions[by_token[token]]) for token in range(tokens)] == wanted
    assert [int(batch.tokens[place]) for place in at] == list(range(tokens))[-len(at) :]
    chance = torch.Generator().manual_seed(len(parents))
    q, k, v = (torch.randn(tokens + 1, n, dim, generator=chance, dtype=torch.float64) for n in (2 * heads, heads, heads))
    cache = LayerCache(*(torch.randn(10, heads, page, dim, generator=chance, dtype=torch.float64) for _ in range(2)))
    form = AttentionForm(window=window)
    given = PagedAttention()(q, k, v, cache, batch, form)
    torch.testing.assert_close(given, DenseAttention()(q, k, v, cache, batch, form))
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
        torch.testing.assert_close(given[here], expected.reshape(-1))


def test_strays_are_put_in_place() -> None:
    made = BatchBuilder(CacheShape(4, 2, 1 << 10), torch.float64, CPU)
    made.build(plan_of(SHAPE))
    lie, belong = made.strays(
        StepPlan(
            step=2, admitted=[], rows=[0], starts=[9], counts=[1], pages=[[]], tokens=[50], draws=[(0, 3)], strays=[(0, [8, 10])]
        )
    )
    slots = [(page * 2 + head) * 4 + at for page, at in ((4, 0), (4, 2)) for head in (0, 1)]
    assert lie.tolist() == slots
    assert belong.tolist() == [(page * 2 + head) * 4 + at for page, at in ((3, 3), (4, 0)) for head in (0, 1)]


def test_grown_trees_are_filled_in_and_handed_on() -> None:
    growth = Growth([2, 2], 3)
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
            Path(request=0, depth=3, is_drafted=True, growth=growth),
            Path(request=1, depth=3, is_drafted=True, parents=[OWN, OWN, 0]),
        ],
    )
    full = filled(plan, [DraftedPath([7, 8, 9], [OWN, 0, 0]), DraftedPath([4, 5, 6])])
    assert full.tokens == [1, 7, 8, 9, 2, 4, 5, 6]
    assert [path.parents for path in full.paths] == [[OWN, 0, 0], [OWN, OWN, 0]]
    assert grown_shapes(full) == [[OWN, 0, 0]]
    assert filled_by_numbers(plan, drafted_numbers(full)) == full
    line = filled(plan, [DraftedPath([7, 8, 9], chain(3)), DraftedPath([4, 5, 6])])
    assert line.paths[0].parents == [] and grown_shapes(line) == [chain(3)]
    assert filled(plan, nothing(plan)).tokens == [1, *[NO_TOKEN] * 3, 2, *[NO_TOKEN] * 3]


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 1.0}], ids=["at once", "one by one"])
def test_run_follows_the_sampled_branch(sampling: dict[str, Any]) -> None:
    """The rows of scores are those behind each proposal: a wrong one would draw other tokens."""
    asked, prompt = wire.Sampling(max_tokens=20, seed=5, temperature=1.0, **sampling), [3, 1]
    plain = Sampler(16)
    plain.admit(NewRow(0, asked, 2, prompt))
    drawn: list[int] = []
    for index in range(5):
        drawn += plain.draw(scores_after(prompt + drawn, 16)[None], [(0, index)]).tokens
    wrong = [token ^ 1 for token in drawn]
    tokens = [wrong[0], wrong[1], drawn[0], wrong[1], drawn[1], wrong[2], drawn[2], drawn[3] ^ 2]
    parents = [OWN, 0, OWN, 2, 2, 4, 4, 6]
    lines = [[], *([tokens[at] for at in branch(parents, node)] for node in range(len(parents)))]
    sampler = Sampler(16)
    sampler.admit(NewRow(0, asked, 2, prompt))
    scores = torch.stack([scores_after(prompt + line, 16) for line in lines])
    found = sampler.draw(scores, [(0, 0)], [DraftedPath(tokens, parents)])
    assert (found.tokens, found.runs, found.taken) == (drawn[:4], [4], [(0, [2, 4, 6])])
