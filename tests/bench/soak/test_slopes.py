"""Slopes of series that are known: flat, growing, restarted, noisy."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.soak.slopes import BLOCK_S, MIN_BLOCKS, Point, adjusted_level, slope

HOUR = 3600.0


def made(rate: float, *, noise: float = 0.0, minutes: int = 60, lives: int = 1, seed: int = 0, kept: float = 0.0) -> list[Point]:
    """A series with a slope per hour; each life begins 50 lower or higher. kept: share of noise that stays."""
    rng, rest, points = random.Random(seed), 0.0, []
    for number in range(minutes * 12):
        at_s = 5.0 * number
        life = at_s * lives // (minutes * 60)
        rest = kept * rest + rng.gauss(0, noise)
        points.append(Point(f"life {life:.0f}", at_s, 1000 + 50 * (life % 2) + rate * at_s / HOUR + rest))
    return points


def together(rate: float) -> list[Point]:
    """Returns the samples of three pods that live at the same time, in order of time."""
    lives = [[Point(f"{seed}", point.at_s, point.value) for point in made(rate, noise=3, seed=seed)] for seed in range(3)]
    return [point for points in zip(*lives, strict=True) for point in points]


def stairs(minutes: int) -> list[Point]:
    """Returns one hour of samples of a process that grows by one page at a fixed interval."""
    return [Point("a", 5.0 * number, 70_000.0 + 4 * (number // (12 * minutes))) for number in range(720)]


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        pytest.param(made(0), "none", id="constant"),
        pytest.param(made(0, lives=4), "none", id="constant in each life"),
        pytest.param(made(30), "grows", id="exact growth"),
        pytest.param(made(30, noise=3), "grows", id="growth under noise"),
        pytest.param(made(30, noise=3, lives=3), "grows", id="growth in every life"),
        pytest.param(together(30), "grows", id="growth of pods at the same time"),
        pytest.param(together(0), "none", id="noise of pods at the same time"),
        pytest.param(made(-30, noise=3), "falls", id="falls"),
        pytest.param(made(0, noise=3), "none", id="noise"),
        pytest.param(stairs(20), "none", id="three steps of an hour"),
        pytest.param(stairs(2), "grows", id="steps all the time"),
        pytest.param(made(30, minutes=7), "too short", id="too short"),
        pytest.param([], "too short", id="nothing"),
        pytest.param(made(30, lives=60), "too short", id="every life shorter than its warm-up"),
    ],
)
def test_verdict_follows_the_series(points: list[Point], verdict: str) -> None:
    found = slope(points, warm_up_s=120)
    assert found.verdict == verdict
    assert found.low <= found.high


def test_growth_during_warm_up_does_not_count() -> None:
    points = [Point("a", 5.0 * number, min(5.0 * number, 600.0)) for number in range(720)]
    assert slope(points, warm_up_s=600).verdict == "none"
    assert slope(points, warm_up_s=0).hours == pytest.approx(1.0)


def test_single_outliers_change_nothing() -> None:
    plain = made(12)
    spiked = [Point(p.life, p.at_s, 1e9) if number % 97 == 50 else p for number, p in enumerate(plain)]
    assert slope(spiked, 0).per_hour == pytest.approx(12, rel=0.01)


def test_false_alarms_are_rare_under_lasting_noise() -> None:
    """Noise whose memory is a minute. If 5 % of 12 series have a slope, six have one with a chance of 10^-5."""
    series = [made(0, noise=1, seed=seed, kept=0.92) for seed in range(12)]
    assert sum(slope(points, 0).verdict != "none" for points in series) < 6


def test_several_intervals_need_a_higher_level() -> None:
    assert adjusted_level(1) == pytest.approx(0.95)
    assert adjusted_level(50) == pytest.approx(0.999)
    assert adjusted_level(0) == adjusted_level(1)


levels = st.lists(st.integers(-1000, 1000), min_size=MIN_BLOCKS, max_size=40)


@settings(max_examples=30)
@given(levels=levels, offset=st.integers(-10_000, 10_000), factor=st.sampled_from([-2.0, 0.5, 4.0]))
def test_slope_scales_with_the_values(levels: list[int], offset: int, factor: float) -> None:
    plain = slope(_minutes(levels), 0)
    scaled = slope(_minutes([factor * level + offset for level in levels]), 0)
    assert scaled.per_hour == pytest.approx(factor * plain.per_hour, abs=1e-6)
    bounds = sorted((factor * plain.low, factor * plain.high))
    assert [scaled.low, scaled.high] == pytest.approx(bounds, rel=1e-6, abs=1e-3)


@settings(max_examples=30)
@given(levels=levels, rate=st.integers(-500, 500))
def test_added_growth_adds_to_the_slope(levels: list[int], rate: int) -> None:
    plain = slope(_minutes(levels), 0)
    grown = slope(_minutes([level + rate * number * BLOCK_S / HOUR for number, level in enumerate(levels)]), 0)
    assert grown.per_hour == pytest.approx(plain.per_hour + rate, abs=1e-6)


@settings(max_examples=30)
@given(levels=levels, restart=st.integers(1, 39), step=st.integers(-10_000, 10_000))
def test_level_of_a_new_process_changes_no_slope(levels: list[int], restart: int, step: int) -> None:
    one = slope(_minutes(levels, restart), 0)
    other = slope(_minutes([level + step * (number >= restart) for number, level in enumerate(levels)], restart), 0)
    assert math.isclose(one.per_hour, other.per_hour, abs_tol=1e-6) or math.isnan(one.per_hour)


def _minutes(levels: list[int] | list[float], restart: int = 1000) -> list[Point]:
    return [Point("a" if number < restart else "b", BLOCK_S * number, float(level)) for number, level in enumerate(levels)]
