"""Recordings of several machines on one clock."""

import msgspec
import pytest

from phalanx_api.flight.clocks import align
from phalanx_api.flight.entries import RankStep, Recording, TimedEntry
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


def test_aligned_recordings_are_not_shifted_again() -> None:
    once = align(fleet())
    assert align(once) == once


def test_steps_of_an_earlier_start_shift_no_rank() -> None:
    leader, worker = fleet()[2], fleet()[3]
    again = [TimedEntry(timed.unix_s + 600, timed.entry) for timed in leader.entries if isinstance(timed.entry, RankStep)]
    first = [timed for timed in worker.entries if isinstance(timed.entry, RankStep)]
    died_in_its_third = [TimedEntry(timed.unix_s + 600, timed.entry) for timed in first[:2]]
    leader = msgspec.structs.replace(leader, entries=[*leader.entries, *again])
    worker = msgspec.structs.replace(worker, entries=[*first, *died_in_its_third])
    assert starts(align([leader, worker])[1])[-1] == pytest.approx(starts(leader)[-2], abs=0.01)


def test_recordings_without_a_leader_keep_their_times() -> None:
    worker = fleet()[3]
    assert align([worker]) == [worker]
