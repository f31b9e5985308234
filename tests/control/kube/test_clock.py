"""The API server's time from its responses: whole seconds, round trips, steps, and what is held after a step."""

import email.utils

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_operator.kube.clock import CONFIRMATIONS, HOLD_S, STEP_S, ServerClock

START_S = 1_767_323_045.0
"""2026-01-02T03:04:05Z."""


class Times:
    """A server whose clock is `ahead_s` of a monotonic clock that starts at 100 s."""

    def __init__(self, ahead_s: float = START_S, wall_s: float = 0.0) -> None:
        self.monotonic_s, self.ahead_s = 100.0, ahead_s
        self.clock = ServerClock(lambda: self.monotonic_s, lambda: wall_s)

    def ask(self, there_s: float = 0.01, back_s: float = 0.01) -> None:
        sent_s = self.monotonic_s
        date = email.utils.formatdate(int(sent_s + there_s + self.ahead_s), usegmt=True)
        self.monotonic_s += there_s + back_s
        self.clock.observe(date, sent_s, self.monotonic_s)

    @property
    def error_s(self) -> float:
        year, _, rest = self.clock.now().partition("-")
        assert year == "2026", rest
        hours, minutes, seconds = (float(part) for part in rest[6:14].split(":"))
        shown_s = hours * 3600 + minutes * 60 + seconds
        return shown_s - (self.monotonic_s + self.ahead_s) % 86_400


@given(st.floats(0, 30_000), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 60)), min_size=1, max_size=20))
def test_time_follows_the_server_without_steps(ahead_s: float, requests: list[tuple[float, float, float]]) -> None:
    times = Times(START_S + ahead_s)
    for there_s, back_s, pause_s in requests:
        times.monotonic_s += pause_s
        times.ask(there_s, back_s)
        longest_s = max(there_s + back_s for there_s, back_s, _ in requests)
        assert abs(times.error_s) <= 3.0 + longest_s
        assert times.clock.step_reason() == ""


def test_first_response_replaces_the_own_clock() -> None:
    times = Times(wall_s=START_S + 86_400)
    assert times.clock.now() == "2026-01-03T03:04:05Z"
    times.ask()
    assert times.clock.now() == "2026-01-02T03:05:45Z" and times.clock.step_reason() == ""


@pytest.mark.parametrize("change_s", [3600.0, -3600.0, STEP_S + 3, -STEP_S - 3])
def test_step_is_reported_for_a_while(change_s: float) -> None:
    times = Times()
    times.ask()
    times.ahead_s += change_s
    for _ in range(CONFIRMATIONS):
        assert times.clock.step_reason() == ""
        times.ask()
    assert times.clock.step_reason().startswith("the API server's clock changed by ") and abs(times.error_s) <= 2.0
    times.monotonic_s += HOLD_S - 1
    times.ask()
    assert times.clock.step_reason()
    times.monotonic_s += 1
    assert times.clock.step_reason() == ""


def test_small_corrections_are_followed_silently() -> None:
    times = Times()
    for _ in range(50):
        times.ahead_s += 0.5
        times.ask()
    assert abs(times.error_s) <= 3.0 and times.clock.step_reason() == ""


@pytest.mark.parametrize("date", ["", "soon", "Thu, 99 Jan 2026 00:00:00 GMT"])
def test_invalid_date_changes_nothing(date: str) -> None:
    times = Times()
    times.ask()
    before = times.clock.now()
    times.clock.observe(date, times.monotonic_s, times.monotonic_s)
    assert times.clock.now() == before


@pytest.mark.parametrize("share", [50, 2, 1])
def test_disagreeing_servers_hold_disruptions_only_briefly(share: int) -> None:
    """One of them answers each `share`-th request, or as many in a row as confirm a step."""
    times, held = Times(), 0
    for number in range(4000):
        times.monotonic_s += 1.0
        is_other = number % share == 0 if share > 1 else number // 20 % 2 == 1
        times.ahead_s += 15.0 * is_other
        times.ask()
        times.ahead_s -= 15.0 * is_other
        held += bool(times.clock.step_reason())
    assert held <= 2 * HOLD_S


def test_late_correction_is_a_step_of_its_own() -> None:
    """Groups that were created in between look older than they are."""
    times = Times()
    times.ask()
    for change_s in (-3600.0, 3600.0):
        times.ahead_s += change_s
        for _ in range(CONFIRMATIONS):
            times.ask()
        assert times.clock.step_reason()
        times.monotonic_s += 2 * HOLD_S
        assert times.clock.step_reason() == ""
