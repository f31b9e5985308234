"""What a router counts. Names are the router's own; the door counts requests and tokens as clients see them."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Outcome = Literal["finished", "refused", "failed", "cancelled"]


class RouterMetrics:
    """Counters and gauges of one router, in the registry that `/metrics` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("phalanx_router_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        self._replays = Counter("phalanx_router_replays", "Streams that went on in another group.", registry=registry)
        self._links_lost = Counter("phalanx_router_links_lost", "Links to leaders that ended.", registry=registry)
        self._groups_known = Gauge("phalanx_router_groups_known", "Leaders in the last list.", registry=registry)
        self._groups_ready = Gauge("phalanx_router_groups_ready", "Groups that take requests now.", registry=registry)
        self._streams = Gauge("phalanx_router_streams", "Streams open now.", registry=registry)

    def request_ended(self, outcome: Outcome) -> None:
        """Counts a request by its outcome."""
        self._requests.labels(outcome).inc()

    def replayed(self) -> None:
        """Counts a stream that was given to another group."""
        self._replays.inc()

    def link_lost(self) -> None:
        """Counts a link that was open and ended."""
        self._links_lost.inc()

    def show_groups(self, known: int, ready: int) -> None:
        """Shows how many groups are known, and how many are ready."""
        self._groups_known.set(known)
        self._groups_ready.set(ready)

    def show_streams(self, streams: int) -> None:
        """Shows how many streams are open."""
        self._streams.set(streams)
