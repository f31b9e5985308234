"""Histograms of several routers add up, and quantiles are found within a quarter."""

import math

from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.summary import LATENCY_BOUNDS_S, Histogram, add_up, bucket_of


def filled(values: list[float]) -> Histogram:
    """A histogram of these values."""
    counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
    for value in values:
        counts[bucket_of(value)] += 1
    return Histogram(counts)


VALUES = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=50)


@given(VALUES, st.sampled_from([0.5, 0.95, 0.99]))
def test_quantile_is_at_most_25_percent_too_high(values: list[float], share: float) -> None:
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    told = filled(values).quantile(share)
    assert told is not None and true <= told <= max(true * 1.2500001, LATENCY_BOUNDS_S[0])


@given(VALUES, VALUES)
def test_histograms_add_up(ours: list[float], theirs: list[float]) -> None:
    assert add_up([filled(ours), Histogram(), filled(theirs)]) == filled(ours + theirs)


def test_empty_histogram_has_no_quantile() -> None:
    assert Histogram().quantile(0.5) is None and add_up([]) == Histogram()
    assert filled([10_000.0]).quantile(0.5) == LATENCY_BOUNDS_S[-1]
