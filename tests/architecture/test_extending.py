"""Each step of docs/extending.md names a file and a word that occurs in it."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
STEPS = re.findall(r"^\d+\. `([^`]+)` `([^`]+)`:", PAGE, re.M)
NUMBERED = re.findall(r"^\d+\. ", PAGE, re.M)


@pytest.mark.parametrize(("file", "word"), STEPS)
def test_step_points_at_existing_code(file: str, word: str) -> None:
    assert word in (ROOT / file).read_text()


def test_every_step_names_a_file() -> None:
    assert len(STEPS) == len(NUMBERED)
