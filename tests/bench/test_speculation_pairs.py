"""Tokens with proposals are those without, in so many cells that every two of proposer, shape, group and disturbance meet in one.

Each has all ways to sample: greedy, seeded, filters, penalties, bias and bad words, grammars, a JSON schema. In float64.
All cells there are: `python -m bench.speculation.product`.
"""

import pytest

from bench.speculation.product import (
    DISTURBANCES,
    GROUPS,
    PROPOSERS,
    SHAPES,
    Bench,
    Choice,
    choices,
    make_bench,
    pairs_of,
    pairwise,
    requests,
)

EVERY = choices(PROPOSERS, SHAPES, GROUPS, DISTURBANCES)
SOME = pairwise(EVERY)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("pairs"))


def test_every_two_choices_meet() -> None:
    assert set().union(*map(pairs_of, SOME)) == set().union(*map(pairs_of, EVERY))
    assert len(SOME) < len(EVERY) / 5
    asked = [one.sampling for one in requests()]
    assert {one.temperature > 0 for one in asked} == {False, True} and any(one.repetition_penalty != 1 for one in asked)
    assert {one.grammar.kind for one in asked if one.grammar is not None} >= {"json_schema"}


@pytest.mark.parametrize("one", SOME, ids=" ".join)
def test_tokens_are_those_without(bench: Bench, one: Choice) -> None:
    cell = bench.cell(one)
    assert cell.holds(is_tree=one.shape != "chain"), cell
