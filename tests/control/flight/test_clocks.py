"""Recordings of several machines on one clock."""

import pytest

from phalanx_api.flight.clocks import align
from phalanx_api.flight.entries import RankStep, Recording
from tests.control.flight.recorded import START_S, STEP_S, fleet


def starts(recording: Recording) -> list[float]:
    return [timed.unix_s - timed.entry.seconds for timed in recording.entries if isinstance(timed.entry, RankStep)]


def test_routers_and_groups_get_the_first_routers_clock() -> None:
    first, second, *ranks = align(fleet())
    for one, other in zip(first.entries, second.entries, strict=True):
        assert one.unix_s == pytest.approx(other.unix_s, abs=1e-6)
    for recording in ranks:
        expected = [START_S + 1.0 + step * 2 * STEP_S - STEP_S for step in range(1, 4)]
        assert starts(recording) == pytest.approx(expected, abs=1e-6)


def test_ranks_in_a_leaders_pod_keep_its_clock() -> None:
    recordings = [recording for recording in fleet() if recording.kind == "rank"]
    assert align(recordings[:1]) == recordings[:1], "no router measured an offset"


def test_recordings_without_a_leader_keep_their_times() -> None:
    worker = fleet()[3]
    assert align([worker]) == [worker]
