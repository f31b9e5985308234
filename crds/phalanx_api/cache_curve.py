"""The miss-ratio curve of a prefix cache as groups, routers and the operator report it."""

from collections.abc import Iterable

import msgspec

SIZES = (0.5, 1.0, 2.0, 4.0)
"""Sizes of the cache at which the curve is reported, as factors of a group's pages."""
SIZE_NAMES = ("half", "now", "twice", "four_times")
"""Names of `SIZES` in metrics."""


class CacheCurve(msgspec.Struct, frozen=True, array_like=True):
    """Hit rates of page lookups by size of the cache, estimated for LRU eviction."""

    lookups: int = 0  # recent pages looked up; old ones count less
    hit_rates: list[float] = []  # at each of `SIZES`, ascending, 0 to 1; empty without lookups


NO_CURVE = CacheCurve()


def merge_curves(curves: Iterable[CacheCurve]) -> CacheCurve:
    """Returns the mean of the curves, weighted by lookups. Values of a faulty program are clamped, incomplete curves ignored."""
    used = [curve for curve in curves if curve.lookups > 0 and len(curve.hit_rates) == len(SIZES)]
    total = sum(curve.lookups for curve in used)
    if not total:
        return NO_CURVE

    def mean(index: int) -> float:
        return sum(curve.lookups * min(max(0.0, curve.hit_rates[index]), 1.0) for curve in used) / total  # NaN becomes 0

    return CacheCurve(total, [mean(index) for index in range(len(SIZES))])
