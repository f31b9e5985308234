"""Prefixes with the largest shares of recent prompt tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx_api import wire

MAX_COUNTERS = 64
MAX_REPORTED = 8
HALF_LIFE_S = 30.0
DECAY_INTERVAL_S = 1.0
COVER_SHARE = 0.8
"""A longer prefix with this share of a shorter one's weight replaces it."""
MIN_SHARE = 0.01
"""Minimum share of a reported prefix."""


@dataclass(slots=True)
class _Counter:
    num_pages: int
    weight: float
    error: float
    parent: bytes | None
    """Key at the next smaller depth, if it has a counter."""


def counted_depths(num_pages: int) -> Iterator[int]:
    """Yields 1, 2, 3, 4, 6, 8, 12 ... up to `num_pages`."""
    depth = 1
    while depth <= num_pages:
        yield depth
        if depth + depth // 2 <= num_pages and depth > 1:
            yield depth + depth // 2
        depth *= 2


class HotPrefixes:
    """Prefixes by share of recent prompt tokens: space-saving counters (Metwally et al. 2005) by page key.

    A new key replaces the lightest counter and takes over its weight, as error. A prompt adds at most one counter.
    """

    def __init__(self) -> None:
        self._counters: dict[bytes, _Counter] = {}
        self._total = 0.0
        self._decayed_s: float | None = None
        self._heaviest: list[wire.HotPrefix] | None = None
        """Of the present weights, if they were read."""

    def add(self, keys: Sequence[bytes], num_tokens: int) -> None:
        """Counts a prompt by the keys of its full pages."""
        self._total += num_tokens
        self._heaviest = None
        parent: bytes | None = None
        for depth in counted_depths(len(keys)):
            key = keys[depth - 1]
            counter = self._counters.get(key)
            if counter is None:
                self._add_counter(key, depth, num_tokens, parent)
                return
            counter.weight += num_tokens
            parent = key

    def heaviest(self) -> list[wire.HotPrefix]:
        """Returns the heaviest prefixes in order."""
        if self._heaviest is None:
            self._heaviest = self._find_heaviest()
        return self._heaviest

    def _find_heaviest(self) -> list[wire.HotPrefix]:
        least = MIN_SHARE * self._total
        weights = {key: c.weight - c.error for key, c in self._counters.items() if c.weight - c.error > least}
        covered = {
            counter.parent
            for key, counter in self._counters.items()
            if key in weights and counter.parent in weights and weights[key] >= COVER_SHARE * weights[counter.parent]
        }
        reported = sorted((key for key in weights if key not in covered), key=lambda key: -weights[key])[:MAX_REPORTED]
        return [wire.HotPrefix(key, self._counters[key].num_pages, weights[key] / self._total) for key in reported]

    def decay(self, now: float) -> None:
        """Decays the weights by the time since the last call."""
        if self._decayed_s is None:
            self._decayed_s = now
        passed = now - self._decayed_s
        if passed < DECAY_INTERVAL_S:
            return
        self._decayed_s = now
        self._heaviest = None
        factor: float = 0.5 ** (passed / HALF_LIFE_S)
        self._total *= factor
        for counter in self._counters.values():
            counter.weight *= factor
            counter.error *= factor

    def _add_counter(self, key: bytes, num_pages: int, num_tokens: int, parent: bytes | None) -> None:
        error = 0.0
        if len(self._counters) >= MAX_COUNTERS:
            lightest = min(self._counters, key=lambda other: self._counters[other].weight)
            error = self._counters.pop(lightest).weight
        self._counters[key] = _Counter(num_pages, error + num_tokens, error, parent)
