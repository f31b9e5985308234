"""Reads the load of groups and the traffic from a router's /metrics."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx_api import labels
from phalanx_api.cache_curve import HOST_SIZE_NAMES, NO_CURVE, NO_USE, SIZE_NAMES, CacheCurve, CacheUse, TierCurve

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLoad:
    """Prefix cache of one group."""

    pages: int = 0
    page_bytes: int = 0
    """0 if unknown."""
    curve: CacheCurve = NO_CURVE
    use: CacheUse = NO_USE


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Current load of one group."""

    streams: int = 0
    """Over all routers that answered."""
    running: int = 0
    waiting: int = 0
    kv: float = 0.0
    """Share of pages in use."""
    step_s: float = 0.0
    incarnation: int = 0
    busy: float = 0.0
    """Share of the time in which devices compute."""
    bandwidth: float = 0.0
    """Share of the copy rate; 0 if unknown."""
    flops: float = 0.0
    """Share of the matmul rate; 0 if unknown."""
    cache: CacheLoad = CacheLoad()


Buckets = Mapping[float, float]
"""Cumulative counts of a histogram by upper bound."""
_COUNTERS = {
    "phalanx_router_requests_total": ("outcome", "finished"),
    "phalanx_router_moves_total": ("outcome", "moved"),
    "phalanx_router_shed_total": ("", ""),
}
"""Counters, and the label value that counts."""
_HISTOGRAMS = {
    "phalanx_router_time_to_first_token_seconds_bucket": "ttft",
    "phalanx_router_inter_token_latency_seconds_bucket": "itl",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTraffic:
    """Counts since the start of a router."""

    finished: float = 0
    moves: float = 0
    shed: float = 0
    ttft: Buckets = field(default_factory=dict)
    itl: Buckets = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """Current load of one router."""

    streams: int = 0
    queued: int = 0
    held: int = 0
    groups: Mapping[str, GroupLoad] = field(default_factory=dict)
    hotspots: Mapping[str, str] = field(default_factory=dict)
    """Causes by group."""
    traffic: RouterTraffic = RouterTraffic()


def read_router(text: str) -> RouterLoad:
    """Returns the load in a router's /metrics."""
    plain: dict[str, float] = {}
    by_group: dict[str, dict[str, float]] = {}
    counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
    buckets: dict[str, dict[float, float]] = {"ttft": {}, "itl": {}}
    hotspots: dict[str, str] = {}
    for line in text.splitlines():
        sample = _LINE.match(line)
        value = _number(sample[3]) if sample else None
        if sample is None or value is None:
            continue
        found = dict(_LABEL.findall(sample[2] or ""))
        group = found.get("group")
        if sample[1] in _COUNTERS:
            label, counted = _COUNTERS[sample[1]]
            counters[sample[1]] += value if found.get(label, "") == counted else 0
        elif sample[1] in _HISTOGRAMS:
            own, bound = buckets[_HISTOGRAMS[sample[1]]], float(found.get("le", "inf"))
            own[bound] = own.get(bound, 0) + value  # over all models
        elif sample[1] == "phalanx_router_hotspot" and group is not None:
            hotspots[group] = found.get("cause", "")
        elif group is None:
            plain[sample[1]] = value
        elif sample[1].startswith(labels.GROUP_GAUGES):
            by_group.setdefault(group, {})[sample[1].removeprefix(labels.GROUP_GAUGES)] = value
    return RouterLoad(
        streams=int(plain.get("phalanx_router_streams", 0)),
        queued=int(plain.get("phalanx_router_queued_requests", 0)),
        held=int(plain.get("phalanx_router_held_requests", 0)),
        groups={group: _load(gauges) for group, gauges in by_group.items()},
        hotspots=hotspots,
        traffic=RouterTraffic(
            finished=counters["phalanx_router_requests_total"],
            moves=counters["phalanx_router_moves_total"],
            shed=counters["phalanx_router_shed_total"],
            ttft=buckets["ttft"],
            itl=buckets["itl"],
        ),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _load(gauges: Mapping[str, float]) -> GroupLoad:
    return GroupLoad(
        streams=int(gauges.get("streams", 0)),
        running=int(gauges.get("running_requests", 0)),
        waiting=int(gauges.get("waiting_requests", 0)),
        kv=gauges.get("kv_use", 0.0),
        step_s=gauges.get("step_seconds", 0.0),
        incarnation=int(gauges.get("incarnation", 0)),
        busy=gauges.get("device_busy_ratio", 0.0),
        bandwidth=gauges.get("bandwidth_utilization", 0.0),
        flops=gauges.get("flop_utilization", 0.0),
        cache=_cache(gauges),
    )


def _cache(gauges: Mapping[str, float]) -> CacheLoad:
    lookups = int(gauges.get("cache_lookups", 0))
    hit_rates = [gauges.get(f"cache_hit_rate_{name}", 0.0) for name in SIZE_NAMES]
    return CacheLoad(
        pages=int(gauges.get("pages", 0)),
        page_bytes=int(gauges.get("page_bytes", 0)),
        curve=CacheCurve(lookups, hit_rates, _tiers(gauges)) if lookups else NO_CURVE,
        use=CacheUse(
            reuse_pages=gauges.get("cache_reuse_pages", 0.0),
            residency_s=gauges.get("cache_residency_seconds", 0.0),
            host_residency_s=gauges.get("cache_host_residency_seconds", 0.0),
            unused_share=gauges.get("cache_unused_ratio", 0.0),
            compacted_bytes=int(gauges.get("disk_compacted_bytes", 0)),
            reclaimed_bytes=int(gauges.get("disk_reclaimed_bytes", 0)),
        ),
    )


def _tiers(gauges: Mapping[str, float]) -> TierCurve:
    hit_rates = [gauges.get(f"cache_host_hit_rate_{name}") for name in HOST_SIZE_NAMES]
    return TierCurve(
        int(gauges.get("cache_host_pages", 0)),
        [rate for rate in hit_rates if rate is not None],
        gauges.get("cache_hit_rate_host"),
        gauges.get("cache_hit_rate_disk"),
    )


def merge(routers: Iterable[RouterLoad]) -> dict[str, GroupLoad]:
    """Returns the groups of all routers: streams summed, other values' maximum, caches with the most lookups."""
    merged: dict[str, GroupLoad] = {}
    for router in routers:
        for group, load in router.groups.items():
            former = merged.get(group, GroupLoad())
            merged[group] = GroupLoad(
                streams=former.streams + load.streams,
                running=max(former.running, load.running),
                waiting=max(former.waiting, load.waiting),
                kv=max(former.kv, load.kv),
                step_s=max(former.step_s, load.step_s),
                incarnation=max(former.incarnation, load.incarnation),
                busy=max(former.busy, load.busy),
                bandwidth=max(former.bandwidth, load.bandwidth),
                flops=max(former.flops, load.flops),
                cache=max(former.cache, load.cache, key=lambda cache: (cache.curve.lookups, cache.pages)),
            )
    return merged
