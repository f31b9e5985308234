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


def test_prose_has_the_figures_of_the_guard_s_table() -> None:
    text = PAGE.read_text()
    prose = text.replace("\n", " ").split("<!-- /guard -->")[1]
    row = re.search(
        r"^\| held-out \| (\d+) of \d+ \| (\d+) of (\d+) \| [^|]* \| (\S+)% \| (\S+)% to (\S+)% \| (\d+)%", text, re.M
    )
    line = re.search(r"^Near-misses that pass, held-out: (.*)\.$", text, re.M)
    assert row and line
    right, wrong, near, precision, least, most, recall = row.groups()
    kinds = {kind: (int(passing), int(count)) for kind, passing, count in re.findall(r"(\w+) (\d+) of (\d+)", line[1])}
    swapped, num_swaps = kinds["order"]
    assert float(precision) >= 99, "what the page promises"
    assert f"Of the {int(near):,} held-out near-misses {wrong} pass" in prose
    assert f"{num_swaps} of them swap roles or the order of words, of which {swapped} pass" in prose
    assert f"{right} of {int(right) + int(wrong)} answers are right" in prose
    assert prose.count(f"{precision} % ({least} to {most})") == 2 and f"and {recall} %. Over half" in prose
    assert f"| 0.80 | {precision}% | {least}% to {most}% | {recall}% |" in prose
