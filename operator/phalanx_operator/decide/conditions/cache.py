"""`CacheSized` and `status.cache`, from the miss-ratio curves that groups report.

The condition recommends a size. It is False once one would raise the hit rate by `GAIN`, until it would by less than `KEPT_GAIN`:

    groups with a host tier     twice its limit                   host memory costs less than a device's, and finds the same pages
    groups without one          twice the pages of the device, or host memory for up to `SIZES[-1]` times as many

Status and condition change rarely: percentages are written when one differs by `MIN_CHANGE` or the verdict changes.
"""

from collections.abc import Sequence

from phalanx_api.cache_curve import SIZES, CacheCurve, TierCurve, merge_curves
from phalanx_api.conditions import Reason, drop_condition, find_condition, set_condition
from phalanx_api.spec.engine import Engine
from phalanx_api.status import CacheStatus, HostCacheStatus, Status
from phalanx_operator.decide.state.fleet import Fleet, GroupReport
from phalanx_operator.decide.state.groups import live_groups
from phalanx_operator.decide.state.snapshot import Snapshot

MIN_LOOKUPS = 1000
LOOKUPS_PER_PAGE = round(SIZES[-1])
"""With fewer lookups most pages are looked up for the first time, at any size."""
GAIN = 0.05
"""Gain in hit rate that makes a size worth recommending."""
KEPT_GAIN = 0.03
MIN_CHANGE = 5
"""Percentage points."""
SAME_PAGES = 0.05
"""Sizes of groups whose memory was measured differ by this share; the former number of pages is kept."""
_GIB = 1 << 30


def with_cache_condition(status: Status, engine: Engine, *, fleet: Fleet, snapshot: Snapshot, revision: str, now: str) -> Status:
    """Sets the condition, which is absent until a lookup is reported, and without a prefix cache.

    Both are kept while routers are silent, and while restarted groups of the same size have too few lookups.
    """
    if engine.get_setting("prefix_caching") is False:
        return status.model_copy(update={"cache": None, "conditions": drop_condition(status.conditions, "CacheSized")})
    former = snapshot.status.cache
    status = status.model_copy(update={"cache": former})
    known = find_condition(status.conditions, "CacheSized")
    reports = _reports(fleet, snapshot, revision)
    if not reports or fleet.is_silent:
        return status
    curve, pages, page_bytes = merge_curves(report.cache.curve for report in reports), *_size(reports, former)
    is_same_size = former is not None and (former.pages, former.page_bytes) == (pages, page_bytes)
    if curve.lookups < max(MIN_LOOKUPS, LOOKUPS_PER_PAGE * sum(report.cache.pages for report in reports)):
        if is_same_size or (known is None and not curve.lookups):
            return status
        return _with_verdict(status, None, Reason.TOO_FEW_LOOKUPS, "", cache=None, snapshot=snapshot, now=now)
    new = _cache_status(curve, pages, page_bytes)
    reason = _verdict(curve, was_small=known is not None and known.status == "False")
    is_verdict_new = known is None or known.reason != reason
    cache = new if former is None or not is_same_size or is_verdict_new or _differs(former, new) else former
    return _with_verdict(
        status,
        reason is Reason.WORKING_SET_FITS,
        reason,
        _MESSAGES[reason](cache),
        cache=cache,
        snapshot=snapshot,
        now=now,
    )


def _with_verdict(
    status: Status,
    verdict: bool | None,
    reason: Reason,
    message: str,
    *,
    cache: CacheStatus | None,
    snapshot: Snapshot,
    now: str,
) -> Status:
    conditions = set_condition(
        status.conditions, "CacheSized", verdict, reason=reason, message=message, generation=snapshot.generation, now=now
    )
    return status.model_copy(update={"cache": cache, "conditions": conditions})


def _reports(fleet: Fleet, snapshot: Snapshot, revision: str) -> list[GroupReport]:
    """Returns the reports of ready groups of this revision: others may have another number of pages."""
    names = sorted(group.name for group in live_groups(snapshot.groups) if group.alive and group.revision == revision)
    return [fleet.groups[name] for name in names if name in fleet.groups and fleet.groups[name].cache.pages]


def _size(reports: Sequence[GroupReport], former: CacheStatus | None) -> tuple[int, int]:
    """Returns pages and bytes per page of the smallest group."""
    smallest = min(reports, key=lambda report: report.cache.pages).cache
    if former is not None and abs(former.pages - smallest.pages) <= SAME_PAGES * smallest.pages:
        return former.pages, smallest.page_bytes
    return smallest.pages, smallest.page_bytes


def _verdict(curve: CacheCurve, was_small: bool) -> Reason:
    gain = KEPT_GAIN if was_small else GAIN
    _, present, twice, _ = curve.hit_rates
    tiers = curve.tiers
    if tiers.host is not None:
        _, full, twice_full, _ = tiers.hit_rates
        return Reason.TOO_FEW_HOST_PAGES if twice_full - full >= gain else Reason.WORKING_SET_FITS
    if twice - present >= gain:
        return Reason.TOO_FEW_PAGES
    pays = bool(tiers.hit_rates) and tiers.hit_rates[-1] - present >= gain
    return Reason.TOO_FEW_HOST_PAGES if pays else Reason.WORKING_SET_FITS


