"""The miss-ratio curve of a prefix cache as groups, routers and the operator report it."""

from collections.abc import Iterable, Sequence

import msgspec

SIZES = (0.5, 1.0, 2.0, 4.0)
"""Sizes of the cache at which the curve is reported, as factors of a group's pages."""
SIZE_NAMES = ("half", "now", "twice", "four_times")
"""Names of `SIZES` in metrics."""
HOST_SIZE_NAMES = ("half", "full", "twice", "four_times")
"""The same for the host tier, as factors of `TierCurve.pages`."""


class TierCurve(msgspec.Struct, frozen=True, array_like=True):
    """Hit rates of page lookups with the tiers below the device; hits on the device are part of each."""

    pages: int = 0  # factor 1 of `SIZES`: the limit of the host tier; without one, the pages of the device
    hit_rates: list[float] = []  # with a host tier of each of `SIZES`, estimated for LRU eviction; empty without lookups
    host: float | None = None  # counted with the present host tier; None without one
    disk: float | None = None  # the same with the disk


NO_TIERS = TierCurve()


class CacheCurve(msgspec.Struct, frozen=True, array_like=True):
    """Hit rates of page lookups by size of the cache, estimated for LRU eviction."""

    lookups: int = 0  # recent pages looked up; old ones count less
    hit_rates: list[float] = []  # at each of `SIZES`, ascending, 0 to 1; empty without lookups
    tiers: TierCurve = NO_TIERS


NO_CURVE = CacheCurve()


class CacheUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Statistics of pages. Means and counters are since the engine's start."""

    reuse_pages: float = 0.0  # other pages used between two uses of a page: median of repeated lookups
    residency_s: float = 0.0  # from publication to eviction, mean
    host_residency_s: float = 0.0  # in host memory, mean
    unused_share: float = 0.0  # slots without a token in the pages of running requests, 0 to 1
    compacted_bytes: int = 0  # written to disk by compaction, over all ranks
    reclaimed_bytes: int = 0  # of segments that were removed from disk, over all ranks


NO_USE = CacheUse()


def merge_curves(curves: Iterable[CacheCurve]) -> CacheCurve:
    """Returns the mean of the curves, weighted by lookups. Values of a faulty program are clamped, incomplete curves ignored."""
    used = [curve for curve in curves if curve.lookups > 0 and len(curve.hit_rates) == len(SIZES)]
    total = sum(curve.lookups for curve in used)
    if not total:
        return NO_CURVE
    return CacheCurve(total, _means([(curve.lookups, curve.hit_rates) for curve in used]), _merge_tiers(used))


def _merge_tiers(curves: Sequence[CacheCurve]) -> TierCurve:
    """`pages` is that of the smallest tier."""
    used = [curve for curve in curves if curve.tiers.pages > 0 and len(curve.tiers.hit_rates) == len(SIZES)]
    if not used:
        return NO_TIERS
    hosts = [(curve.lookups, [curve.tiers.host]) for curve in used if curve.tiers.host is not None]
    disks = [(curve.lookups, [curve.tiers.disk]) for curve in used if curve.tiers.disk is not None]
    return TierCurve(
        min(curve.tiers.pages for curve in used),
        _means([(curve.lookups, curve.tiers.hit_rates) for curve in used]),
        _means(hosts)[0] if hosts else None,
        _means(disks)[0] if disks else None,
    )


def _means(rows: Sequence[tuple[int, Sequence[float]]]) -> list[float]:
    """Means by column, weighted by the lookups before each row."""
    total = sum(lookups for lookups, _ in rows)
    columns = zip(*(rates for _, rates in rows), strict=True)
    weights = [lookups for lookups, _ in rows]
    return [  # NaN becomes 0
        sum(weight * min(max(0.0, rate), 1.0) for weight, rate in zip(weights, column, strict=True)) / total for column in columns
    ]
