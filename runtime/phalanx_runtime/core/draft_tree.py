"""Draft trees: the parent of each draft token, and acceptance rates of tokens by grade.

    parents  -1  0  1  -1  3          root - 0 - 1 - 2
                                          \\ 3 - 4

    rate(grade) = (accepted + PRIOR * engine's rate) / (verified + PRIOR)       counts decay

Parents precede children; siblings are in order of probability. A token is verified if its parent was accepted. Its grade: its
rank among siblings with the level of a draft or the length of an n-gram match. Requests have rates of their own.
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from phalanx_api.speculation import MAX_DEPTH

ROOT = -1
"""The request's last own token."""


def chain(count: int) -> list[int]:
    """Returns the parents of a chain."""
    return list(range(ROOT, count - 1))


def is_chain(parents: Sequence[int]) -> bool:
    """Returns whether each token follows the previous one."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


@lru_cache(maxsize=1024)
def levels(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the depth of each token, from 0."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=1024)
def sibling_ranks(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the index of each token among its siblings."""
    num_children: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(num_children.get(parent, 0))
        num_children[parent] = ranks[-1] + 1
    return tuple(ranks)


def restrict_tree(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Returns the parents of the `kept` nodes, renumbered. `kept` is ascending and contains all parents."""
    number_of = {ROOT: ROOT} | {node: number for number, node in enumerate(kept)}
    return [number_of[parents[node]] for node in kept]


PRIOR = 4.0
"""Weight of the engine's rate, in verified tokens."""
DEFAULT_RATE = 0.5
"""Initial rate of the first sibling; halved for each further one."""
REQUEST_DECAY, ENGINE_DECAY = 0.9, 0.99
"""Decay of counts per verified token."""


class AcceptanceRates:
    """Counts by grade."""

    __slots__ = ("_accepted", "_decay", "_verified")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._accepted: dict[int, float] = {}
        self._verified: dict[int, float] = {}

    def add(self, grade: int, is_accepted: bool) -> None:
        """Counts one verified token."""
        self._verified[grade] = self._decay * self._verified.get(grade, 0.0) + 1.0
        self._accepted[grade] = self._decay * self._accepted.get(grade, 0.0) + is_accepted

    def rate(self, grade: int, prior_rate: float) -> float:
        """Returns a grade's acceptance rate."""
        return (self._accepted.get(grade, 0.0) + PRIOR * prior_rate) / (self._verified.get(grade, 0.0) + PRIOR)


_MAGNITUDES = 8
"""More than the bit length of `MAX_MATCH` plus levels."""


def ngram_grade(num_matching: int, sibling_rank: int = 0) -> int:
    """Returns the grade of an n-gram token, by the bit length of the match."""
    return min(num_matching.bit_length(), _MAGNITUDES - 1) + _MAGNITUDES * sibling_rank


def draft_grade(level: int, sibling_rank: int = 0) -> int:
    """Returns the grade of a drafted token, a negative number."""
    return -1 - level - MAX_DEPTH * sibling_rank


def _default_rate(grade: int) -> float:
    sibling_rank = (-1 - grade) // MAX_DEPTH if grade < 0 else grade // _MAGNITUDES
    return DEFAULT_RATE / 2.0**sibling_rank


RateByGrade = Callable[[int], float]


def acceptance_rate_of(own: AcceptanceRates, engine: AcceptanceRates) -> RateByGrade:
    """Returns a request's rates with the engine's as prior."""
    return lambda grade: own.rate(grade, engine.rate(grade, _default_rate(grade)))


def add_tree(
    rates: AcceptanceRates,
    parents: Sequence[int],
    grades: Sequence[int],
    accepted: Sequence[int],
    unverified: Collection[int] = (),
) -> None:
    """Counts `accepted` nodes and their rejected siblings, except `unverified` ones."""
    verified_parents = {ROOT, *accepted}
    for node, (parent, grade) in enumerate(zip(parents, grades, strict=True)):
        if parent in verified_parents and node not in unverified:
            rates.add(grade, node in verified_parents)


def draft_grades(parents: Sequence[int]) -> list[int]:
    """Returns the grades of a drafted tree."""
    shape = tuple(parents)
    return [draft_grade(level, rank) for level, rank in zip(levels(shape), sibling_ranks(shape), strict=True)]