def _cache_status(curve: CacheCurve, pages: int, page_bytes: int) -> CacheStatus:
    half, present, twice, four_times = map(_percent, curve.hit_rates)
    tiers = curve.tiers
    return CacheStatus(
        pages=pages,
        page_bytes=page_bytes,
        hit_percent_half=half,
        hit_percent=present,
        hit_percent_twice=twice,
        hit_percent_four_times=four_times,
        hit_percent_with_host=None if tiers.host is None else _percent(tiers.host),
        hit_percent_with_disk=None if tiers.disk is None else _percent(tiers.disk),
        host=_host_status(tiers) if tiers.hit_rates else None,
    )


def _host_status(tiers: TierCurve) -> HostCacheStatus:
    half, full, twice, four_times = map(_percent, tiers.hit_rates)
    return HostCacheStatus(
        pages=tiers.pages,
        is_used=tiers.host is not None,
        hit_percent_half=half,
        hit_percent=full,
        hit_percent_twice=twice,
        hit_percent_four_times=four_times,
    )


def _percent(rate: float) -> int:
    return round(100 * rate)


def _percents(cache: CacheStatus) -> tuple[int | None, ...]:
    host = cache.host
    tiers = (cache.hit_percent_with_host, cache.hit_percent_with_disk)
    sizes = (host.hit_percent_half, host.hit_percent, host.hit_percent_twice, host.hit_percent_four_times) if host else ()
    return (cache.hit_percent_half, cache.hit_percent, cache.hit_percent_twice, cache.hit_percent_four_times, *tiers, *sizes)


def _differs(former: CacheStatus, new: CacheStatus) -> bool:
    before, now = _percents(former), _percents(new)
    if len(before) != len(now):
        return True
    return any(abs(a - b) >= MIN_CHANGE if a is not None and b is not None else a != b for a, b in zip(before, now, strict=True))


def _larger(cache: CacheStatus) -> str:
    """Recommends four times the pages if they gain as much again as twice the pages must; also host memory, if it would gain."""
    is_four = cache.hit_percent_four_times - cache.hit_percent_twice >= _percent(GAIN)
    factor, percent = (4, cache.hit_percent_four_times) if is_four else (2, cache.hit_percent_twice)
    text = (
        f"{_amount(cache, factor)} in each group instead of {_amount(cache, 1)} would raise the hit rate of the prefix cache "
        f"from {cache.hit_percent} % to {percent} %"
    )
    if cache.host is None or cache.host.hit_percent_four_times - cache.hit_percent < _percent(GAIN):
        return text
    factor, percent = _host_choice(cache, cache.host)
    return f"{text}; {_host_amount(cache, cache.host, factor)} to {percent} %"


def _larger_host(cache: CacheStatus) -> str:
    assert cache.host is not None, "the verdict needs hit rates with host memory"
    factor, percent = _host_choice(cache, cache.host)
    present = cache.host.hit_percent if cache.host.is_used else cache.hit_percent
    instead = f" instead of {_host_amount(cache, cache.host, 1)}" if cache.host.is_used else ""
    return (
        f"{_host_amount(cache, cache.host, factor)} in each group{instead} would raise the hit rate of the prefix cache "
        f"from {present} % to {percent} %"
    )


def _host_choice(cache: CacheStatus, host: HostCacheStatus) -> tuple[int, int]:
    """Returns factor and hit rate of the largest size that gains `GAIN` over the next smaller one, else of the largest."""
    sizes = [(2, host.hit_percent_twice), (4, host.hit_percent_four_times)]
    if not host.is_used:
        sizes.insert(0, (1, host.hit_percent))
    chosen = 0, host.hit_percent if host.is_used else cache.hit_percent
    for size in sizes:
        if size[1] - chosen[1] >= _percent(GAIN):
            chosen = size
    return chosen if chosen[0] else sizes[-1]


def _sufficient(cache: CacheStatus) -> str:
    host = cache.host
    if host is not None and host.is_used:
        text = f"{_amount(cache, 1)} and {_host_amount(cache, host, 1)} in each group reach a hit rate of {host.hit_percent} %"
        text += f", twice the host memory {host.hit_percent_twice} %"
        return text + (f", half of it {host.hit_percent_half} %" if host.hit_percent - host.hit_percent_half <= 1 else "")
    text = (
        f"{_amount(cache, 1)} in each group reach a hit rate of {cache.hit_percent} %, twice as much {cache.hit_percent_twice} %"
    )
    if cache.hit_percent_four_times - cache.hit_percent_twice >= _percent(GAIN):
        text += f", {_amount(cache, 4)} {cache.hit_percent_four_times} %"
    if cache.hit_percent - cache.hit_percent_half <= 1:
        text += f"; {_amount(cache, 0.5)} {cache.hit_percent_half} %"
    return text


_MESSAGES = {
    Reason.TOO_FEW_PAGES: _larger,
    Reason.TOO_FEW_HOST_PAGES: _larger_host,
    Reason.WORKING_SET_FITS: _sufficient,
}


def _amount(cache: CacheStatus, factor: float) -> str:
    return _size_text(round(factor * cache.pages), cache.page_bytes, "GiB of KV cache", "pages")


def _host_amount(cache: CacheStatus, host: HostCacheStatus, factor: float) -> str:
    return _size_text(round(factor * host.pages), cache.page_bytes, "GiB of host memory", "pages in host memory")


def _size_text(pages: int, page_bytes: int, unit: str, name: str) -> str:
    gib = pages * page_bytes / _GIB
    return f"{gib:.3g} {unit} ({pages:,} pages)" if gib else f"{pages:,} {name}"
