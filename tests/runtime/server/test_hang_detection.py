"""Hang reasons by last heartbeat and length of the silence."""

import pytest

from phalanx_runtime.rank_spec import Beat
from phalanx_runtime.server.supervision.hang_detection import MAX_TURN_S, HeartbeatState, SilenceBounds, first_hung, hang_reason

BOUNDS = SilenceBounds(silence_s=5.0, start_s=120.0)
IDLE = Beat()
BUSY = Beat(step=7, step_s=9.9, bound_s=10.0)
LONG = Beat(step=7, step_s=10.1, bound_s=10.0)
FIRST = Beat(step=0, step_s=200.0, bound_s=300.0)


@pytest.mark.parametrize(
    ("heartbeat", "why"),
    [
        (HeartbeatState(), ""),
        (HeartbeatState(119.0), ""),
        (HeartbeatState(121.0), "no heartbeat 121 s after its start"),
        (HeartbeatState(5.0, IDLE), ""),
        (HeartbeatState(5.1, IDLE), "silent for 5.1 s"),
        (HeartbeatState(0.0, BUSY), ""),
        (HeartbeatState(0.0, LONG), "step 7 has taken 10.1 s, at most 10.0 s were expected"),
        (HeartbeatState(0.0, FIRST), ""),
        (HeartbeatState(6.0, BUSY), "silent for 6.0 s"),
    ],
    ids=[
        "just started",
        "libraries load",
        "never started",
        "silent, but not for too long",
        "silent for too long",
        "a step within its bound",
        "a step beyond its bound",
        "a first step",
        "silent in a step",
    ],
)
def test_hang_reason(heartbeat: HeartbeatState, why: str) -> None:
    assert hang_reason(heartbeat, BOUNDS) == why


def test_heartbeat_ends_the_silence_with_the_newest_step() -> None:
    assert HeartbeatState(4.0, BUSY).after_beat(IDLE) == HeartbeatState(0.0, IDLE)


def test_late_watch_turn_counts_as_one() -> None:
    assert HeartbeatState(4.0, IDLE).after_turn(0.5) == HeartbeatState(4.5, IDLE)
    assert HeartbeatState(0.0, IDLE).after_turn(3600.0) == HeartbeatState(MAX_TURN_S, IDLE)
    assert not hang_reason(HeartbeatState(0.0, IDLE).after_turn(3600.0), BOUNDS)


@pytest.mark.parametrize(
    ("heartbeats", "why"),
    [
        ([HeartbeatState(1.0, IDLE), HeartbeatState(1.0, IDLE)], ""),
        ([HeartbeatState(1.0, LONG), HeartbeatState(6.0, IDLE)], "rank 1 is hung: silent for 6.0 s"),
        ([HeartbeatState(6.0, IDLE), HeartbeatState(6.0, IDLE)], "rank 0 is hung: silent for 6.0 s"),
        (
            [HeartbeatState(1.0, LONG), HeartbeatState(1.0, IDLE)],
            "rank 0 is hung: step 7 has taken 10.1 s, at most 10.0 s were expected",
        ),
    ],
    ids=["no hang", "silent before slow step", "first of two", "slow step"],
)
def test_first_hung(heartbeats: list[HeartbeatState], why: str) -> None:
    assert first_hung(list(enumerate(heartbeats)), BOUNDS) == why
