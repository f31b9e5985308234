"""Decides how many pages the host tier has, by what they add to the hit rate.

    value of a size = hit rate with it - min_gain * size / limit

The whole limit must raise the hit rate by `min_gain`, and each part of it by as much of that. Sizes from the floor to the limit
are compared, not only neighbours: the hit rate may rise at once when a working set fits. The tier moves to the best of those that
gain clearly for their distance, so that it stays where the curve is flat or noisy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEP = 1.03
"""Ratio of neighbouring sizes that are compared."""
MIN_CHANGE = 0.05
"""Smaller changes, as a share of the present size, are not made."""
HYSTERESIS = 0.2
"""Added pages must gain 1 + this of what they cost, removed ones at most 1 - this."""
MIN_PERIOD = 1024
"""Fewest lookups between two decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRules:
    """Bounds of the host tier in pages, and what it must gain."""

    floor: int
    limit: int
    min_gain: float
    """Hit rate that the limit must add over an empty tier."""

    @staticmethod
    def fixed(num_pages: int) -> "SizingRules":
        """Returns the rules of a tier that keeps its size."""
        return SizingRules(floor=num_pages, limit=num_pages, min_gain=1.0)

    @property
    def is_adaptive(self) -> bool:
        """Whether there is a choice."""
        return self.floor < self.limit

    @property
    def period(self) -> int:
        """Lookups between two decisions."""
        return max(MIN_PERIOD, self.limit // 4)

    def sizes(self) -> list[int]:
        """Returns the sizes that are compared, ascending; at least the floor and the limit."""
        sizes, size = [], self.floor
        while size < self.limit:
            sizes.append(size)
            size = max(size + 1, round(size * STEP))
        return [*sizes, self.limit]


@dataclass(frozen=True, slots=True)
class Resize:
    """A decision."""

    num_pages: int
    why: str


def choose_size(hit_rates: Callable[[Sequence[float]], list[float]], present: int, rules: SizingRules) -> Resize | None:
    """Returns the size to move to, within floor and limit, or None to stay.

    hit_rates: of the device and a host tier of each number of pages. Deciding again with the same curve stays.
    """
    sizes = [present, *rules.sizes()]
    rates = hit_rates(sizes)
    price = rules.min_gain / rules.limit
    values = [rate - price * size for rate, size in zip(rates, sizes, strict=True)]
    clear = [i for i in range(len(sizes)) if values[i] - values[0] >= HYSTERESIS * price * abs(sizes[i] - present)]
    best = max(clear, key=lambda i: (values[i], -sizes[i]))
    size = sizes[best]
    if abs(size - present) < max(1, MIN_CHANGE * present):
        return None
    gain = rates[best] - rates[0]
    return Resize(size, f"{size:,} pages instead of {present:,} change the hit rate from {rates[0]:.3f} by {gain:+.3f}")
