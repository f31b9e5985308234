"""docs/troubleshooting.md explains exactly the reasons that a condition may have."""

import pathlib
import re
from typing import get_args

from phalanx_api.conditions import ConditionType, Reason

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def rows() -> list[list[str]]:
    """Returns the cells of each row that begins with a reason."""
    lines = PAGE.read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| `\w+` \|", line)]


def test_every_reason_has_one_row() -> None:
    assert sorted(row[0].strip("`") for row in rows()) == sorted(reason.value for reason in Reason)


def test_every_reason_has_a_cause_and_an_action() -> None:
    assert [row[0] for row in rows() if len(row) != 3 or not row[1] or not row[2]] == []


def test_every_condition_has_a_section() -> None:
    headings = " ".join(re.findall(r"^## (.*)$", PAGE.read_text(), re.M))
    assert [kind for kind in get_args(ConditionType) if kind not in headings] == []
