"""docs/equal-requests.md has what the lexical guard lets pass of the labelled pairs, generated from them."""

import pathlib
import re

import numpy as np
import pytest

from bench.router.answers.__main__ import scores
from bench.router.answers.pairs import FILES, read_pairs, texts_of
from bench.router.answers.tables import guard_table

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "equal-requests.md"
BETWEEN = re.compile(r"(<!-- guard: .*? -->\n).*?(<!-- /guard -->)", re.S)


def test_the_table_of_the_guard_is_the_generated_one(request: pytest.FixtureRequest) -> None:
    found = read_pairs()
    vectors = dict.fromkeys(texts_of(found), np.ones(1, np.float32))
    table = guard_table({part: scores([pair for pair in found if pair.part == part], vectors) for part in FILES})
    text = PAGE.read_text()
    made, count = BETWEEN.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if request.config.getoption("--golden-update", default=False):
        PAGE.write_text(made)
    assert count == 1 and PAGE.read_text() == made, "run `make golden`"
