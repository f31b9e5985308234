"""Polls of routers by the operator: the router's summary, and the policy that the operator sends.

The operator posts an `Asked` as JSON to `SUMMARY_PATH` of each router, with the service token as bearer token. The router answers
with a `RouterSummary` when its urgent state changes, else after `Asked.wait_s`, or with 426 for another protocol version. Times
are seconds, rates per second. Latencies are histograms over `LATENCY_BOUNDS_S`: histograms of several routers can be added,
quantiles cannot.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import msgspec

from phalanx_api.wire.router import PROTOCOL_VERSION

SUMMARY_PATH = "/phalanx/summary"

LATENCY_BOUNDS_S = tuple(0.001 * 1.25**i for i in range(64))
"""Upper bounds of the buckets: 1 ms to 21 minutes, each a quarter above the one before. One more bucket holds the rest."""

Cause = Literal["kv", "prefill", "decode", "prefix", "straggler", "full"]
"""Cause of a hotspot: KV pages, prefill backlog, step time, one prefix, a straggler, imminent exhaustion of pages."""
Freshness = Literal["fresh", "degraded", "suspect", "dead"]
Mode = Literal["Off", "Route", "Requeue", "Migrate"]
"""What balancing may move: no request, new ones, waiting ones too, running ones too."""
Routing = Literal["PrefixAware", "LeastLoad", "RoundRobin"]
"""Choice of a group: by cost and caches, by cost alone, or round robin."""


class Histogram(msgspec.Struct, frozen=True):
    """Values per bucket of `LATENCY_BOUNDS_S`; empty without values."""

    counts: list[int] = []

    def quantile(self, share: float) -> float | None:
        """Returns the upper bound of the bucket with this quantile, if there are values."""
        total = sum(self.counts)
        if not total:
            return None
        wanted, seen = share * total, 0
        for index, count in enumerate(self.counts):
            seen += count
            if seen >= wanted:
                return LATENCY_BOUNDS_S[min(index, len(LATENCY_BOUNDS_S) - 1)]
        return LATENCY_BOUNDS_S[-1]


def bucket_of(value_s: float) -> int:
    """Returns the bucket of a value."""
    return bisect_left(LATENCY_BOUNDS_S, value_s)


def add_up(histograms: Sequence[Histogram]) -> Histogram:
    """Returns the sum of the histograms."""
    filled = [histogram.counts for histogram in histograms if histogram.counts]
    return Histogram([sum(column) for column in zip(*filled, strict=True)])


class Hotspot(msgspec.Struct, frozen=True, kw_only=True):
    """An overloaded group: its main cause, the signal and its median over all groups, the duration, and the measure in
    progress."""

    group: str
    cause: Cause
    signal: float
    median: float
    since_s: float
    action: str


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One group as a router observes it. `pressure`, `backlog_s`, `speed`, `itl_s`: see `phalanx_router.routing.view`."""

    group: str
    revision: str
    state: Freshness
    draining: bool
    streams: int
    """This router's own; other fields are of the whole group."""
    running: int
    waiting: int
    pressure: float
    backlog_s: float
    itl_s: float
    speed: float
    live_tokens: int
    """Tokens in pages of running requests."""
    total_pages: int
    page_size: int
    step_model: list[float] = []
    """`cost.StepModel` in order."""
    incarnation: int = 0
    model_hash: str = ""
    deaths: int = 0
    """As in `wire.State`."""
    death: str = ""
    draft_lost: str = ""
    """Why its ranks stopped drafting."""
    model_version: str = ""
    """`wire.Served.version`."""
    excused: int = 0
    """Deaths caused by a request of this router under which other groups died too."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a router in the last `window_s`: arrivals, and mean token counts."""

    window_s: float
    arrivals: int
    prompt: float
    prompt_squared: float
    """Mean of squared prompt tokens."""
    missed: float
    """Prompt tokens not found in a cache."""
    output: float
    scv: float = 1.0
    """Squared coefficient of variation of the times between arrivals."""


class UnknownVersion(msgspec.Struct, frozen=True):
    """A group whose leader has another protocol version: it receives no requests."""

    group: str
    why: str


class RouterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One router now. Counters are since its start."""

    router: str
    groups: list[GroupSummary]
    traffic: list[Traffic]
    """Windows of 6, 60 and 300 s."""
    queued: int
    """Requests that wait at the router."""
    queued_tokens: int
    held: int
    """Queued requests that wait for a cold start."""
    idle_s: float
    ttft: Histogram
    """Of the last minute, as clients observed it; likewise `itl`."""
    itl: Histogram
    hotspots: list[Hotspot] = []
    fleet_saturated: bool = False
    moves_total: int = 0
    moves_failed_total: int = 0
    pingpong_total: int = 0
    shed_total: int = 0
    policy: int = 0
    """Number of the policy in effect; 0 for that of its ConfigMap."""
    emptied: list[str] = []
    """Groups to evacuate without streams of this router."""
    version: int = PROTOCOL_VERSION
    unknown_versions: list[UnknownVersion] = []


class Budgets(msgspec.Struct, frozen=True):
    """Limits of one router, already divided by the number of routers."""

    moves_per_group: int = 8
    """At once, out of one group and into one."""
    bytes_per_s: float | None = None
    """Of one group's transfers."""
    tokens_share_per_s: float = 0.02
    """Of all live tokens."""


class BalancePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's policy for a router. Targets are seconds."""

    number: int = 0
    """Rises with each change."""
    mode: Mode = "Migrate"
    routers: int = 1
    budgets: Budgets = Budgets()
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    empty: list[str] = []
    """Groups to evacuate (drain, scale-in, rollout, node drain), most urgent first."""
    max_held: int = 0
    """Requests that each router holds during a cold start, each for `hold_s` at most; 0: no group will come."""
    hold_s: float = 0.0
    canary: str = ""
    """The newest revision, which receives `canary_percent` of new requests while groups of other revisions serve; empty: no
    canary."""
    canary_percent: int = 0
    routing: Routing = "PrefixAware"
    fails_open: bool = True
    """Groups without load reports may receive new requests if no better group exists."""
    for_good: list[str] = []
    """Groups in `empty` without a successor of their revision: possibly no group will have their weights again."""
    wanted: bool = True
    """The service is to have a group at all."""


class Asked(msgspec.Struct, frozen=True):
    """The operator's poll: the policy from now on, and how long the router may wait for a change."""

    policy: BalancePolicy
    wait_s: float = 15.0
    version: int = PROTOCOL_VERSION
