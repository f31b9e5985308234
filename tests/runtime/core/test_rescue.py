"""Requests that an engine offers to routers before it preempts them."""

from dataclasses import replace

import pytest

from phalanx_runtime.core.migration.rescue import Pressure, Rescue, Victim

VICTIMS = [Victim(3, 10, 500.0), Victim(2, 10, 500.0), Victim(1, 10, 500.0)]
SHORT = [Victim(4, 10, 9.0), *VICTIMS]
"""The first one is expected to finish within ten steps."""


@pytest.mark.parametrize(
    ("pressure", "offered"),
    [
        (Pressure(steps_to_full=100.0, step_s=0.02, free_pages=50, victims=VICTIMS, pages_per_s=100.0), []),
        (Pressure(steps_to_full=10.0, step_s=0.02, free_pages=5, victims=VICTIMS, pages_per_s=100.0), [3, 2]),
        (Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=VICTIMS, pages_per_s=100.0), [3]),
        (Pressure(steps_to_full=10.0, step_s=0.02, free_pages=40, victims=VICTIMS, pages_per_s=100.0), [3, 2]),
        (Pressure(steps_to_full=0.0, step_s=0.02, free_pages=0, victims=VICTIMS, pages_per_s=100.0), [3]),
        (Pressure(steps_to_full=10.0, step_s=0.02, free_pages=5, victims=VICTIMS[:1], pages_per_s=100.0), []),
        (Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=SHORT, pages_per_s=100.0), [3]),
        (Pressure(steps_to_full=8.0, step_s=0.02, free_pages=1, victims=SHORT, pages_per_s=100.0), [4]),
        (Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=[*SHORT[:1], *SHORT[3:]], pages_per_s=100.0), []),
    ],
    ids=[
        *("no exhaustion soon", "two free enough", "one frees enough", "all but one", "full", "alone"),
        *("one finishes before", "it finishes later", "all others finish before"),
    ],
)
def test_offered_requests_free_a_seconds_demand(pressure: Pressure, offered: list[int]) -> None:
    assert Rescue().select(pressure, (), 1.0) == offered


def test_each_victim_is_offered_once_a_second() -> None:
    """A copy takes 0.1 s, so the notice is 0.3 s."""
    rescue, pressure = Rescue(), Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=VICTIMS, pages_per_s=100.0)
    offered = [rescue.select(pressure, (), now) for now in (1.0, 1.29, 1.31, 1.59, 1.7, 2.1, 2.42)]
    assert offered == [[3], [], [2], [], [], [3], [2]], "the last one is never offered"


def test_slow_copies_offer_the_next_after_half_a_second() -> None:
    large = [Victim(handle, 200, 500.0) for handle in (3, 2, 1)]
    rescue, pressure = Rescue(), Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=large, pages_per_s=100.0)
    assert [rescue.select(pressure, (), now) for now in (1.0, 1.49, 1.51)] == [[3], [], [2]]


def test_leaving_request_is_not_offered_again() -> None:
    rescue = Rescue()
    assert (
        rescue.select(Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=VICTIMS, pages_per_s=100.0), {3}, 1.0) == []
    )
    assert rescue.select(
        Pressure(steps_to_full=10.0, step_s=0.02, free_pages=5, victims=VICTIMS, pages_per_s=100.0), {3}, 1.0
    ) == [2]


def test_offers_start_as_early_as_past_moves_took() -> None:
    rescue, soon = Rescue(), Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=VICTIMS, pages_per_s=100.0)
    later = replace(soon, steps_to_full=40.0)
    assert rescue.select(later, (), 1.0) == [], "the notice is 0.3 s, exhaustion is in 0.8 s"
    assert rescue.select(soon, (), 1.0) == [3]
    rescue.request_left(7, 1.1)
    assert rescue.select(later, (), 1.2) == [], "it was not offered"
    rescue.request_left(3, 1.4)
    assert rescue.select(replace(later, victims=VICTIMS[1:]), (), 1.5) == [2], "2 x 0.4 s + 0.1 s"


def test_late_departure_is_not_measured() -> None:
    rescue, soon = Rescue(), Pressure(steps_to_full=10.0, step_s=0.02, free_pages=1, victims=VICTIMS, pages_per_s=100.0)
    assert rescue.select(soon, (), 1.0) == [3]
    rescue.request_left(3, 2.1)
    assert rescue.select(replace(soon, steps_to_full=40.0, victims=VICTIMS[1:]), (), 2.2) == []
