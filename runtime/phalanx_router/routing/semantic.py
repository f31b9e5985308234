"""Decision whether the stored response to a similar question answers a request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Guard = Callable[[str, str], str | None]
"""`differs(asked, stored)`: why two texts may not have one answer, as a code; null if they may."""
MAX_CANDIDATES = 4
"""Nearest questions that a decision compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A stored question of the same conversation, and its response."""

    key: bytes  # of the response
    similarity: float  # cosine of the embeddings of both questions
    question: str
    output_tokens: int
    is_cut: bool  # whether the output ended at its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Outcome for one request. `why` is a code for metrics."""

    why: str
    hit: Candidate | None = None
    nearest: float | None = None
    """Highest similarity of all candidates."""


def decide(question: str, max_tokens: int, candidates: Sequence[Candidate], threshold: float, differs: Guard) -> Decision:
    """Returns the most similar candidate that may answer `question`, or why none may: the reason of the most similar one.

    `max_tokens`: limit of the request's output. Reasons: `no_candidate`, `below_threshold`, `too_long` (the output exceeds the
    limit), `cut` (it ended at another limit), and `guard_` with the code of `differs`.
    """
    ranked = sorted(candidates, key=lambda candidate: -candidate.similarity)
    if not ranked:
        return Decision(why="no_candidate")
    nearest, first_reason = ranked[0].similarity, ""
    for candidate in ranked:
        reason = _objection(question, max_tokens, candidate, threshold, differs)
        if reason is None:
            return Decision(why="hit", hit=candidate, nearest=nearest)
        first_reason = first_reason or reason
    return Decision(why=first_reason, nearest=nearest)


def _objection(question: str, max_tokens: int, candidate: Candidate, threshold: float, differs: Guard) -> str | None:
    if candidate.similarity < threshold:
        return "below_threshold"
    if candidate.output_tokens > max_tokens:
        return "too_long"
    if candidate.is_cut and candidate.output_tokens < max_tokens:
        return "cut"
    difference = differs(question, candidate.question)
    return None if difference is None else f"guard_{difference}"
