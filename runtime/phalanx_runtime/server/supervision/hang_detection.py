"""Hang detection: a rank is hung when its heartbeat stops or a step exceeds its bound.

Silence is counted in turns of at most `MAX_TURN_S`, since a paused supervisor reads no heartbeats.
"""

from dataclasses import dataclass, replace

from phalanx_runtime.rank_spec import Beat

TURN_S = 0.5
"""Interval of the checks."""
MAX_TURN_S = 2 * TURN_S
SETTLE_S = 0.05
"""Time to read pending heartbeats after a late turn."""


@dataclass(frozen=True, slots=True)
class SilenceBounds:
    """Longest silence of a rank."""

    silence_s: float = 5.0
    """After the first heartbeat."""
    start_s: float = 600.0
    """Before it: reading torch from a cold disk takes minutes."""


DEFAULT_BOUNDS = SilenceBounds()


@dataclass(frozen=True, slots=True)
class HeartbeatState:
    """Last heartbeat, and seconds since."""

    silent_s: float = 0.0
    beat: Beat | None = None

    def after_beat(self, beat: Beat) -> "HeartbeatState":
        """State after a heartbeat."""
        return HeartbeatState(0.0, beat)

    def after_turn(self, turn_s: float) -> "HeartbeatState":
        """State after a turn."""
        return replace(self, silent_s=self.silent_s + min(turn_s, MAX_TURN_S))


def hang_reason(heartbeat: HeartbeatState, bounds: SilenceBounds) -> str:
    """Reason, or empty."""
    beat = heartbeat.beat
    if beat is None:
        return f"no heartbeat {heartbeat.silent_s:.0f} s after its start" if heartbeat.silent_s > bounds.start_s else ""
    if heartbeat.silent_s > bounds.silence_s:
        return f"silent for {heartbeat.silent_s:.1f} s"
    if beat.step is not None and beat.step_s > beat.bound_s:
        return f"step {beat.step} has taken {beat.step_s:.1f} s, at most {beat.bound_s:.1f} s were expected"
    return ""


def first_hung(heartbeats: list[tuple[int, HeartbeatState]], bounds: SilenceBounds) -> str:
    """The hung rank and the reason, or empty. A slow step may only wait for a silent rank."""
    hung = [(rank, heartbeat, why) for rank, heartbeat in heartbeats if (why := hang_reason(heartbeat, bounds))]
    if not hung:
        return ""
    rank, _, why = max(hung, key=lambda entry: (entry[1].silent_s > bounds.silence_s, -entry[0]))
    return f"rank {rank} is hung: {why}"
