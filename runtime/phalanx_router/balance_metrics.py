"""What balancing shows: hotspots, moves proposed and refused, returns, saturation."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from phalanx_api.summary import Hotspot
from phalanx_router.balancing.records import Rung


class BalanceMetrics:
    """Counters and gauges of one router's balancing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hotspot = Gauge("phalanx_router_hotspot", "1 for a group that is one.", ["group", "cause"], registry=registry)
        self._proposed = Counter("phalanx_router_moves_proposed", "Moves that were begun, by rung.", ["rung"], registry=registry)
        self._refused = Counter(
            "phalanx_router_moves_refused",
            "Times that a group gave nothing away, by rung and why.",
            ["rung", "why"],
            registry=registry,
        )
        self._pingpong = Counter("phalanx_router_pingpong", "Streams that came back to a group just left.", registry=registry)
        self._saturated = Gauge("phalanx_router_fleet_saturated", "1 while most groups are loaded.", registry=registry)
        self._shown: set[tuple[str, str]] = set()

    def proposed(self, rung: Rung) -> None:
        """Counts a move that begins."""
        self._proposed.labels(rung).inc()

    def refused(self, rung: Rung, why: str) -> None:
        """Counts a look at a group from which nothing (more) went. `why`: a code."""
        self._refused.labels(rung, why).inc()

    def returned(self) -> None:
        """Counts a stream that came back."""
        self._pingpong.inc()

    def show(self, hotspots: list[Hotspot], is_saturated: bool) -> None:
        """Shows what a tick found."""
        now = {(hotspot.group, hotspot.cause) for hotspot in hotspots}
        for shown in self._shown - now:
            self._hotspot.remove(*shown)
        for shown in now - self._shown:
            self._hotspot.labels(*shown).set(1)
        self._shown = {(group, str(cause)) for group, cause in now}
        self._saturated.set(is_saturated)
