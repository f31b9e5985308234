"""The slope of a series over time, with an interval, across restarts of the process.

The slope is the median of the slopes of all pairs of blocks of the same life (Theil-Sen); lives differ in level and share one
slope. A few outliers or a restart change nothing.

The interval is that of the slopes of series made of the same changes from block to block, drawn in runs of neighbouring ones
(block bootstrap). Memory keeps its highest use: a heap that grew in three steps of an hour has three changes, and without them no
slope, so they are not evidence of growth; thirty steps are.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

BLOCK_S = 60.0
"""Samples of a block become one point, their median."""
MIN_BLOCKS = 20
"""Fewer blocks after the warm-up give no verdict: the runs drawn from them would hardly differ."""
REPLICATES = 999
"""At least: an interval at a level near 1 needs more of them in its tails."""
_MAX_SLOPES = 1 << 21
"""Slopes of pairs in memory at once."""
_EXACT = 1e-9
"""Of the largest value: what rounding leaves of a slope of zero."""
Verdict = Literal["none", "grows", "falls", "too short"]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one life of a process."""

    life: str
    at_s: float
    value: float


@dataclass(frozen=True, slots=True)
class Slope:
    """A slope per hour with its interval."""

    per_hour: float
    low: float
    high: float
    num_blocks: int
    hours: float
    """Time after the warm-ups, all lives together."""

    @property
    def verdict(self) -> Verdict:
        """Whether the slope is distinguishable from zero."""
        if self.num_blocks < MIN_BLOCKS:
            return "too short"
        if self.low <= 0 <= self.high:
            return "none"
        return "grows" if self.per_hour > 0 else "falls"


def slope(points: Sequence[Point], warm_up_s: float, level: float = 0.95, block_s: float = BLOCK_S) -> Slope:
    """Returns the slope of points in order of time. Each life begins with a warm-up, which does not count.

    level: probability that the interval of a series that does not grow contains zero.
    """
    times, values, lives = _blocks(points, warm_up_s, block_s)
    count = len(times)
    hours = count * block_s / 3600
    if count < MIN_BLOCKS:
        return Slope(math.nan, -math.inf, math.inf, count, hours)
    pairs = _pairs(lives)
    if not len(pairs[0]):
        return Slope(math.nan, -math.inf, math.inf, 0, hours)
    middle = _theil_sen(times, values, pairs)
    replicates = max(REPLICATES, math.ceil(4 / (1 - level)))
    spread = _replicates(times, values, lives, pairs, replicates)
    tail = (1 - level) / 2
    low, high = np.quantile(spread, [tail, 1 - tail])
    rounding = _EXACT * float(np.abs(values).max()) / max(hours, 1 / 3600)
    return Slope(middle, min(middle, float(low)) - rounding, max(middle, float(high)) + rounding, count, hours)


def adjusted_level(num_series: int, level: float = 0.95) -> float:
    """Returns the level of each of several intervals which all contain their slopes with probability `level` (Bonferroni)."""
    return 1 - (1 - level) / max(1, num_series)


def _blocks(points: Sequence[Point], warm_up_s: float, block_s: float) -> tuple[Values, Values, NDArray[np.int64]]:
    """Returns hours, medians and lives of the blocks after the warm-up, life by life: pods of one role live at the same time."""
    starts = dict[str, float]()
    grouped = defaultdict[tuple[str, int], list[Point]](list)
    for point in points:
        age = point.at_s - starts.setdefault(point.life, point.at_s)
        if age >= warm_up_s:
            grouped[point.life, int((age - warm_up_s) // block_s)].append(point)
    numbers = {life: number for number, life in enumerate(starts)}
    blocks = sorted(grouped.items(), key=lambda item: (numbers[item[0][0]], item[0][1]))  # neighbours are of one life
    times = np.array([np.mean([point.at_s for point in block]) / 3600 for _, block in blocks])
    values = np.array([np.median([point.value for point in block]) for _, block in blocks])
    return times, values, np.array([numbers[life] for (life, _), _ in blocks], dtype=np.int64)


def _pairs(lives: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns the earlier and later indices of all pairs of the same life."""
    earlier, later = np.triu_indices(len(lives), 1)
    is_same = lives[earlier] == lives[later]
    return earlier[is_same], later[is_same]


def _theil_sen(times: Values, values: Values, pairs: tuple[NDArray[np.intp], NDArray[np.intp]]) -> float:
    earlier, later = pairs
    return float(np.median((values[later] - values[earlier]) / (times[later] - times[earlier])))


def _replicates(
    times: Values, values: Values, lives: NDArray[np.int64], pairs: tuple[NDArray[np.intp], NDArray[np.intp]], replicates: int
) -> Values:
    """Returns the slopes of series of drawn changes, in runs of about the square root of their number."""
    is_same = lives[1:] == lives[:-1]
    spans = np.diff(times)
    rates = np.diff(values)[is_same] / spans[is_same]
    count, run = len(rates), math.ceil(math.sqrt(len(rates)))
    starts = np.random.default_rng(0).integers(0, count, (replicates, math.ceil(count / run)))
    drawn = ((starts[:, :, None] + np.arange(run)) % count).reshape(replicates, -1)[:, :count]
    changes = np.zeros((replicates, len(values)))
    changes[:, 1:][:, is_same] = rates[drawn] * spans[is_same]
    earlier, later = pairs
    series, distances = np.cumsum(changes, axis=1), times[later] - times[earlier]
    rows = max(1, _MAX_SLOPES // len(distances))
    parts = (series[start : start + rows] for start in range(0, replicates, rows))
    return np.concatenate([np.median((part[:, later] - part[:, earlier]) / distances, axis=1) for part in parts])
