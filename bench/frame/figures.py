"""Figures of benchmarks: percentiles, ratios of interleaved pairs with their interval, verdicts, and tables."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx_runtime.terminal.figures import percentile as percentile
from phalanx_runtime.terminal.figures import summary as summary
from phalanx_runtime.terminal.figures import table as table

Verdict = Literal["yes", "NO", "not distinguishable"]

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond 15, that of 16.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T95_BEYOND = 2.12


@dataclass(frozen=True, slots=True)
class Interval:
    middle: float
    low: float
    high: float
    num_pairs: int

    def verdict(self, bound: float, *, is_least: bool = True) -> Verdict:
        """Returns whether the ratio is at least (else at most) the bound; undecided if the bound lies in the interval."""
        low, high = (self.low, self.high) if is_least else (-self.high, -self.low)
        limit = bound if is_least else -bound
        if low < limit <= high:
            return "not distinguishable"
        return "yes" if low >= limit else "NO"

    def is_near(self, bound: float) -> bool:
        """Returns whether more pairs are needed: the middle is within 10 % of the bound, or the bound lies in the interval."""
        return abs(self.middle / bound - 1) <= 0.1 or self.low < bound <= self.high


def mean_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Returns the geometric mean of the pairs' ratios, with Student's t interval of their logarithms.

    One pair has an unbounded interval.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(middle), 0.0, math.inf, len(logs))
    half = half_interval(logs)
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(logs))


def median_interval(ratios: Sequence[float]) -> Interval:
    """Returns the median of positive ratios; its interval assumes no distribution and is unbounded below six pairs.

    The k-th smallest of n values exceeds the true median with the probability that n fair coins show fewer than k heads
    (sign test).
    """
    ordered, count = sorted(ratios), len(ratios)
    outside, chance = 0, 0.0
    while (chance := chance + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    bounds = (ordered[outside - 1], ordered[-outside]) if outside else (0.0, math.inf)
    return Interval(statistics.median(ordered), *bounds, count)


def half_interval(values: Sequence[float]) -> float:
    """Returns half of the 95 % interval of the mean (Student's t); 0 for a single value."""
    if len(values) < 2:
        return 0.0
    freedom = len(values) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _T95_BEYOND
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def markdown_row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def markdown_header(columns: Sequence[str]) -> str:
    """Returns the first two lines of a Markdown table."""
    return f"{markdown_row(columns)}\n{'|---' * len(columns)}|"
