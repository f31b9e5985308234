"""The time to copy pages, fitted to measured copies. All times are seconds.

    t = fixed + page * n

n: pages of a copy. Fit: non-negative least squares of errors relative to the prediction, with forgetting, as of step times
(`phalanx_api.cost`). A ridge on the fixed time alone decides where copies of one size do not: all their time is that of pages.
"""

import math
from dataclasses import dataclass, field, replace

from phalanx_api.cost import MAX_TIME_RATIO, SHORTEST_S

FORGETTING_FACTOR = 0.95
"""Weight of a copy relative to the next: a window of 20 copies, which are rarer than steps."""
FIXED_RIDGE = 0.01
"""Share of the copies that count as if they had no fixed time."""
DECLINE_FACTOR = 0.99
"""Of all times, for each prompt that computes its pages instead: only copies measure them, so slow ones must not stay."""
LEAST_DECLINE = 1e-6
"""Of these factors together: to compute a page that is not copied then costs nothing."""


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Coefficients of the time to copy pages."""

    fixed_s: float
    page_s: float

    def predict(self, num_pages: float) -> float:
        """Returns the predicted seconds of a copy; 0 without pages."""
        return self.fixed_s + self.page_s * num_pages if num_pages else 0.0


@dataclass(frozen=True, slots=True)
class CopyFit:
    """Sums over measured copies, each with its weight: of 1, pages, their squares, seconds, and pages times seconds.

    Declines lower the times until the next copy. Its time is compared with those before the declines, and counts the more the
    lower they are: a slow copy is soon forgotten, and copies that stay slow are tried seldom.
    """

    weight: float = 0.0
    pages: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0
    decline: float = 1.0
    """Factor of the times, of prompts that declined since the latest copy."""

    def after(self, num_pages: int, seconds: float) -> "CopyFit":
        """Returns the fit after one more copy; without pages, or if the clock did not advance, the same."""
        if not num_pages or seconds < SHORTEST_S:
            return self
        times = self._fitted() if self.weight else CopyTimes(0.0, seconds / num_pages)
        expected_s, kept = times.predict(num_pages), FORGETTING_FACTOR * self.decline**2
        seconds = min(seconds, MAX_TIME_RATIO * expected_s)
        # Relative to a copy of one page: as all times change, earlier copies weigh no more than later ones.
        weight = (times.predict(1) / expected_s) ** 2
        return CopyFit(
            kept * self.weight + weight,
            kept * self.pages + weight * num_pages,
            kept * self.squares + weight * num_pages * num_pages,
            kept * self.seconds + weight * seconds,
            kept * self.products + weight * num_pages * seconds,
        )

    def declined(self) -> "CopyFit":
        """Returns the fit after a prompt that does not copy."""
        return replace(self, decline=max(DECLINE_FACTOR * self.decline, LEAST_DECLINE)) if self.weight else self

    def times(self) -> CopyTimes | None:
        """Returns the fitted times, lowered by declines, if anything was copied."""
        if not self.weight:
            return None
        fitted = self._fitted()
        return CopyTimes(self.decline * fitted.fixed_s, self.decline * fitted.page_s)

    @property
    def mean_page_s(self) -> float | None:
        """Seconds of a page in the measured copies, with its share of their fixed time."""
        return self.products / self.squares if self.weight else None

    def _fitted(self) -> CopyTimes:
        weight = (1.0 + FIXED_RIDGE) * self.weight
        scale = weight * self.squares - self.pages * self.pages
        fixed_s = (self.seconds * self.squares - self.products * self.pages) / scale
        page_s = (weight * self.products - self.pages * self.seconds) / scale
        if fixed_s <= 0:
            return CopyTimes(0.0, self.products / self.squares)
        return CopyTimes(fixed_s, page_s) if page_s > 0 else CopyTimes(self.seconds / weight, 0.0)


@dataclass(slots=True)
class ReadQueue:
    """Reads of pages, or of parts, which each rank executes one after the other, and their fitted times."""

    fit: CopyFit = field(default_factory=CopyFit)
    _waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Keys of each read, by its number, and when it was ordered; the first one is being read."""
    _ended_s: float = -math.inf
    """When all ranks had the latest complete one."""

    def add(self, number: int, num_keys: int, now: float) -> None:
        """Adds an ordered read."""
        self._waiting[number] = num_keys, now

    def end(self, number: int, num_read: int, now: float) -> None:
        """Removes a read that all ranks have executed. Learns its time: since its order, or since the end of the one before."""
        _, ordered_s = self._waiting.pop(number)
        self.fit = self.fit.after(num_read, now - max(ordered_s, self._ended_s))
        self._ended_s = now

    def learn_late(self, now: float) -> None:
        """Learns that the present read takes at least the time until now, if more is not expected."""
        num_keys, ordered_s = next(iter(self._waiting.values()), (0, now))
        seconds, times = now - max(ordered_s, self._ended_s), self.fit.times()
        if times is None or seconds > times.predict(num_keys):
            self.fit = self.fit.after(num_keys, seconds)

    def expect(self, num_keys: int) -> float | None:
        """Returns the expected seconds until a read that is ordered now is complete, if measured; 0 without keys."""
        times = self.fit.times()
        if times is None or not num_keys:
            return None if num_keys else 0.0
        return times.predict(num_keys) + sum(times.predict(size) for size, _ in self._waiting.values())
