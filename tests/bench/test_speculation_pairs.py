"""Tokens with speculation equal those without, in combinations that contain every pair of method, shape, group and disturbance.

Each has all sampling modes: greedy, seeded, filters, penalties, bias and bad words, grammars, a JSON schema, in float64.
`python -m bench.speculation.product` runs all combinations.
"""

import pytest

from bench.speculation.product import (
    DISTURBANCES,
    GROUPS,
    METHODS,
    SHAPES,
    Bench,
    Choice,
    choices,
    make_bench,
    pairs_of,
    pairwise,
    requests,
)

EVERY = choices(METHODS, SHAPES, GROUPS, DISTURBANCES)
SOME = pairwise(EVERY)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("pairs"))


def test_every_two_choices_meet() -> None:
    assert set().union(*map(pairs_of, SOME)) == set().union(*map(pairs_of, EVERY))
    assert len(SOME) < len(EVERY) / 5
    sampling = [request.sampling for request in requests()]
    assert {params.temperature > 0 for params in sampling} == {False, True} and any(
        params.repetition_penalty != 1 for params in sampling
    )
    assert {params.grammar.kind for params in sampling if params.grammar is not None} >= {"json_schema"}


@pytest.mark.parametrize("choice", SOME, ids=" ".join)
def test_tokens_are_those_without(bench: Bench, choice: Choice) -> None:
    result = bench.run(choice)
    assert result.holds(is_tree=choice.shape != "chain"), result
