"""Stop strings across token boundaries."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_frontend.text.stop import StopStrings

TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


def run(stops: list[str], parts: list[str], include: bool = False) -> tuple[str, str | None]:
    search = StopStrings(stops, include)
    text = ""
    for part in parts:
        text += search.feed(part)
        if search.found is not None:
            return text, search.found
    return text + search.end(), None


def by_reading(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Reference: examines every prefix of the text, in order."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@settings(deadline=None, max_examples=60)
@given(stops=STOPS, parts=st.lists(TEXT, max_size=6), include=st.booleans())
def test_cut_is_independent_of_text_pieces(stops: list[str], parts: list[str], include: bool) -> None:
    assert run(stops, parts, include) == by_reading(stops, "".join(parts), include)


@settings(deadline=None, max_examples=60)
@given(stops=STOPS, parts=st.lists(TEXT, max_size=6))
def test_only_possible_stop_prefixes_are_held(stops: list[str], parts: list[str]) -> None:
    search = StopStrings(stops)
    sent = received = ""
    for part in parts:
        received += part
        sent += search.feed(part)
        if search.found is not None:
            return
        held = received[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (["STOP"], ["go S", "TO", "P on"], ("go ", "STOP")),
        (["STOP"], ["STO", "OP"], ("STOOP", None)),
        (["b", "abc"], ["xabc"], ("xa", "b")),
        (["bc", "abc"], ["xab", "c"], ("x", "abc")),
        (["aab"], ["aa", "ab"], ("a", "aab")),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ("one\ntwo", "\n\n")),
    ],
    ids=["across three parts", "false start", "complete first wins", "longest of those at once", "overlap", "line ends"],
)
def test_the_text_ends_where_a_stop_string_is_complete(
    stops: list[str], parts: list[str], expected: tuple[str, str | None]
) -> None:
    assert run(stops, parts) == expected
