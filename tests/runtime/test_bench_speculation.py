"""What the bench of speculation makes of what it measured."""

import pytest

from bench.figures import Median, median_of
from bench.speculation import beside
from bench.speculation_limit import Times, ratios, times_of


def test_times_are_those_of_one_pass_and_one_proposal() -> None:
    times = times_of(plain_s=0.010, step_s=0.030, draft_s=0.016, depth=4)
    assert (times.plain_s, times.pass_s, times.token_s) == pytest.approx((0.010, 0.004, 0.001))


def test_the_best_ratio_follows_from_passes_and_shares() -> None:
    assert ratios(Times(0.010, 0.004, 0.001), [0.6, 0.3]) == pytest.approx([1.6 / 1.5, 1.9 / 2.0])
    free = ratios(Times(0.010, 0.0, 0.0), [0.6, 0.3])
    assert free == pytest.approx([1.6, 1.9]), "a draft that costs nothing gains what it proposes"


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.98, 1.1, "above"), (0.9, 0.96, "below"), (0.95, 0.99, "not distinguishable")]
)
def test_an_interval_that_holds_the_bound_decides_nothing(low: float, high: float, said: str) -> None:
    assert beside(Median((low + high) / 2, low, high, 7), 0.97) == said


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(5, 0.0, float("inf")), (6, 1.0, 6.0), (7, 1.0, 7.0), (9, 2.0, 8.0), (15, 4.0, 12.0), (41, 14.0, 28.0)],
)
def test_the_interval_of_a_median_lies_between_two_of_the_values(count: int, low: float, high: float) -> None:
    """Values as in tables of the sign test."""
    found = median_of([float(value) for value in range(count, 0, -1)])
    assert (found.middle, found.low, found.high, found.count) == ((count + 1) / 2, low, high, count)
