"""Decisions about similar questions, with their reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_router.routing.semantic import Candidate, Decision, decide


def candidate(similarity: float, question: str = "a", output_tokens: int = 5, is_cut: bool = False) -> Candidate:
    name = f"{similarity} {question}".encode()
    return Candidate(key=name, similarity=similarity, question=question, output_tokens=output_tokens, is_cut=is_cut)


def guard(asked: str, stored: str) -> str | None:
    return None if asked == stored else "names"


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([], Decision(why="no_candidate")),
        ([candidate(0.94)], Decision(why="below_threshold", nearest=0.94)),
        ([candidate(0.95)], Decision(why="hit", hit=candidate(0.95), nearest=0.95)),
        ([candidate(0.99, "b")], Decision(why="guard_names", nearest=0.99)),
        ([candidate(0.99, "b"), candidate(0.96)], Decision(why="hit", hit=candidate(0.96), nearest=0.99)),
        ([candidate(0.96), candidate(0.99)], Decision(why="hit", hit=candidate(0.99), nearest=0.99)),
        ([candidate(0.99, output_tokens=11)], Decision(why="too_long", nearest=0.99)),
        ([candidate(0.99, is_cut=True)], Decision(why="cut", nearest=0.99)),
        (
            [candidate(0.99, output_tokens=10, is_cut=True)],
            Decision(why="hit", hit=candidate(0.99, output_tokens=10, is_cut=True), nearest=0.99),
        ),
        ([candidate(0.99, "b"), candidate(0.5)], Decision(why="guard_names", nearest=0.99)),
    ],
    ids=str,
)
def test_most_similar_permitted_question_answers(candidates: list[Candidate], expected: Decision) -> None:
    assert decide("a", 10, candidates, 0.95, guard) == expected


@given(
    similarities=st.lists(st.floats(-1, 1), max_size=5),
    threshold=st.floats(0, 1),
    questions=st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
)
def test_hit_is_above_the_threshold_and_permitted(similarities: list[float], threshold: float, questions: list[str]) -> None:
    candidates = [candidate(value, question) for value, question in zip(similarities, questions, strict=False)]
    decision = decide("a", 10, candidates, threshold, guard)
    permitted = [one for one in candidates if one.similarity >= threshold and one.question == "a"]
    assert (decision.hit is not None) == bool(permitted) == (decision.why == "hit")
    if decision.hit is not None:
        assert decision.hit.similarity == max(one.similarity for one in permitted)
    assert decision.nearest == (max(similarities) if similarities else None)
