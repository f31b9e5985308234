"""Prometheus metrics of a router."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from phalanx_api import labels
from phalanx_api.summary import Freshness, GroupSummary, Hotspot
from phalanx_router.balancing.records import Rung
from phalanx_router.routing.choose import Reason


class BalanceMetrics:
    """Metrics of balancing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hotspot = Gauge("phalanx_router_hotspot", "1 for an overloaded group.", ["group", "cause"], registry=registry)
        self._proposed = Counter("phalanx_router_moves_proposed", "Moves started, by rung.", ["rung"], registry=registry)
        self._refused = Counter(
            "phalanx_router_moves_refused",
            "Evaluations in which no move from a group was possible, by rung and reason.",
            ["rung", "why"],
            registry=registry,
        )
        self._pingpong = Counter("phalanx_router_pingpong", "Streams moved back to a group they just left.", registry=registry)
        self._saturated = Gauge("phalanx_router_fleet_saturated", "1 while most groups are overloaded.", registry=registry)
        self._shown: set[tuple[str, str]] = set()

    def proposed(self, rung: Rung) -> None:
        """Counts a started move."""
        self._proposed.labels(rung).inc()

    def refused(self, rung: Rung, why: str) -> None:
        """Counts an evaluation of a group without a move. `why`: a code."""
        self._refused.labels(rung, why).inc()

    def returned(self) -> None:
        """Counts a return."""
        self._pingpong.inc()

    def show(self, hotspots: list[Hotspot], is_saturated: bool) -> None:
        """Shows the result of a tick."""
        now = {(hotspot.group, hotspot.cause) for hotspot in hotspots}
        for shown in self._shown - now:
            self._hotspot.remove(*shown)
        for shown in now - self._shown:
            self._hotspot.labels(*shown).set(1)
        self._shown = {(group, str(cause)) for group, cause in now}
        self._saturated.set(is_saturated)


PULL_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class PullMetrics:
    """Metrics of prefixes that groups copy from one another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "phalanx_router_pull"
        self._pulls = Counter(f"{name}s", "Pulls of prefixes by outcome.", ["outcome"], registry=registry)
        self._declined = Counter(f"{name}s_declined", "Requests without a pull, by reason.", ["why"], registry=registry)
        self._joined = Counter(f"{name}s_joined", "Requests that waited for the pull of another one.", registry=registry)
        self._tokens = Counter(f"{name}_tokens", "Prompt tokens pulled instead of computed.", registry=registry)
        self._bytes = Counter(f"{name}_bytes", "Bytes of KV pages pulled.", registry=registry)
        self._seconds = Histogram(f"{name}_seconds", "Time that completed pulls took.", buckets=PULL_BOUNDS_S, registry=registry)

    def declined(self, code: str) -> None:
        """Counts a request that computes its prompt. `code`: of the decision or the budget."""
        self._declined.labels(code).inc()

    def joined(self) -> None:
        """Counts a request that waits for the pull of another one."""
        self._joined.inc()

    def ended(self, outcome: str, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Counts a pull and what it brought."""
        self._pulls.labels(outcome).inc()
        self._tokens.inc(num_tokens)
        self._bytes.inc(num_bytes)
        if outcome == "pulled":
            self._seconds.observe(seconds)


WAIT_BOUNDS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MOVE_STALL_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
Outcome = Literal["finished", "refused", "failed", "cancelled"]


