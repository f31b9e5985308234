"""What the console's page reads, as JSON. No record has a prompt or an output.

Times of a request are seconds since its arrival, `arrived_unix_s` is a wall-clock time.
"""

from typing import Any

import msgspec

from phalanx_api.cache_curve import CacheCurve
from phalanx_api.summary import Freshness, Hotspot, Traffic


class Viewer(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of the console."""

    tenant: str  # name of its key; empty without keys
    has_keys: bool
    may_write: bool
    sees_all: bool  # the requests of all tenants


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """One group."""

    name: str
    revision: str
    state: Freshness
    draining: bool
    drain_requested: bool  # by a user of this console, and the group does not drain yet
    streams: int  # of this router
    running: int
    max_num_seqs: int  # 0: unknown
    waiting: int
    pressure: float
    backlog_s: float
    itl_s: float
    speed: float
    device_busy: float
    preemptions: int
    hit_rate: float | None  # of the prefix cache, at its present size
    page_size: int
    pages: int
    used_pages: int
    reserved_pages: int
    cached_pages: int  # without a request, in the prefix cache
    hotspot: str  # cause; empty: it has none
    action: str  # measure against the hotspot


class ConsoleMove(msgspec.Struct, frozen=True, kw_only=True):
    """A move of a stream, in progress unless it has an outcome."""

    request: int
    source: str
    target: str
    at_s: float  # after the arrival of the request; in the fleet: seconds ago
    index: int  # output tokens before it
    transfer: str
    reason: str
    outcome: str
    pages: int
    num_bytes: int
    duration_s: float
    stall_s: float | None


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of the service, and the streams of this router."""

    router: str
    instance: str  # of the router's process, whose numbers of streams these are
    groups: list[GroupState]
    streams: list[tuple[int, int, int, int, bool]]
    """Number, index of its group or -1, context tokens, completed moves, whether it moves."""
    moves: list[ConsoleMove]  # the last ones, the newest first
    hotspots: list[Hotspot]
    saturated: bool
    queued: int
    queued_tokens: int
    held: int
    shed_total: int
    moves_total: int
    moves_failed_total: int
    policy: int
    mode: str
    cpu_share: float
    explanation: list[str]  # what limits the service, by its operator; empty without one, and for keys of tenants


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    number: int
    name: str  # id of its answer; empty if the client sent no X-Request-Id
    tenant: str
    group: str
    arrived_unix_s: float
    prompt_tokens: int
    tokens: int
    first_token_s: float | None
    duration_s: float
    moves: int
    replays: int
    end: str  # empty while it is open


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a request."""

    at_s: float
    kind: str
    group: str
    index: int  # output tokens before it
    note: str


class SegmentState(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens that one group computed."""

    group: str
    epoch: int
    start: int
    end: int  # exclusive


class RequestDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One request with its time line."""

    request: RequestState
    events: list[TimelineEntry]
    segments: list[SegmentState]
    moves: list[ConsoleMove]
    dropped: int  # events beyond the bound


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """Open requests, then ended ones, the newest first."""

    instance: str
    requests: list[RequestState]
    open: int  # in all, of this viewer
    truncated: bool


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds in seconds, of the last minute; null without values."""

    p50: float | None
    p90: float | None
    p99: float | None


class LoadCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted inter-token latency of a group by its number of running requests."""

    group: str
    running: int
    points: list[tuple[int, float]]  # requests, seconds


class GroupCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates of a group's prefix cache by size."""

    group: str
    curve: CacheCurve


class SettingsState(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the router, without secrets, and curves of traffic and caches."""

    router: str
    settings: dict[str, Any]
    policy: dict[str, Any]
    traffic: list[Traffic]
    ttft: Quantiles
    itl: Quantiles
    wait: Quantiles
    sizes: list[float]  # of the curves, as factors of a group's pages
    curve: CacheCurve
    group_curves: list[GroupCurve]
    load_curves: list[LoadCurve]
