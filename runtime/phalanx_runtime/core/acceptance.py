"""How often proposals of a kind are the token that is drawn: followed for each request, with the engine's shares to begin from.

A proposal is looked at when all before it in its branch were accepted. Its grade says how it came about: for a lookup how many
tokens agree before it, for a draft its level; and how many others its parent has before it.

    share(grade) = (accepted + PRIOR * share of the engine) / (looked at + PRIOR)       the latest count more
"""

from collections.abc import Callable, Collection, Sequence

from phalanx_api.speculation import MAX_DEPTH
from phalanx_runtime.core.draft_tree import OWN, levels, places

PRIOR = 4.0
"""So many looks the engine's share weighs in a request's own."""
FIRST_SHARE = 0.5
"""Of a grade that nobody has seen yet, if it is the first of its place; of the next half as much, and so on."""
FADE_OF_REQUEST, FADE_OF_ENGINE = 0.9, 0.99
"""How much a look counts relative to the next one."""


class AcceptanceRates:
    """Accepted and looked at, by grade."""

    __slots__ = ("_accepted", "_fade", "_looked")

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._accepted: dict[int, float] = {}
        self._looked: dict[int, float] = {}

    def add(self, grade: int, accepted: bool) -> None:
        """One look."""
        self._looked[grade] = self._fade * self._looked.get(grade, 0.0) + 1.0
        self._accepted[grade] = self._fade * self._accepted.get(grade, 0.0) + accepted

    def of(self, grade: int, before: float) -> float:
        """The share of a grade, when `before` is believed before anything was seen."""
        return (self._accepted.get(grade, 0.0) + PRIOR * before) / (self._looked.get(grade, 0.0) + PRIOR)


_MAGNITUDES = 8
"""More than there are of agreements."""


def ngram_grade(agreed: int, place: int = 0) -> int:
    """The grade of a looked-up token: the magnitude of how many tokens agree before it, if those before it are accepted."""
    return min(agreed.bit_length(), _MAGNITUDES - 1) + _MAGNITUDES * place


def draft_grade(level: int, place: int = 0) -> int:
    """The grade of a drafted token: below zero, apart from those of lookups."""
    return -1 - level - MAX_DEPTH * place


def _first_share(grade: int) -> float:
    place = (-1 - grade) // MAX_DEPTH if grade < 0 else grade // _MAGNITUDES
    return FIRST_SHARE / 2.0**place


Share = Callable[[int], float]
"""How often proposals of this grade are accepted."""


def acceptance_rate_of(own: AcceptanceRates, engine: AcceptanceRates) -> Share:
    """A request's shares, begun with those of its engine."""
    return lambda grade: own.of(grade, engine.of(grade, _first_share(grade)))


def add_tree(
    shares: AcceptanceRates, parents: Sequence[int], grades: Sequence[int], accepted: Sequence[int], unasked: Collection[int] = ()
) -> None:
    """What became of proposals: these were accepted, and the other ones behind them and the request's own token were not. Those
    of `unasked` say nothing."""
    taken = {OWN, *accepted}
    for node, (parent, grade) in enumerate(zip(parents, grades, strict=True)):
        if parent in taken and node not in unasked:
            shares.add(grade, node in taken)


def draft_grades(parents: Sequence[int]) -> list[int]:
    """The grades of drafted proposals of this shape."""
    shape = tuple(parents)
    return [draft_grade(level, place) for level, place in zip(levels(shape), places(shape), strict=True)]