class RouterMetrics:
    """Metrics of one router, in the registry of `/metrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.balance = BalanceMetrics(registry)
        self.pulls = PullMetrics(registry)
        self.num_shed = 0
        self._requests = Counter("phalanx_router_requests", "Requests by outcome.", ["outcome"], registry=registry)
        self._replays = Counter("phalanx_router_replays", "Streams continued in another group.", registry=registry)
        self._links_lost = Counter("phalanx_router_links_lost", "Lost links to leaders.", registry=registry)
        self._moves = Counter("phalanx_router_moves", "Moves by outcome and reason.", ["outcome", "why"], registry=registry)
        self._move_bytes = Counter("phalanx_router_move_bytes", "Bytes of KV pages received by targets.", registry=registry)
        self._move_stall = Histogram(
            "phalanx_router_move_stall_seconds",
            "Time between the last token before a move and the first after it.",
            buckets=MOVE_STALL_BOUNDS_S,
            registry=registry,
        )
        self._groups_known = Gauge("phalanx_router_groups_known", "Leaders in the last list.", registry=registry)
        self._prefix_keys = Gauge("phalanx_router_prefix_keys", "Page keys in the prefix index.", registry=registry)
        groups = Gauge("phalanx_router_groups", "Groups by freshness of their reports.", ["state"], registry=registry)
        self._states = {state: groups.labels(state) for state in get_args(Freshness)}
        self._groups_ready = Gauge("phalanx_router_groups_ready", "Groups that accept requests.", registry=registry)
        self._choices = Counter("phalanx_router_choices", "Groups chosen for requests, by reason.", ["why"], registry=registry)
        self._queued = Gauge("phalanx_router_queued_requests", "Requests queued at the router.", registry=registry)
        self._queued_tokens = Gauge("phalanx_router_queued_tokens", "Prompt tokens of queued requests.", registry=registry)
        self._held = Gauge("phalanx_router_held_requests", "Requests in a cold-start hold.", registry=registry)
        self._wait = Histogram(
            "phalanx_router_wait_seconds",
            "Time from the arrival of a request to its first dispatch.",
            buckets=WAIT_BOUNDS_S,
            registry=registry,
        )
        self._requeues = Counter("phalanx_router_requeues", "Unstarted requests taken back from a group.", registry=registry)
        self._shed = Counter("phalanx_router_shed", "Requests rejected with 429 by the router.", ["why"], registry=registry)
        self._coalesced = Counter(
            "phalanx_router_coalesced_requests", "Requests that joined the computation of an equal request.", registry=registry
        )
        self._coalesced_tokens = Counter(
            "phalanx_router_coalesced_tokens",
            "Prompt and output tokens that joined requests got without a computation of their own.",
            ["kind"],
            registry=registry,
        )
        self._streams = Gauge("phalanx_router_streams", "Open streams.", registry=registry)

    def request_ended(self, outcome: Outcome) -> None:
        """Counts a request."""
        self._requests.labels(outcome).inc()

    def replayed(self) -> None:
        """Counts a replay."""
        self._replays.inc()

    def move_ended(self, outcome: str, why: str, num_bytes: int, stall_s: float | None) -> None:
        """Counts a move, its bytes, and the stall of its stream."""
        self._moves.labels(outcome, why).inc()
        self._move_bytes.inc(num_bytes)
        if stall_s is not None:
            self._move_stall.observe(stall_s)

    def chosen(self, reason: Reason) -> None:
        """Counts a choice."""
        self._choices.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        """Records the wait of a new request."""
        self._wait.observe(seconds)

    def requeued(self) -> None:
        """Counts a requeue."""
        self._requeues.inc()

    def shed(self, code: str) -> None:
        """Counts a rejection for lack of capacity."""
        self.num_shed += 1
        self._shed.labels(code).inc()

    def joined(self) -> None:
        """Counts a request that joined an equal one."""
        self._coalesced.inc()

    def coalesced(self, prompt_tokens: int, output_tokens: int) -> None:
        """Counts tokens that joined requests did not compute."""
        self._coalesced_tokens.labels("prompt").inc(prompt_tokens)
        self._coalesced_tokens.labels("output").inc(output_tokens)

    def show_queue(self, requests: int, tokens: int) -> None:
        """Shows the queue."""
        self._queued.set(requests)
        self._queued_tokens.set(tokens)

    def show_held(self, requests: int) -> None:
        """Shows the held requests."""
        self._held.set(requests)

    def link_lost(self) -> None:
        """Counts a lost link."""
        self._links_lost.inc()

    def show_groups(self, known: int, ready: int) -> None:
        """Shows the groups."""
        self._groups_known.set(known)
        self._groups_ready.set(ready)

    def show_states(self, states: Mapping[Freshness, int]) -> None:
        """Shows the groups in each state."""
        for state, gauge in self._states.items():
            gauge.set(states.get(state, 0))

    def show_prefix_keys(self, keys: int) -> None:
        """Shows the size of the prefix index."""
        self._prefix_keys.set(keys)

    def show_streams(self, streams: int) -> None:
        """Shows the open streams."""
        self._streams.set(streams)


_GAUGES: tuple[tuple[str, str, Callable[[GroupSummary], float | None]], ...] = (
    ("streams", "Streams of this router in the group.", lambda group: group.streams),
    ("running_requests", "Requests running in the group, of all routers.", lambda group: group.running),
    ("waiting_requests", "Requests waiting in the group, of all routers.", lambda group: group.waiting),
    ("kv_use", "Share of the KV cache slots held by requests.", lambda group: _kv_use(group)),
    ("step_seconds", "Step time; 0 while no request runs.", lambda group: group.itl_s),
    ("device_busy_ratio", "Share of the time in which the group's devices compute steps.", lambda group: group.device_busy),
    (
        "bandwidth_utilization",
        "Share of the devices' copy rate that steps reach; 0 if unknown.",
        lambda group: group.bandwidth_utilization,
    ),
    (
        "flop_utilization",
        "Share of the devices' matmul rate that steps reach; 0 if unknown.",
        lambda group: group.flop_utilization,
    ),
    ("incarnation", "Number of starts of the group's ranks.", lambda group: group.incarnation),
    ("pages", "KV pages of the group.", lambda group: group.total_pages),
    ("page_bytes", "Bytes of a KV page over all ranks; 0 if unknown.", lambda group: group.page_bytes),
    ("cache_lookups", "Recent page lookups behind the estimated hit rates.", lambda group: group.cache_curve.lookups),
    ("cache_hit_rate_half", "Estimated hit rate with half the pages.", lambda group: _hit_rate(group, 0)),
    ("cache_hit_rate_now", "Estimated hit rate with the present pages.", lambda group: _hit_rate(group, 1)),
    ("cache_hit_rate_twice", "Estimated hit rate with twice the pages.", lambda group: _hit_rate(group, 2)),
    ("cache_hit_rate_four_times", "Estimated hit rate with four times the pages.", lambda group: _hit_rate(group, 3)),
    ("cache_hit_rate_host", "Hit rate with the present host tier.", lambda group: group.cache_curve.tiers.host),
    ("cache_hit_rate_disk", "Hit rate with the host tier and the disk.", lambda group: group.cache_curve.tiers.disk),
    (
        "cache_host_pages",
        "Pages of the host tier's limit; without one, of the device.",
        lambda group: group.cache_curve.tiers.pages,
    ),
    ("cache_host_hit_rate_half", "Estimated hit rate with half the host pages.", lambda group: _host_rate(group, 0)),
    ("cache_host_hit_rate_full", "Estimated hit rate with the host pages.", lambda group: _host_rate(group, 1)),
    ("cache_host_hit_rate_twice", "Estimated hit rate with twice the host pages.", lambda group: _host_rate(group, 2)),
    ("cache_reuse_pages", "Median of the pages used between two uses of one.", lambda group: group.cache_use.reuse_pages),
    ("cache_residency_seconds", "Mean time that evicted pages were cached.", lambda group: group.cache_use.residency_s),
    ("cache_host_residency_seconds", "The same in host memory.", lambda group: group.cache_use.host_residency_s),
    ("cache_unused_ratio", "Slots without a token in held pages, as a share.", lambda group: group.cache_use.unused_share),
    ("disk_compacted_bytes", "Bytes that compaction wrote.", lambda group: group.cache_use.compacted_bytes),
    ("disk_reclaimed_bytes", "Bytes of removed segments.", lambda group: group.cache_use.reclaimed_bytes),
    ("cache_host_hit_rate_four_times", "Estimated hit rate with four times the host pages.", lambda group: _host_rate(group, 3)),
)


class GroupGauges(Collector):
    """Gauges per group, built at each scrape, so that removed groups leave no series."""

    def __init__(self, groups: Callable[[], Sequence[GroupSummary]]) -> None:
        self._groups = groups

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yields the families without samples."""
        for name, text, _ in _GAUGES:
            yield GaugeMetricFamily(labels.GROUP_GAUGES + name, text, labels=["group"])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the families with present values."""
        groups = self._groups()
        for family, (_, _, value) in zip(self.describe(), _GAUGES, strict=True):
            for group in groups:
                if (sample := value(group)) is not None:
                    family.add_metric([group.group], sample)
            yield family


def _hit_rate(group: GroupSummary, size: int) -> float:
    """Hit rate at `SIZES[size]`; 0 without lookups."""
    rates = group.cache_curve.hit_rates
    return rates[size] if size < len(rates) else 0.0


def _host_rate(group: GroupSummary, size: int) -> float | None:
    """Hit rate with a host tier of `SIZES[size]`; None without lookups."""
    rates = group.cache_curve.tiers.hit_rates
    return rates[size] if size < len(rates) else None


def _kv_use(group: GroupSummary) -> float:
    tokens = group.total_pages * group.page_size
    return min(group.live_tokens / tokens, 1.0) if tokens else 0.0
