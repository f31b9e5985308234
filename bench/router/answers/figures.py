"""Precision and recall of answers from similar questions, by threshold, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.router.answers.pairs import Pair

THRESHOLDS = tuple(round(0.80 + 0.01 * step, 2) for step in range(20))
LEAST_PRECISION = 0.99
DEFAULT_THRESHOLD = 0.92
MOST_UNRELATED = 0.02
"""Share of unrelated pairs above a threshold that is worth having beside the guard."""
_Z95 = 1.959964
_FOLDS = 10


@dataclass(frozen=True, slots=True)
class Scored:
    """A pair, the cosine of its vectors, and whether the guard lets it pass."""

    pair: Pair
    cosine: float
    is_guarded: bool


@dataclass(frozen=True, slots=True)
class Point:
    """What a threshold lets through."""

    threshold: float
    right: int
    wrong: int
    all_same: int

    @property
    def precision(self) -> float:
        """Share of the right among the served pairs; NaN if none is served."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else math.nan

    @property
    def recall(self) -> float:
        return self.right / self.all_same if self.all_same else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the precision."""
        return wilson(self.right, self.right + self.wrong)


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share. Source: Wilson 1927."""
    if not trials:
        return 0.0, 1.0
    share, square = hits / trials, _Z95**2
    middle = share + square / (2 * trials)
    half = _Z95 * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    scale = 1 + square / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def point(scored: Sequence[Scored], threshold: float, *, is_guarded: bool) -> Point:
    """Returns what passes the threshold, and the guard if `is_guarded`."""
    served = [one.pair.is_same for one in scored if one.cosine >= threshold and (one.is_guarded or not is_guarded)]
    return Point(threshold, sum(served), len(served) - sum(served), sum(one.pair.is_same for one in scored))


def lowest_threshold(
    scored: Sequence[Scored], unrelated: npt.NDArray[np.float32] | None = None, *, is_guarded: bool
) -> float | None:
    """Returns the lowest threshold of the table with a precision of at least 99 %; None without one.

    With the cosines of unrelated pairs, at most 2 % of them are above it.
    """
    for threshold in THRESHOLDS:
        at = point(scored, threshold, is_guarded=is_guarded)
        is_selective = unrelated is None or float((unrelated >= threshold).mean()) <= MOST_UNRELATED
        if is_selective and at.right and at.precision >= LEAST_PRECISION:
            return threshold
    return None


def best_recall(scored: Sequence[Scored], *, is_guarded: bool) -> float:
    """Returns the highest recall at a precision of at least 99 %, over all thresholds."""
    kept = sorted((one for one in scored if one.is_guarded or not is_guarded), key=lambda one: -one.cosine)
    right = np.cumsum([one.pair.is_same for one in kept])
    fits = right >= LEAST_PRECISION * np.arange(1, len(kept) + 1)
    return float(right[fits].max() / sum(one.pair.is_same for one in scored)) if fits.any() else 0.0


def area(scored: Sequence[Scored]) -> float:
    """Returns the probability that a paraphrase has a higher cosine than a near-miss."""
    same = np.array([one.cosine for one in scored if one.pair.is_same])
    near = np.array([one.cosine for one in scored if not one.pair.is_same])
    return float((same[:, None] > near).mean() + (same[:, None] == near).mean() / 2)


def cross_validated(scored: Sequence[Scored], unrelated: npt.NDArray[np.float32]) -> Point:
    """Returns what thresholds serve that were chosen without the family of the pair: ten folds of families."""
    families = sorted({one.pair.family for one in scored})
    fold = {family: index % _FOLDS for index, family in enumerate(families)}
    right = wrong = 0
    for number in range(_FOLDS):
        threshold = lowest_threshold([one for one in scored if fold[one.pair.family] != number], unrelated, is_guarded=True)
        if threshold is not None:
            at = point([one for one in scored if fold[one.pair.family] == number], threshold, is_guarded=True)
            right, wrong = right + at.right, wrong + at.wrong
    return Point(math.nan, right, wrong, sum(one.pair.is_same for one in scored))
