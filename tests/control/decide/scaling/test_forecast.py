"""Expected growth of the request rate: from ramps, not from steps or chance, at any time of evaluation."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_operator.decide.scaling.load import ArrivalTrend, add_minute, expected_growth

HORIZON_S = 105.0
Rate = Callable[[float], float]
"""Requests per second, by time."""


def minute(rate: Rate, now_s: float) -> int:
    """Returns the expected arrivals of the last minute."""
    return round(sum(rate(now_s - 60 + (i + 0.5) / 4) / 4 for i in range(240)))


def forecasts(
    rate: Rate, until_s: float, interval_s: float = 15.0, scv: float = 1.0, first_s: float = 0.0, horizon_s: float = HORIZON_S
) -> list[float]:
    """Returns the expected growth at each evaluation."""
    trend, growth, now_s = ArrivalTrend(), [], first_s
    while now_s <= until_s:
        trend = add_minute(trend, now_s, minute(rate, now_s))
        growth.append(expected_growth(trend, horizon_s, scv))
        now_s += interval_s
    return growth


def ramp(low: float, per_s: float) -> Rate:
    return lambda now_s: low + per_s * max(now_s, 0.0)


def step(low: float, high: float, at_s: float, until_s: float = 1e9) -> Rate:
    return lambda now_s: high if at_s <= now_s < until_s else low


@pytest.mark.parametrize(
    ("rate", "until_s", "scv", "expected"),
    [
        pytest.param(ramp(5.0, 0.05), 135.0, 1.0, 1.0, id="not before it has risen for longer than a minute"),
        pytest.param(ramp(5.0, 0.05), 150.0, 1.0, 1 + 0.05 * HORIZON_S / (5 + 0.05 * 120), id="after that at its rate"),
        pytest.param(ramp(5.0, 0.05), 400.0, 1.0, 1 + 0.05 * HORIZON_S / (5 + 0.05 * 370), id="and longer"),
        pytest.param(ramp(5.0, 0.05), 400.0, 40.0, 1.0, id="not for bursty arrivals"),
        pytest.param(ramp(50.0, 0.08), 400.0, 1.0, 1 + 0.08 * HORIZON_S / (50 + 0.08 * 370), id="slowly, of many requests"),
        pytest.param(ramp(5.0, 0.004), 400.0, 1.0, 1.0, id="slowly, of few: perhaps chance"),
        pytest.param(ramp(0.01, 0.0008), 400.0, 1.0, 1.0, id="of very few"),
        pytest.param(ramp(20.0, -0.03), 400.0, 1.0, 1.0, id="falling"),
        pytest.param(step(10.0, 10.0, 0.0), 400.0, 1.0, 1.0, id="steady"),
        pytest.param(lambda now_s: 5.0 + 0.05 * min(now_s, 200.0), 290.0, 1.0, 1.0, id="ended"),
    ],
)
def test_forecast_table(rate: Rate, until_s: float, scv: float, expected: float) -> None:
    assert forecasts(rate, until_s, scv=scv)[-1] == pytest.approx(expected, abs=0.03)


@settings(max_examples=60, deadline=None)
@given(st.floats(20.0, 100.0), st.floats(1.3, 10.0), st.floats(200.0, 215.0), st.floats(14.6, 16.5))
def test_after_a_step_growth_is_never_believed(low: float, times: float, at_s: float, interval_s: float) -> None:
    found = forecasts(step(low, low * times, at_s), 420.0, interval_s)
    assert set(found) == {1.0}, found


@settings(max_examples=30, deadline=None)
@given(st.floats(8.0, 100.0), st.floats(1.2, 10.0), st.floats(200.0, 215.0), st.floats(5.0, 40.0))
def test_a_burst_is_never_believed(low: float, times: float, at_s: float, seconds: float) -> None:
    assert set(forecasts(step(low, low * times, at_s, at_s + seconds), 420.0)) == {1.0}


@settings(max_examples=40, deadline=None)
@given(st.floats(2.0, 100.0), st.floats(0.1, 3.0), st.floats(0.0, 15.0), st.floats(14.6, 16.5))
def test_ramp_is_forecast_within_ten_percent(low: float, per_minute: float, first_s: float, interval_s: float) -> None:
    """Minutes with a rise that may be chance are skipped."""
    rate = ramp(low, low * per_minute / 60)
    for number, found in enumerate(forecasts(rate, 400.0, interval_s, first_s=first_s)):
        now_s = first_s + number * interval_s
        arrivals, before = minute(rate, now_s), minute(rate, now_s - 90)
        if now_s < first_s + 60 + 90 + interval_s or arrivals**0.5 - before**0.5 < 2.1:
            continue
        expected = min(1 + low * per_minute / 60 * HORIZON_S / (arrivals / 60), 2.0)
        assert found == pytest.approx(expected, rel=0.1), (now_s, found, expected)


def test_more_than_doubling_is_never_believed() -> None:
    assert max(forecasts(ramp(1.0, 0.1), 300.0, horizon_s=600.0)) == 2.0


def test_windows_that_are_not_full_yet_are_no_growth() -> None:
    """The windows of a router that has just started are incomplete, so its first minute rises."""
    assert set(forecasts(step(0.0, 20.0, 0.0), 300.0)) == {1.0}


def test_forecast_restarts_after_a_gap() -> None:
    rate = ramp(5.0, 0.05)
    trend = ArrivalTrend()
    for now_s in (0.0, 15.0, 30.0, 45.0, 60.0, 75.0, 90.0, 105.0, 120.0, 135.0, 150.0):
        trend = add_minute(trend, now_s, minute(rate, now_s))
    assert expected_growth(trend, HORIZON_S, 1.0) > 1
    trend = add_minute(trend, 196.0, minute(rate, 196.0))
    assert trend.minutes == () and expected_growth(trend, HORIZON_S, 1.0) == 1.0


def test_history_is_bounded() -> None:
    trend = ArrivalTrend()
    for turn in range(1000):
        trend = add_minute(trend, 15.0 * turn, 100)
    assert len(trend.minutes) <= 16
