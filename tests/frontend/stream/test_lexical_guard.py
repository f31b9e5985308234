"""Texts with nearly equal vectors that ask for different things."""

import pytest

from phalanx_frontend.stream.lexical_guard import differs


@pytest.mark.parametrize(
    ("asked", "stored", "reason"),
    [
        ("what is 3 + 4", "what is 4 + 3?", None),
        ("what is 3 + 4", "what is 3 + 5", "numbers"),
        ("3 and 3", "3", "numbers"),
        ("version 1.5", "version 15", "numbers"),
        ("is it safe", "is it not safe", "negation"),
        ("Is it safe?", "is it safe, please", None),
        ("why doesn't it work", "why does it not work", None),
        ("why doesn\N{RIGHT SINGLE QUOTATION MARK}t it work", "why does it work", "negation"),
        ("with sugar", "without sugar", "negation"),
        ("", "", None),
    ],
)
def test_numbers_and_negations_must_agree(asked: str, stored: str, reason: str | None) -> None:
    assert differs(asked, stored) == differs(stored, asked) == reason
