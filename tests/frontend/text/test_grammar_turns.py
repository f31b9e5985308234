"""The order in which callers' grammars are compiled."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx_frontend.openai.structured import GrammarTurns


def filled(turns: list[tuple[str, bytes]], limit: int = 4) -> GrammarTurns:
    waiting = GrammarTurns(limit)
    for turn in turns:
        waiting.add(turn)
    return waiting


def taken(turns: GrammarTurns) -> list[bytes | None]:
    return [turns.take() for _ in range(len(turns) + 1)]


def test_callers_take_turns() -> None:
    assert taken(filled([("a", b"1"), ("a", b"2"), ("a", b"3"), ("b", b"4")])) == [b"1", b"4", b"2", b"3", None]


def test_grammar_of_two_callers_is_taken_once() -> None:
    assert taken(filled([("a", b"1"), ("a", b"2"), ("b", b"2"), ("b", b"3")]))[:4] == [b"1", b"2", b"3", None]


def test_longest_caller_loses_its_newest() -> None:
    turns = filled([("a", b"1"), ("a", b"2"), ("a", b"3"), ("a", b"4")])
    assert turns.add(("b", b"5")) == [("a", b"4")]
    assert turns.add(("b", b"6")) == [("a", b"3")]
    assert turns.add(("b", b"7")) == [("b", b"7")], "both have two"
    assert turns.add(("a", b"8")) == [("a", b"8")]
    assert taken(turns) == [b"1", b"5", b"2", b"6", None]


def test_equal_grammars_of_callers_take_one_place() -> None:
    turns = filled([("a", b"1"), ("a", b"2"), ("b", b"1"), ("b", b"3")], limit=3)
    assert len(turns) == 3 and turns.add(("c", b"2")) == [], "it already waits"
    assert turns.add(("d", b"4")) == [("b", b"3")], "a's are shared with c, or are older"
    assert taken(turns) == [b"1", b"2", b"4", None]


def test_callers_with_equal_grammars_share_the_loss() -> None:
    """Else two callers with equal grammars would keep all places."""
    turns = filled([(caller, key) for caller in "ab" for key in (b"1", b"2", b"3")], limit=3)
    assert turns.add(("c", b"4")) == [("a", b"3"), ("b", b"3")]
    assert turns.add(("c", b"5")) == [("c", b"5")]


@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.binary(min_size=1, max_size=1)))))
def test_waiting_grammars_are_bounded_and_counted(steps: list[tuple[str, bytes] | None]) -> None:
    turns, known = GrammarTurns(5), set[tuple[str, bytes]]()
    for turn in steps:
        if turn is None:
            key = turns.take()
            assert (key is None) == (not known)
            known = {other for other in known if other[1] != key}
        elif turn not in known:
            is_new = turn[1] not in {key for _, key in known}
            refused = turns.add(turn)
            assert not refused or (is_new and len({key for _, key in known}) == 5)
            known = (known | {turn}).difference(refused)
        assert len(turns) == len({key for _, key in known}) <= 5
