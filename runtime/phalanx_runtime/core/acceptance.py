"""How often proposals of a kind are the token that is drawn: followed for each request, with the engine's shares to begin from.

A proposal is looked at when all before it in its path were accepted. Its grade says how it came about: for a lookup how many
tokens agree before it, for a draft its position.

    share(grade) = (accepted + PRIOR * share of the engine) / (looked at + PRIOR)       the latest count more
"""

from collections.abc import Sequence

PRIOR = 4.0
"""So many looks the engine's share weighs in a request's own."""
FIRST_SHARE = 0.5
"""Of a grade that nobody has seen yet."""
FADE_OF_REQUEST, FADE_OF_ENGINE = 0.9, 0.99
"""How much a look counts relative to the next one."""


class Shares:
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


def add_path(shares: Shares, grades: Sequence[int], accepted: int) -> None:
    """What became of a path: so many of its proposals were accepted, and the next one, if there is one, was not."""
    for at, grade in enumerate(grades[: accepted + 1]):
        shares.add(grade, at < accepted)


def chances(own: Shares, engine: Shares, grades: Sequence[int]) -> list[float]:
    """For each proposal of a path the chance that it is accepted, and all before it."""
    found, chance = [], 1.0
    for grade in grades:
        chance *= own.of(grade, engine.of(grade, FIRST_SHARE))
        found.append(chance)
    return found


def lookup_grades(agreed: int, count: int) -> list[int]:
    """Grades of tokens found by a lookup: the magnitude of how many tokens agree before each, if those before it are accepted."""
    return [(agreed + at).bit_length() for at in range(count)]


def draft_grades(count: int) -> list[int]:
    """Grades of drafted tokens: below zero, apart from those of lookups."""
    return [-1 - at for at in range(count)]
