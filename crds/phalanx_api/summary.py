"""Polls of routers by the operator, as JSON: its policy, and the router's summary.

The request carries the service token. The router responds when its urgent state changes, at the latest after `wait_s`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from phalanx_api.cache_curve import NO_CURVE, NO_USE, CacheCurve, CacheUse
from phalanx_api.conditions import Cause
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.wire.adapters import DeclaredAdapter
from phalanx_api.wire.leader import NO_POWER, DevicePower, DeviceProblem, RefusedAdapter, TenantUse
from phalanx_api.wire.router import PROTOCOL_VERSION

SUMMARY_PATH = "/phalanx/summary"
SNAPSHOT_PATH = "/phalanx/summary/now"
"""The present summary at once, without a policy."""

MAX_ORDERED_MOVES = 1000
MAX_LISTED_STREAMS = 64
"""Of one router."""
MEAN_BOUND = 1e15
"""Larger means of a faulty router count as this."""
LATENCY_GROWTH = 1.25
LATENCY_BOUNDS_S = tuple(0.001 * LATENCY_GROWTH**i for i in range(64))
"""Upper bounds of all buckets but the last: 1 ms to 21 minutes."""

Freshness = Literal["fresh", "degraded", "suspect", "dead"]
Mode = Literal["Off", "Route", "Requeue", "Migrate"]
"""Requests that balancing moves: no requests, new, also waiting, also running ones."""
CacheScope = Literal["tenant", "service"]
"""Requests that share stored responses."""
Routing = Literal["PrefixAware", "LeastLoad", "RoundRobin"]


class Histogram(msgspec.Struct, frozen=True):
    """Values per bucket of `LATENCY_BOUNDS_S`."""

    counts: list[int] = []

    def quantile(self, share: float) -> float | None:
        """Returns the upper bound of the quantile's bucket, if there are values."""
        total = sum(self.counts)
        if not total:
            return None
        rank, cumulative = share * total, 0
        for index, count in enumerate(self.counts):
            cumulative += count
            if cumulative >= rank:
                return LATENCY_BOUNDS_S[min(index, len(LATENCY_BOUNDS_S) - 1)]
        return LATENCY_BOUNDS_S[-1]

    def interpolated_quantile(self, share: float) -> float | None:
        """Returns the quantile, interpolated geometrically within its bucket, if there are values."""
        rank, cumulative = share * sum(self.counts), 0
        for bound, count in zip(LATENCY_BOUNDS_S, self.counts, strict=False):
            if count and cumulative + count >= rank:
                below = 1 - max(0.0, rank - cumulative) / count
                return float(bound / LATENCY_GROWTH**below)
            cumulative += count
        return LATENCY_BOUNDS_S[-1] if cumulative < sum(self.counts) else None

    def mean(self) -> float | None:
        """Returns the mean, if there are values; each counts as the geometric middle of its bucket."""
        total = sum(self.counts)
        if not total:
            return None
        middles = [*(bound / LATENCY_GROWTH**0.5 for bound in LATENCY_BOUNDS_S), LATENCY_BOUNDS_S[-1]]
        return float(sum(count * middle for count, middle in zip(self.counts, middles, strict=False)) / total)


def bucket_index(value_s: float) -> int:
    """Returns the index of a value's bucket."""
    return bisect_left(LATENCY_BOUNDS_S, value_s)


def sum_histograms(histograms: Sequence[Histogram]) -> Histogram:
    """Returns the sum of the histograms."""
    filled = [histogram.counts for histogram in histograms if histogram.counts]
    return Histogram([sum(column) for column in zip(*filled, strict=True)])


