"""`CacheSized` and `status.cache`, from the miss-ratio curves that groups report.

The condition recommends a size: it is False once twice the pages would raise the hit rate by `GAIN`, until they would raise it by
less than `KEPT_GAIN`. Both change rarely: percentages are written when one differs by `MIN_CHANGE` or the verdict changes.
"""

from collections.abc import Sequence

from phalanx_api.cache_curve import SIZES, CacheCurve, merge_curves
from phalanx_api.conditions import Reason, drop_condition, find_condition, set_condition
from phalanx_api.spec.engine import Engine
from phalanx_api.status import CacheStatus, Status
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
    is_small = _is_too_small(curve, was_small=known is not None and known.status == "False")
    new = _cache_status(curve, pages, page_bytes)
    is_verdict_new = known is None or (known.status == "False") != is_small or known.status == "Unknown"
    cache = new if former is None or not is_same_size or is_verdict_new or _differs(former, new) else former
    reason = Reason.TOO_FEW_PAGES if is_small else Reason.WORKING_SET_FITS
    message = _larger(cache) if is_small else _sufficient(cache)
    return _with_verdict(status, not is_small, reason, message, cache=cache, snapshot=snapshot, now=now)


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
    names = sorted(group.name for group in live_groups(snapshot.groups) if group.ready and group.revision == revision)
    return [fleet.groups[name] for name in names if name in fleet.groups and fleet.groups[name].cache.pages]


def _size(reports: Sequence[GroupReport], former: CacheStatus | None) -> tuple[int, int]:
    """Returns pages and bytes per page of the smallest group."""
    smallest = min(reports, key=lambda report: report.cache.pages).cache
    if former is not None and abs(former.pages - smallest.pages) <= SAME_PAGES * smallest.pages:
        return former.pages, smallest.page_bytes
    return smallest.pages, smallest.page_bytes


def _is_too_small(curve: CacheCurve, was_small: bool) -> bool:
    _, present, twice, _ = curve.hit_rates
    return twice - present >= (KEPT_GAIN if was_small else GAIN)


def _cache_status(curve: CacheCurve, pages: int, page_bytes: int) -> CacheStatus:
    half, present, twice, four_times = (round(100 * rate) for rate in curve.hit_rates)
    return CacheStatus(
        pages=pages,
        page_bytes=page_bytes,
        hit_percent_half=half,
        hit_percent=present,
        hit_percent_twice=twice,
        hit_percent_four_times=four_times,
    )


def _percents(cache: CacheStatus) -> tuple[int, int, int, int]:
    return cache.hit_percent_half, cache.hit_percent, cache.hit_percent_twice, cache.hit_percent_four_times


def _differs(former: CacheStatus, new: CacheStatus) -> bool:
    return any(abs(a - b) >= MIN_CHANGE for a, b in zip(_percents(former), _percents(new), strict=True))


def _larger(cache: CacheStatus) -> str:
    """Recommends four times the pages if they gain as much again as twice the pages must."""
    is_four = cache.hit_percent_four_times - cache.hit_percent_twice >= round(100 * GAIN)
    factor, percent = (4, cache.hit_percent_four_times) if is_four else (2, cache.hit_percent_twice)
    return (
        f"{_amount(cache, factor)} in each group instead of {_amount(cache, 1)} would raise the hit rate of the prefix cache "
        f"from {cache.hit_percent} % to {percent} %"
    )


def _sufficient(cache: CacheStatus) -> str:
    text = (
        f"{_amount(cache, 1)} in each group reach a hit rate of {cache.hit_percent} %, twice as much {cache.hit_percent_twice} %"
    )
    if cache.hit_percent_four_times - cache.hit_percent_twice >= round(100 * GAIN):
        text += f", {_amount(cache, 4)} {cache.hit_percent_four_times} %"
    if cache.hit_percent - cache.hit_percent_half <= 1:
        text += f"; {_amount(cache, 0.5)} {cache.hit_percent_half} %"
    return text


def _amount(cache: CacheStatus, factor: float) -> str:
    pages = round(factor * cache.pages)
    gib = pages * cache.page_bytes / _GIB
    return f"{gib:.3g} GiB of KV cache ({pages:,} pages)" if gib else f"{pages:,} pages"
