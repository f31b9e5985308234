"""Estimates the hit rate that the prefix cache would have with other sizes of its host tier.

The host tier is an LRU cache of its own: a page is used there when the device evicts it and when a prompt loads it, never while
it is only on the device. So a page that was loaded is in both tiers until one evicts it, and neither the sum of the two sizes nor
the larger one is the size of a single LRU cache that finds as much. A second miss-ratio curve therefore counts these uses, and
the lookups of pages that the device lacks. Uses are those of the present size: at another one, other pages are found, and so used
before the device evicts them. Near the present size the curve is exact but for its sample.

A group without a host tier has the curve too, which then says what a host tier would find.
"""

from collections.abc import Sequence

from phalanx_api.cache_curve import NO_TIERS, SIZES, TierCurve
from phalanx_runtime.core.kv.miss_ratio import MIN_HALF_LIFE, REFRESH_SHARE, MissRatioCurve

HALF_LIFE_PAGES = 4
"""Counts halve whenever this many lookups per page of the host tier were counted: its size follows the working set."""
_NEVER = 1 << 62


class TierHits:
    """Lookups by the tier that had the page, and the curve of the host tier. Old lookups count less."""

    def __init__(self, num_pages: int, *, has_host: bool, has_disk: bool) -> None:
        """num_pages: limit of the host tier; without one, the pages of the device."""
        self.num_pages = num_pages
        self._has_host, self._has_disk = has_host, has_disk
        self._half_life = max(MIN_HALF_LIFE, HALF_LIFE_PAGES * num_pages)
        self.curve = MissRatioCurve(round(SIZES[-1] * num_pages), half_life=_NEVER, exact_pages=0)
        """Of pages that the device lacks; halved with the other counts."""
        self._lookups = self._device = self._host = self._disk = 0.0
        self._reported, self._reported_lookups = NO_TIERS, 0.0
        self.total_lookups = 0
        """Lookups since the start."""

    @property
    def lookups(self) -> float:
        """Lookups that are counted."""
        return self._lookups

    def look_up(self, keys: Sequence[bytes], num_device: int, num_host: int, num_disk: int, *, is_used: bool = True) -> None:
        """Counts the lookups of a prompt's full pages, in chain order: those found on the device, then in host memory.

        num_disk: pages after these that were read from disk for a prompt. is_used: False if it computes them instead.
        """
        self.total_lookups += len(keys)
        self._lookups += len(keys)
        self._device += num_device
        beneath = keys[num_device:]
        if is_used:
            self._host += num_host
            self._disk += num_disk
            self.curve.look_up(beneath, num_host, uses_missed=False)
        else:
            self.curve.count_misses(beneath)
        if self._lookups >= self._half_life:
            self._lookups /= 2
            self._device /= 2
            self._host /= 2
            self._disk /= 2
            self.curve.halve()
            self._reported = NO_TIERS

    def evict(self, key: bytes) -> None:
        """Uses a page that the device evicts."""
        self.curve.use([key])

    def hit_rates(self, sizes: Sequence[float]) -> list[float]:
        """Returns the estimated hit rates with a host tier of each number of pages; 0 without lookups."""
        if not self._lookups:
            return [0.0] * len(sizes)
        missed = 1 - self._device / self._lookups
        return [1 - missed * (1 - rate) for rate in self.curve.hit_rates(sizes)]

    def report(self) -> TierCurve:
        """Returns the curve at `SIZES` of the host tier's limit, and what the present tiers find; a bit out of date."""
        if not self._lookups:
            return NO_TIERS
        if self._reported is NO_TIERS or abs(self._lookups - self._reported_lookups) > REFRESH_SHARE * self._reported_lookups:
            self._reported_lookups = self._lookups
            self._reported = TierCurve(
                self.num_pages,
                self.hit_rates([size * self.num_pages for size in SIZES]),
                (self._device + self._host) / self._lookups if self._has_host else None,
                (self._device + self._host + self._disk) / self._lookups if self._has_disk else None,
            )
        return self._reported