class Hotspot(msgspec.Struct, frozen=True, kw_only=True):
    """An overloaded group."""

    group: str
    cause: Cause
    signal: float
    median: float  # of the signal over all groups
    since_s: float  # duration
    action: str  # measure in progress


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One group as a router observes it."""

    group: str
    revision: str
    state: Freshness
    draining: bool

    # Load; definitions in `phalanx_router.routing.view`.
    streams: int  # of this router alone
    running: int
    waiting: int
    pressure: float
    backlog_s: float
    itl_s: float
    speed: float
    live_tokens: int  # in pages of running requests

    # Capacity.
    total_pages: int
    page_size: int
    step_model: list[float] = []  # `cost.StepModel`

    # Incarnation.
    incarnation: int = 0
    model_hash: str = ""
    deaths: int = 0  # as in `wire.State`
    death: str = ""
    draft_lost: str = ""  # why its ranks stopped drafting
    model_version: str = ""  # `wire.Served.version`
    excused: int = 0  # deaths by a request that also ended other groups
    devices: list[DeviceProblem] = []

    # Use of the devices, as in `wire.Load`.
    device_busy: float = 0.0
    bandwidth_utilization: float = 0.0
    flop_utilization: float = 0.0

    # Prefix cache.
    page_bytes: int = 0  # of KV cache over all ranks; 0: unknown
    max_request_pages: int = 0  # most pages that a request holds; 0: those of all its tokens
    cache_curve: CacheCurve = NO_CURVE
    cache_use: CacheUse = NO_USE

    # What limits the group; definitions as in `wire.Load`.
    max_num_seqs: int = 0  # 0: unknown
    max_num_batched_tokens: int = 0  # 0: unknown
    prompt_tokens_per_step: float = 0.0
    preemptions: int = 0  # counter
    speedup: float = 1.0
    speculation: SpeculationCounts = SpeculationCounts()
    link_s: float = 0.0  # shortest recent time of a ping and its pong between router and group; 0: unknown

    tenants: list[TenantUse] = []  # since the start of the group's engine
    power: DevicePower = NO_POWER  # of its devices

    # Declared adapters; null: the group loads none.
    adapters: list[str] | None = None  # names of the loaded ones
    refused_adapters: list[RefusedAdapter] = []


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals within `window_s`; token counts are means."""

    window_s: float
    arrivals: int
    prompt: float
    prompt_squared: float  # mean square
    missed: float  # prompt tokens not found in a prefix cache
    output: float
    scv: float = 1.0  # squared coefficient of variation of inter-arrival times
    output_tokens: float = 0.0  # sum, of requests that ended


def sum_traffic(window_s: float, parts: Sequence[Traffic]) -> Traffic:
    """Returns the arrivals of several routers in one window: counts are summed, means are weighted by them."""
    total = sum(max(part.arrivals, 0) for part in parts)

    def mean(values: Iterable[float]) -> float:
        weighted = sum(value * max(part.arrivals, 0) for value, part in zip(values, parts, strict=True))
        return min(max(weighted / total, 0.0), MEAN_BOUND) if total else 0.0

    return Traffic(
        window_s=window_s,
        arrivals=total,
        prompt=mean(part.prompt for part in parts),
        prompt_squared=mean(part.prompt_squared for part in parts),
        missed=mean(part.missed for part in parts),
        output=mean(part.output for part in parts),
        scv=mean(part.scv for part in parts) if total else 1.0,
        output_tokens=sum(max(part.output_tokens, 0.0) for part in parts),
    )


class UnknownVersion(msgspec.Struct, frozen=True):
    """A group with another protocol version, which receives no requests."""

    group: str
    why: str


class DrainRequest(msgspec.Struct, frozen=True):
    """A group that a user of the console wants to drain."""

    group: str
    age_s: float  # a group that is younger has only the name of the requested one


class RouterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One router; counters since its start."""

    router: str
    groups: list[GroupSummary]

    # Traffic and queue.
    traffic: list[Traffic]  # windows of 6, 60 and 300 s
    queued: int  # requests that wait at the router
    queued_tokens: int
    held: int  # queued requests that wait for a cold start
    idle_s: float
    ttft: Histogram  # of the last minute
    itl: Histogram

    # Balancing.
    hotspots: list[Hotspot] = []
    fleet_saturated: bool = False
    moves_total: int = 0
    moves_failed_total: int = 0
    pingpong_total: int = 0
    shed_total: int = 0
    policy: int = 0  # number of the policy in effect; 0: that of its ConfigMap
    evacuated: list[str] = msgspec.field(default_factory=list, name="emptied")  # of `evacuate`, without streams of this router

    version: int = PROTOCOL_VERSION
    unknown_versions: list[UnknownVersion] = []

    # What limits the router.
    wait: Histogram = Histogram()  # of the last minute: from the arrival of a request to its dispatch
    cpu_share: float = 0.0  # of one core, recently

    drain_requests: list[DrainRequest] = []  # of users of the console


class Budgets(msgspec.Struct, frozen=True):
    """Limits of one router: its share of the service's."""

    moves_per_group: int = 8  # concurrent, out of one group and into one
    bytes_per_s: float | None = None  # KV transfer of one group
    tokens_share_per_s: float = 0.02  # of all live tokens


class ResponseCachePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a router's response cache; see `spec.router.responseCache`."""

    ttl_s: float = 3600.0
    max_entries: int = 10_000
    max_bytes: int = 64 << 20
    scope: CacheScope = "tenant"
    exact: bool = True
    semantic: bool = False
    similarity: float = 0.92
    embedder: str = ""  # address of another service (host, or host:port); empty: the own groups
    recheck_share: float = 0.01


class LatencyObjectives(msgspec.Struct, frozen=True, kw_only=True):
    """Latency targets whose events routers count; see `spec.slo`."""

    ttft_s: float | None = None
    itl_s: float | None = None


class BalancePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's policy for a router."""

    number: int = 0  # increases with each change
    mode: Mode = "Migrate"
    routers: int = 1
    budgets: Budgets = Budgets()
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    evacuate: list[str] = msgspec.field(default_factory=list, name="empty")  # groups, most urgent first
    max_held: int = 0  # requests held per router during a cold start; 0: no group will start
    hold_s: float = 0.0  # maximum hold
    canary: str = ""  # newest revision during a canary
    canary_percent: int = 0  # of new requests, while other revisions serve
    routing: Routing = "PrefixAware"
    fails_open: bool = True  # see `spec.router.failureMode`
    without_successor: list[str] = msgspec.field(default_factory=list, name="for_good")  # of `evacuate`, of their revision
    wanted: bool = True  # whether any group is desired
    coalesce_requests: bool = False  # see `spec.router.coalesceRequests`
    response_cache: ResponseCachePolicy | None = None  # null: off
    pull_prefixes: bool = True  # see `spec.rebalancing.pullPrefixes`
    objectives: LatencyObjectives = LatencyObjectives()
    adapters: list[DeclaredAdapter] = []  # see `spec.adapters`


class SummaryRequest(msgspec.Struct, frozen=True):
    """The operator's poll."""

    policy: BalancePolicy
    wait_s: float = 15.0
    version: int = PROTOCOL_VERSION
    explanation: list[str] = []
    """What limits the service, by the summaries of all its routers, for the console. Empty without one."""


class StartedMoves(msgspec.Struct, frozen=True):
    """Moves that a router started on the order of an administrator, at most MAX_ORDERED_MOVES."""

    targets: dict[str, int]
    """Number of streams by target."""
    obstacles: list[str]
    """Why other streams do not move; each reason is listed once."""


class OpenStream(msgspec.Struct, frozen=True, kw_only=True):
    """An open stream of a router. Without text, and without the id that permits to resume it."""

    number: int  # unique in the process of the router
    tenant: str
    group: str  # that computes it; empty while it waits
    prompt_tokens: int
    tokens: int  # delivered
    age_s: float  # since its request arrived
    moves: int  # completed
    moving_to: str = ""  # target of the move in progress
    left: str = ""  # group that its last move left, for a while after the move
    joined: bool = False  # an equal request computes its tokens


class StreamList(msgspec.Struct, frozen=True, kw_only=True):
    """Open streams of a router, at most MAX_LISTED_STREAMS: moving ones, then those that moved last, then the oldest."""

    at_s: float  # monotonic clock of the router
    total: int
    streams: list[OpenStream]
