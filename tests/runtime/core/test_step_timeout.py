"""Timeouts of steps after past step times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.cost import HANG_FACTOR, HANG_FLOOR_S
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.core.step_timeout import ENOUGH_STEPS, FIRST_BOUND_S, NEW_FORM_BOUND_S, TILE_BOUND_S, StepTimes, form_of

FORM = (3, 9, 0)


def plan(starts: list[int], counts: list[int], image_tiles: int = 0) -> StepPlan:
    return StepPlan(
        step=0,
        admitted=[],
        rows=[0] * len(counts),
        starts=starts,
        counts=counts,
        pages=[[]] * len(counts),
        tokens=[0] * sum(counts),
        draws=[],
        image_tiles=image_tiles,
    )


@pytest.mark.parametrize(
    ("times", "bound"),
    [
        ([], FIRST_BOUND_S),
        ([0.1] * (ENOUGH_STEPS - 1), FIRST_BOUND_S),
        ([100.0], 500.0),
        ([0.1] * ENOUGH_STEPS, HANG_FLOOR_S),
        ([4.0] * ENOUGH_STEPS, 20.0),
        ([90.0, *[0.1] * 100], HANG_FLOOR_S),
    ],
    ids=["no step", "too few", "one long step", "fast steps", "slow steps", "one old slow step"],
)
def test_bound(times: list[float], bound: float) -> None:
    steps = StepTimes()
    for wall_s in times:
        steps.record(FORM, wall_s)
    assert steps.bound_s(FORM) == bound


@pytest.mark.parametrize(
    ("steps", "expected_s", "bound"),
    [(ENOUGH_STEPS, 0.1, HANG_FLOOR_S), (ENOUGH_STEPS, 4.0, 20.0), (0, 0.1, NEW_FORM_BOUND_S), (0, 100.0, 500.0)],
    ids=["fast", "slow", "first of its form", "first of its form, slow"],
)
def test_fitted_time_precedes_observed_time(steps: int, expected_s: float, bound: float) -> None:
    times = StepTimes()
    for _ in range(steps):
        times.record(FORM, 90.0)
    assert times.bound_s(FORM, expected_s) == bound


def test_a_new_form_does_not_inherit_times() -> None:
    steps = StepTimes()
    for _ in range(100):
        steps.record((1, 4, 0), 0.01)
    assert steps.bound_s((10, 12, 0)) == FIRST_BOUND_S


def test_each_tile_may_have_to_be_encoded() -> None:
    """Earlier steps of the form found their images encoded."""
    steps = StepTimes()
    for num_tiles in (1, 13, 64):
        form = form_of(plan([0], [900], num_tiles))
        for _ in range(ENOUGH_STEPS):
            steps.record(form, 0.01)
        for expected_s in (None, 0.1):
            assert steps.bound_s(form, expected_s) >= HANG_FLOOR_S + num_tiles * TILE_BOUND_S
    assert steps.bound_s(form_of(plan([0], [900]))) == FIRST_BOUND_S


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50))
def test_step_as_long_as_the_last_never_times_out(times: list[float]) -> None:
    steps = StepTimes()
    for wall_s in times:
        steps.record(FORM, wall_s)
    assert steps.bound_s(FORM) >= max(HANG_FLOOR_S, HANG_FACTOR * times[-1])


def test_forms_are_magnitudes_of_tokens_and_context() -> None:
    assert form_of(plan([0], [512])) == form_of(plan([100], [600]))
    assert form_of(plan([100] * 4, [1] * 4)) == form_of(plan([80] * 5, [1] * 5))
    assert form_of(plan([100] * 4, [1] * 4)) != form_of(plan([9000] * 4, [1] * 4))
    assert form_of(plan([100] * 4, [1] * 4)) != form_of(plan([0], [404]))
