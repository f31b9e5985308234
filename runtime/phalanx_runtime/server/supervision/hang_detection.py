"""When a rank counts as hung: its heart is silent, or its step takes too long.

Silence is counted in turns of the supervisor's own watch, each worth at most `MAX_TURN_S`: a supervisor that did not run for a
minute has not heard for a minute, but the rank may well have spoken. Pure: `ranks` keeps the time and reads the pipes.
"""

from dataclasses import dataclass, replace

from phalanx_runtime.rank_spec import Beat

TURN_S = 0.5
"""How often the watch looks."""
MAX_TURN_S = 2 * TURN_S
SETTLE_S = 0.05
"""After a late turn the watch first lets so long pass, in which what waits in the pipes is read."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Longest silence of a rank: after its first beat, and before it, when the interpreter starts and libraries load.

    The second is no measure of health. torch alone is gigabytes, read in small pieces: a cold disk of a busy node needs minutes,
    and a rank that is killed for it begins anew. Ten minutes bound a bug and nothing else.
    """

    silence_s: float = 5.0
    start_s: float = 600.0


DEFAULT_BOUNDS = Bounds()


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is known of one rank's heart: seconds since it was heard, and what it said last."""

    silent_s: float = 0.0
    beat: Beat | None = None

    def heard(self, beat: Beat) -> "Pulse":
        """After a beat."""
        return Pulse(0.0, beat)

    def passed(self, turn_s: float) -> "Pulse":
        """After a turn of the watch that took so long."""
        return replace(self, silent_s=self.silent_s + min(turn_s, MAX_TURN_S))


def hang(pulse: Pulse, bounds: Bounds) -> str:
    """Why the rank counts as hung, in words; empty when it does not."""
    beat = pulse.beat
    if beat is None:
        return f"it has not begun after {pulse.silent_s:.0f} s" if pulse.silent_s > bounds.start_s else ""
    if pulse.silent_s > bounds.silence_s:
        return f"silent for {pulse.silent_s:.1f} s"
    if beat.step is not None and beat.step_s > beat.bound_s:
        return f"step {beat.step} has taken {beat.step_s:.1f} s, at most {beat.bound_s:.1f} s were expected"
    return ""


def first_hung(pulses: list[tuple[int, Pulse]], bounds: Bounds) -> str:
    """Which rank is hung, and why; empty when none is. A silent one is named before one whose step may only wait for it."""
    hung = [(rank, pulse, why) for rank, pulse in pulses if (why := hang(pulse, bounds))]
    if not hung:
        return ""
    rank, _, why = max(hung, key=lambda one: (one[1].silent_s > bounds.silence_s, -one[0]))
    return f"rank {rank} is hung: {why}"
