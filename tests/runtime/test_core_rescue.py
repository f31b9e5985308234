"""Which requests an engine offers to routers before it preempts them."""

import pytest

from phalanx_runtime.core.rescue import Pressure, Rescue, Victim

VICTIMS = [Victim(3, 10, 500.0), Victim(2, 10, 500.0), Victim(1, 10, 500.0)]
SHORT = [Victim(4, 10, 9.0), *VICTIMS]
"""The first is expected to end before pages run out in ten steps."""


@pytest.mark.parametrize(
    ("pressure", "asked"),
    [
        (Pressure(100.0, 0.02, 50, VICTIMS, 100.0), []),
        (Pressure(10.0, 0.02, 5, VICTIMS, 100.0), [3, 2]),
        (Pressure(10.0, 0.02, 1, VICTIMS, 100.0), [3]),
        (Pressure(10.0, 0.02, 40, VICTIMS, 100.0), [3, 2]),
        (Pressure(0.0, 0.02, 0, VICTIMS, 100.0), [3]),
        (Pressure(10.0, 0.02, 5, VICTIMS[:1], 100.0), []),
        (Pressure(10.0, 0.02, 1, SHORT, 100.0), [3]),
        (Pressure(8.0, 0.02, 1, SHORT, 100.0), [4]),
        (Pressure(10.0, 0.02, 1, [*SHORT[:1], *SHORT[3:]], 100.0), []),
    ],
    ids=[
        *("pages last", "two free enough", "one frees enough", "all but one", "full", "alone"),
        *("one ends before", "it does not", "all others end before"),
    ],
)
def test_as_many_are_offered_as_free_what_a_second_needs(pressure: Pressure, asked: list[int]) -> None:
    assert Rescue().victims(pressure, 1.0) == asked


def test_each_victim_is_offered_once_a_second() -> None:
    rescue, pressure = Rescue(), Pressure(10.0, 0.02, 1, VICTIMS, 100.0)
    assert [rescue.victims(pressure, now) for now in (1.0, 1.5, 1.9, 2.1)] == [[3], [], [], [3]]
