"""When pages run out as requests end: against counting step by step."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.core.kv.exhaustion import RunningEstimate, expected_remaining_steps, steps_to_full

GOING = st.lists(st.builds(RunningEstimate, st.integers(0, 40).map(float), st.integers(0, 60)), max_size=8)


def counted(free: int, going: list[RunningEstimate], newcomer: int) -> int | None:
    """The first step that finds too few slots."""
    left = {number: (int(one.rest), one.slots) for number, one in enumerate(going)}
    step = 0
    while True:
        for number in [number for number, (rest, _) in left.items() if rest == step]:
            free += left.pop(number)[1] + step
        if not left:
            return None
        free -= len(left) + newcomer
        if free < 0:
            return step
        step += 1


@given(st.integers(0, 300), GOING, st.integers(0, 3))
def test_it_is_as_counted(free: int, going: list[RunningEstimate], newcomer: int) -> None:
    told, slow = steps_to_full(free, going, newcomer), counted(free, going, newcomer)
    assert (told is None) == (slow is None)
    if told is not None and slow is not None:
        assert slow <= told < slow + 1


def test_remaining_life_table() -> None:
    assert expected_remaining_steps(3, 100, 0.0) == 100.0
    assert expected_remaining_steps(3, 100, 50.0) == 47.0
    assert expected_remaining_steps(80, 100, 50.0) == 40.0, "one that had more than usual goes on for long"
    assert expected_remaining_steps(3, 10, 50.0) == 10.0
