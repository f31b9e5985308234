"""Hang detection: a rank counts as hung when its heartbeat stops or a step exceeds its bound.

Silence is counted in turns of the supervisor's watch, each at most `MAX_TURN_S`: while the supervisor itself is paused, unread
heartbeats do not count as silence. Pure: `ranks` measures time and reads the pipes.
"""

from dataclasses import dataclass, replace

from phalanx_runtime.rank_spec import Beat

TURN_S = 0.5
"""Interval of the watch, in seconds."""
MAX_TURN_S = 2 * TURN_S
SETTLE_S = 0.05
"""Delay after a late turn, in seconds, in which pending heartbeats are read from the pipes."""


@dataclass(frozen=True, slots=True)
class SilenceBounds:
    """Longest silence of a rank, in seconds."""

    # After the first heartbeat.
    silence_s: float = 5.0
    # Before the first heartbeat: interpreter start and imports. Reading torch (gigabytes in small files) from a cold disk takes
    # minutes, and a killed rank starts over, so this bound only catches defects.
    start_s: float = 600.0


DEFAULT_BOUNDS = SilenceBounds()


@dataclass(frozen=True, slots=True)
class HeartbeatState:
    """Seconds since a rank's last heartbeat, and that heartbeat."""

    silent_s: float = 0.0
    beat: Beat | None = None

    def after_beat(self, beat: Beat) -> "HeartbeatState":
        """State after a heartbeat."""
        return HeartbeatState(0.0, beat)

    def after_turn(self, turn_s: float) -> "HeartbeatState":
        """State after a turn of the watch of `turn_s` seconds."""
        return replace(self, silent_s=self.silent_s + min(turn_s, MAX_TURN_S))


def hang_reason(heartbeat: HeartbeatState, bounds: SilenceBounds) -> str:
    """Reason the rank counts as hung; empty if it does not."""
    beat = heartbeat.beat
    if beat is None:
        return f"no heartbeat {heartbeat.silent_s:.0f} s after its start" if heartbeat.silent_s > bounds.start_s else ""
    if heartbeat.silent_s > bounds.silence_s:
        return f"silent for {heartbeat.silent_s:.1f} s"
    if beat.step is not None and beat.step_s > beat.bound_s:
        return f"step {beat.step} has taken {beat.step_s:.1f} s, at most {beat.bound_s:.1f} s were expected"
    return ""


def first_hung(heartbeats: list[tuple[int, HeartbeatState]], bounds: SilenceBounds) -> str:
    """The hung rank and the reason; empty if no rank is hung. A silent rank precedes one whose step may only wait for it."""
    hung = [(rank, heartbeat, why) for rank, heartbeat in heartbeats if (why := hang_reason(heartbeat, bounds))]
    if not hung:
        return ""
    rank, _, why = max(hung, key=lambda one: (one[1].silent_s > bounds.silence_s, -one[0]))
    return f"rank {rank} is hung: {why}"
