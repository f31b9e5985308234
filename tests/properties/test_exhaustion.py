"""Prediction of page pool exhaustion, compared with counting step by step."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.core.migration.rescue import RunningEstimate, expected_remaining_steps, steps_to_full

RUNNING = st.lists(st.builds(RunningEstimate, st.integers(0, 40).map(float), st.integers(0, 60)), max_size=8)


def count_steps(free: int, running: list[RunningEstimate], new_slots: int) -> int | None:
    """Returns the first step with too few free slots."""
    left = {number: (int(request.remaining_steps), request.slots) for number, request in enumerate(running)}
    step = 0
    while True:
        for number in [number for number, (remaining, _) in left.items() if remaining == step]:
            free += left.pop(number)[1] + step
        if not left:
            return None
        free -= len(left) + new_slots
        if free < 0:
            return step
        step += 1


@given(st.integers(0, 300), RUNNING, st.integers(0, 3))
def test_prediction_equals_the_count(free: int, running: list[RunningEstimate], new_slots: int) -> None:
    predicted, counted = steps_to_full(free, running, new_slots), count_steps(free, running, new_slots)
    assert (predicted is None) == (counted is None)
    if predicted is not None and counted is not None:
        assert counted <= predicted < counted + 1


def test_expected_remaining_steps() -> None:
    assert expected_remaining_steps(3, 100, 0.0) == 100.0
    assert expected_remaining_steps(3, 100, 50.0) == 47.0
    assert expected_remaining_steps(80, 100, 50.0) == 40.0, "a long output is expected to continue"
    assert expected_remaining_steps(3, 10, 50.0) == 10.0
