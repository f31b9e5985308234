"""What a router counts. Names are the router's own; the door counts requests and tokens as clients see them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from phalanx_api import labels
from phalanx_api.summary import Freshness, GroupSummary, Hotspot
from phalanx_router.balancing.records import Rung
from phalanx_router.routing.choose import Reason

# What balancing shows: hotspots, moves proposed and refused, returns, saturation.


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


WAIT_BOUNDS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MOVE_STALL_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
Outcome = Literal["finished", "refused", "failed", "cancelled"]


class RouterMetrics:
    """Counters and gauges of one router, in the registry that `/metrics` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.balance = BalanceMetrics(registry)
        self.num_shed = 0
        self._requests = Counter("phalanx_router_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        self._replays = Counter("phalanx_router_replays", "Streams that went on in another group.", registry=registry)
        self._links_lost = Counter("phalanx_router_links_lost", "Links to leaders that ended.", registry=registry)
        self._moves = Counter("phalanx_router_moves", "Moves by how they ended and why.", ["outcome", "why"], registry=registry)
        self._move_bytes = Counter("phalanx_router_move_bytes", "Bytes of pages that came to targets.", registry=registry)
        self._move_stall = Histogram(
            "phalanx_router_move_stall_seconds",
            "Time between the last token before a move and the first after it.",
            buckets=MOVE_STALL_BOUNDS_S,
            registry=registry,
        )
        self._groups_known = Gauge("phalanx_router_groups_known", "Leaders in the last list.", registry=registry)
        self._prefix_keys = Gauge("phalanx_router_prefix_keys", "Page keys of groups that are known here.", registry=registry)
        self._states = Gauge("phalanx_router_groups", "Groups by how old their reports are.", ["state"], registry=registry)
        self._groups_ready = Gauge("phalanx_router_groups_ready", "Groups that take requests now.", registry=registry)
        self._choices = Counter("phalanx_router_choices", "Groups chosen for requests, by why.", ["why"], registry=registry)
        self._queued = Gauge("phalanx_router_queued_requests", "Requests that wait at the router.", registry=registry)
        self._queued_tokens = Gauge("phalanx_router_queued_tokens", "Prompt tokens of requests that wait.", registry=registry)
        self._held = Gauge("phalanx_router_held_requests", "Requests that wait for the service to wake.", registry=registry)
        self._wait = Histogram(
            "phalanx_router_wait_seconds",
            "Time between the arrival of a request and its first dispatch.",
            buckets=WAIT_BOUNDS_S,
            registry=registry,
        )
        self._requeues = Counter("phalanx_router_requeues", "Requests taken back from a group before a token.", registry=registry)
        self._shed = Counter("phalanx_router_shed", "Requests refused with 429 here.", ["why"], registry=registry)
        self._streams = Gauge("phalanx_router_streams", "Streams open now.", registry=registry)

    def request_ended(self, outcome: Outcome) -> None:
        """Counts a request by its outcome."""
        self._requests.labels(outcome).inc()

    def replayed(self) -> None:
        """Counts a stream that was given to another group."""
        self._replays.inc()

    def move_over(self, outcome: str, why: str, num_bytes: int, stall_s: float | None) -> None:
        """Counts a move by how it ended and why it was made, its bytes, and how long its stream stood still."""
        self._moves.labels(outcome, why).inc()
        self._move_bytes.inc(num_bytes)
        if stall_s is not None:
            self._move_stall.observe(stall_s)

    def chosen(self, reason: Reason) -> None:
        """Counts a choice by its reason."""
        self._choices.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        """Notes how long a newcomer waited for its group."""
        self._wait.observe(seconds)

    def requeued(self) -> None:
        """Counts a request that was taken back from its group."""
        self._requeues.inc()

    def shed(self, code: str) -> None:
        """Counts a request that was refused for want of room."""
        self.num_shed += 1
        self._shed.labels(code).inc()

    def show_queue(self, requests: int, tokens: int) -> None:
        """Shows what waits at the router."""
        self._queued.set(requests)
        self._queued_tokens.set(tokens)

    def show_held(self, requests: int) -> None:
        """Shows how many requests wait for a first group."""
        self._held.set(requests)

    def link_lost(self) -> None:
        """Counts a link that was open and ended."""
        self._links_lost.inc()

    def show_groups(self, known: int, ready: int) -> None:
        """Shows how many groups are known, and how many are ready."""
        self._groups_known.set(known)
        self._groups_ready.set(ready)

    def show_states(self, states: Mapping[Freshness, int]) -> None:
        """Shows how many groups are in each state."""
        for state in get_args(Freshness):
            self._states.labels(state).set(states.get(state, 0))

    def show_prefix_keys(self, keys: int) -> None:
        """Shows how large the prefix index is."""
        self._prefix_keys.set(keys)

    def show_streams(self, streams: int) -> None:
        """Shows how many streams are open."""
        self._streams.set(streams)


# Gauges of each group as the router sees it, made when they are scraped, so that groups that are gone leave none behind.

_GAUGES: tuple[tuple[str, str, Callable[[GroupSummary], float]], ...] = (
    ("streams", "Streams of this router in the group.", lambda group: group.streams),
    ("running_requests", "Requests that the group computes, of all routers.", lambda group: group.running),
    ("waiting_requests", "Requests that wait in the group, of all routers.", lambda group: group.waiting),
    ("kv_use", "Share of the KV cache's tokens in requests.", lambda group: _kv_use(group)),
    ("step_seconds", "Time of a step; 0 while nothing runs.", lambda group: group.itl_s),
    ("incarnation", "How often the ranks of the group were started.", lambda group: group.incarnation),
)


class GroupGauges(Collector):
    """What `/metrics` shows of each group. `groups` is asked at each scrape."""

    def __init__(self, groups: Callable[[], Sequence[GroupSummary]]) -> None:
        self._groups = groups

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The names alone."""
        for name, told, _ in _GAUGES:
            yield GaugeMetricFamily(labels.GROUP_GAUGES + name, told, labels=["group"])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The values as of now."""
        groups = self._groups()
        for family, (_, _, value) in zip(self.describe(), _GAUGES, strict=True):
            for group in groups:
                family.add_metric([group.group], value(group))
            yield family


def _kv_use(group: GroupSummary) -> float:
    tokens = group.total_pages * group.page_size
    return min(group.live_tokens / tokens, 1.0) if tokens else 0.0
