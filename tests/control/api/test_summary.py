"""Sums and quantiles of histograms."""

import math

from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.summary import LATENCY_BOUNDS_S, Histogram, bucket_index, sum_histograms


def filled(values: list[float]) -> Histogram:
    """Returns a histogram of these values."""
    counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
    for value in values:
        counts[bucket_index(value)] += 1
    return Histogram(counts)


VALUES = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=50)


@given(VALUES, st.sampled_from([0.5, 0.95, 0.99]))
def test_quantile_is_at_most_25_percent_too_high(values: list[float], share: float) -> None:
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    quantile = filled(values).quantile(share)
    assert quantile is not None and true <= quantile <= max(true * 1.2500001, LATENCY_BOUNDS_S[0])


@given(VALUES, VALUES)
def test_histograms_add_up(first: list[float], second: list[float]) -> None:
    assert sum_histograms([filled(first), Histogram(), filled(second)]) == filled(first + second)


def test_empty_histogram_has_no_quantile() -> None:
    assert Histogram().quantile(0.5) is None and sum_histograms([]) == Histogram()
    assert filled([10_000.0]).quantile(0.5) == LATENCY_BOUNDS_S[-1]
