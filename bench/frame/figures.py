"""Percentiles, ratios of interleaved pairs with their interval, and tables on the screen."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond 15, that of 16.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T95_BEYOND = 2.12


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` % of the sorted values do not exceed, interpolated; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and the percentiles that matter."""
    mean = statistics.fmean(values) if values else math.nan
    return {"mean": mean} | {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of the pairs' ratios and its 95 % interval (Student's t over their logarithms)."""

    mean: float
    low: float
    high: float
    num_pairs: int


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """How many times `ours` is `theirs`, pair by pair. One pair has no interval: it is unbounded."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(middle), 0.0, math.inf, len(logs))
    half = half_interval(logs)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(logs))


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean; 0 of one value, which has none."""
    if len(values) < 2:
        return 0.0
    return _quantile(len(values)) * statistics.stdev(values) / math.sqrt(len(values))


def _quantile(count: int) -> float:
    """Of Student's t, for the mean of so many values."""
    return _T95[count - 2] if count - 2 < len(_T95) else _T95_BEYOND


@dataclass(frozen=True, slots=True)
class Median:
    """Of some values, and its 95 % interval from one of them to another, whatever they are distributed like."""

    middle: float
    low: float
    high: float
    count: int


def median_of(values: Sequence[float]) -> Median:
    """The median of positive values. Of fewer than six no two values are far enough apart: its interval is unbounded.

    The k-th of n values from below is above the true median with the chance that of n fair coins fewer than k show heads.
    """
    ordered, count = sorted(values), len(values)
    outside, chance = 0, 0.0
    while (chance := chance + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    bounds = (ordered[outside - 1], ordered[-outside]) if outside else (0.0, math.inf)
    return Median(statistics.median(ordered), *bounds, count)


def is_near(ratio: Ratio, bound: float) -> bool:
    """Whether the mean is within 10 % of the bound, or the interval reaches over it: then more pairs are wanted."""
    return abs(ratio.mean / bound - 1) <= 0.1 or ratio.low < bound <= ratio.high


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
