"""What a router tells the operator of its streams and of the groups it sees, and the policy that the operator answers with.

The operator asks each router by `POST SUMMARY_PATH` with an `Asked` as JSON and the service token as bearer; the router answers
with a `RouterSummary` as JSON at a threshold crossing, else after `Asked.wait_s`, or with 426 when they share no version. Times
are seconds, rates per second. Latencies are histograms over `LATENCY_BOUNDS_S`, because histograms of several routers add up
and quantiles do not.
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
"""Why a group is a hotspot: pages, backlog of prompts, step time, one prefix, slower than its equals, pages about to run out."""
Freshness = Literal["fresh", "degraded", "suspect", "dead"]
Mode = Literal["Off", "Route", "Requeue", "Migrate"]
"""How far the ladder may be climbed: not at all, new requests, waiting ones too, running ones too."""
Routing = Literal["PrefixAware", "LeastLoad", "RoundRobin"]
"""How routers choose: by cost and caches, by cost alone, or one group after another."""


class Histogram(msgspec.Struct, frozen=True):
    """How many values fell into each bucket of `LATENCY_BOUNDS_S`; empty: none at all."""

    counts: list[int] = []

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket that holds this quantile; None without values."""
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
    """The bucket of a value."""
    return bisect_left(LATENCY_BOUNDS_S, value_s)


def add_up(histograms: Sequence[Histogram]) -> Histogram:
    """All values of these."""
    filled = [histogram.counts for histogram in histograms if histogram.counts]
    return Histogram([sum(column) for column in zip(*filled, strict=True)])


class Hotspot(msgspec.Struct, frozen=True):
    """A group in trouble: its main cause, the signal and the median of all groups, for how long, and what is done."""

    group: str
    cause: Cause
    signal: float
    median: float
    since_s: float
    action: str


class GroupSummary(msgspec.Struct, frozen=True):
    """One group as a router sees it. `streams` are this router's own; all else is of the whole group.

    `pressure`, `backlog_s`, `speed` are those of `phalanx_router.routing.view`, `itl_s` its `step_s`; `step_model` is
    `cost.StepModel` in order. `live_tokens`: in pages of running requests. `deaths`, `death`: as in `wire.State`.
    `excused`: deaths for which a request of this router is to blame, under which other groups died too.
    `draft_lost`: why its ranks draft no more. `model_version`: as `wire.Served.version`.
    """

    group: str
    revision: str
    state: Freshness
    draining: bool
    streams: int
    running: int
    waiting: int
    pressure: float
    backlog_s: float
    itl_s: float
    speed: float
    live_tokens: int
    total_pages: int
    page_size: int
    step_model: list[float] = []
    incarnation: int = 0
    model_hash: str = ""
    deaths: int = 0
    death: str = ""
    draft_lost: str = ""
    model_version: str = ""
    excused: int = 0


class Traffic(msgspec.Struct, frozen=True):
    """Requests that came to a router in the last `window_s`: how many, and means of what they asked and got.

    `prompt_squared`: mean of the square of prompt tokens. `missed`: prompt tokens that no cache held. `scv`: squared coefficient
    of variation of the times between arrivals.
    """

    window_s: float
    arrivals: int
    prompt: float
    prompt_squared: float
    missed: float
    output: float
    scv: float = 1.0


class UnknownVersion(msgspec.Struct, frozen=True):
    """A group whose leader and this router have no version of the link in common: no request goes there."""

    group: str
    why: str


class RouterSummary(msgspec.Struct, frozen=True):
    """One router now. `traffic`: windows of 6, 60 and 300 s. `queued`: requests that wait at the router, `queued_tokens` theirs.

    `held`: those of them that wait for the service to wake from zero. `ttft`, `itl`: of the last minute, as clients saw them.
    Counters are since the router's start. `policy`: the number of the policy that it follows, 0 for that of its ConfigMap.
    """

    router: str
    groups: list[GroupSummary]
    traffic: list[Traffic]
    queued: int
    queued_tokens: int
    held: int
    idle_s: float
    ttft: Histogram
    itl: Histogram
    hotspots: list[Hotspot] = []
    fleet_saturated: bool = False
    moves_total: int = 0
    moves_failed_total: int = 0
    pingpong_total: int = 0
    shed_total: int = 0
    policy: int = 0
    emptied: list[str] = []
    """Groups that are to be emptied and hold no stream of this router any more."""
    version: int = PROTOCOL_VERSION
    unknown_versions: list[UnknownVersion] = []


class Budgets(msgspec.Struct, frozen=True):
    """What one router may do, already divided by the number of routers.

    moves_per_group: at once, out of one group and into one. bytes_per_s: of one group's transfers.
    tokens_share_per_s: of all live tokens.
    """

    moves_per_group: int = 8
    bytes_per_s: float | None = None
    tokens_share_per_s: float = 0.02


class BalancePolicy(msgspec.Struct, frozen=True):
    """What the operator grants. `number` rises with each change. Targets are seconds; None is no target.

    `empty`: groups to take streams off (drain, scale-in, rollout, a node that is drained), the most urgent first.
    `for_good`: those of them that get no successor of their revision, so that perhaps no group will have their weights again.
    `wanted`: the service is to have a group at all.
    `max_held`: requests that each router holds, for `hold_s` at most, while there is no group; 0: none, for no group will come.
    `canary`: the newest revision, to which `canary_percent` of the new requests go while groups of others serve; empty: no share.
    `fails_open`: groups that tell nothing of their load may get new requests, where there is no better one.
    """

    number: int = 0
    mode: Mode = "Migrate"
    routers: int = 1
    budgets: Budgets = Budgets()
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    empty: list[str] = []
    max_held: int = 0
    hold_s: float = 0.0
    canary: str = ""
    canary_percent: int = 0
    routing: Routing = "PrefixAware"
    fails_open: bool = True
    for_good: list[str] = []
    wanted: bool = True


class Asked(msgspec.Struct, frozen=True):
    """The operator's question: the policy to follow from now on, and how long the answer may wait for something to tell."""

    policy: BalancePolicy
    wait_s: float = 15.0
    version: int = PROTOCOL_VERSION
