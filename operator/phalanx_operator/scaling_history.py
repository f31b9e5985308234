"""What the autoscaler wanted in the last hour, for the console."""

from collections import deque
from dataclasses import dataclass, field

from phalanx_operator.decide.scaling.scale import ScaleDecision
from phalanx_operator.kube.store import Key

INTERVAL_S, SPAN_S, MAX_POINTS = 30.0, 3600.0, 240
"""Seconds between two points of equal groups, seconds that are shown, and maximum points per service."""
Point = tuple[float, int, int | None]
"""(clock, desired groups, groups that the load needs)."""


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """Decisions by service. Only the leader decides."""

    _points: dict[Key, deque[Point]] = field(default_factory=dict)

    def add(self, key: Key, decision: ScaleDecision, at_s: float) -> None:
        """Adds a decision, unless the last point is younger than INTERVAL_S and has the same groups."""
        points = self._points.setdefault(key, deque(maxlen=MAX_POINTS))
        last = points[-1] if points else None
        if last is None or at_s - last[0] >= INTERVAL_S or last[1] != decision.groups:
            points.append((at_s, decision.groups, decision.needed))

    def of(self, key: Key, now_s: float) -> list[Point]:
        """Returns the points of a service of the last hour, oldest first."""
        return [point for point in self._points.get(key, ()) if now_s - point[0] <= SPAN_S]

    def forget(self, key: Key) -> None:
        """Drops a service that is deleted, or has no autoscaler."""
        self._points.pop(key, None)
