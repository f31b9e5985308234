"""Acceptance rates of draft tokens by grade, per request, with the engine's rates as prior.

A draft token counts once all before it in its branch were accepted. Its grade is its origin: for an n-gram match the number of
agreeing tokens before it, for a draft model its level; and its rank among its siblings.

    rate(grade) = (accepted + PRIOR * rate of the engine) / (verified + PRIOR)       recent counts weigh more
"""

from collections.abc import Callable, Collection, Sequence

from phalanx_api.speculation import MAX_DEPTH
from phalanx_runtime.core.draft_tree import OWN, levels, places

PRIOR = 4.0
"""Weight of the engine's rate in a request's own, in verified tokens."""
FIRST_SHARE = 0.5
"""Rate of an unknown grade for the first sibling; each further sibling has half of it."""
FADE_OF_REQUEST, FADE_OF_ENGINE = 0.9, 0.99
"""Weight of a verified token relative to the next one."""


class AcceptanceRates:
    """Accepted and verified tokens, by grade."""

    __slots__ = ("_accepted", "_fade", "_looked")

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._accepted: dict[int, float] = {}
        self._looked: dict[int, float] = {}

    def add(self, grade: int, accepted: bool) -> None:
        """Records one verified token."""
        self._looked[grade] = self._fade * self._looked.get(grade, 0.0) + 1.0
        self._accepted[grade] = self._fade * self._accepted.get(grade, 0.0) + accepted

    def of(self, grade: int, before: float) -> float:
        """Returns the rate of a grade, with `before` as prior."""
        return (self._accepted.get(grade, 0.0) + PRIOR * before) / (self._looked.get(grade, 0.0) + PRIOR)


_MAGNITUDES = 8
"""Above the largest number of agreeing tokens."""


def ngram_grade(agreed: int, place: int = 0) -> int:
    """Returns the grade of an n-gram token: the magnitude of the number of agreeing tokens before it."""
    return min(agreed.bit_length(), _MAGNITUDES - 1) + _MAGNITUDES * place


def draft_grade(level: int, place: int = 0) -> int:
    """Returns the grade of a drafted token: negative, to differ from n-gram grades."""
    return -1 - level - MAX_DEPTH * place


def _first_share(grade: int) -> float:
    place = (-1 - grade) // MAX_DEPTH if grade < 0 else grade // _MAGNITUDES
    return FIRST_SHARE / 2.0**place


Share = Callable[[int], float]
"""Acceptance rate by grade."""


def acceptance_rate_of(own: AcceptanceRates, engine: AcceptanceRates) -> Share:
    """Returns a request's rates with its engine's as prior."""
    return lambda grade: own.of(grade, engine.of(grade, _first_share(grade)))


def add_tree(
    shares: AcceptanceRates, parents: Sequence[int], grades: Sequence[int], accepted: Sequence[int], unasked: Collection[int] = ()
) -> None:
    """Updates the rates: `accepted` succeeded, their rejected siblings and those of the request's own token failed, `unasked` are
    ignored."""
    taken = {OWN, *accepted}
    for node, (parent, grade) in enumerate(zip(parents, grades, strict=True)):
        if parent in taken and node not in unasked:
            shares.add(grade, node in taken)


def draft_grades(parents: Sequence[int]) -> list[int]:
    """Returns the grades of drafted tokens of this shape."""
    shape = tuple(parents)
    return [draft_grade(level, place) for level, place in zip(levels(shape), places(shape), strict=True)]
