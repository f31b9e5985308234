"""Which prefixes many prompts begin with: the heaviest by their share of the prompt tokens that came lately.

Space-saving (Metwally et al. 2005) over page keys: `COUNTERS` counters; a key without one takes that of the lightest, with its
weight as error. A key stands for its whole prefix, so a prompt is counted at some of its depths: 1, 2, 3, 4, 6, 8, 12 ... pages,
as far as they have counters, and one step deeper. So a prefix gets its depth in as many prompts as there are steps to it, and a
prompt that comes once costs one counter. Told is the weight less the error, never too much. Weights halve in `HALF_LIFE_S`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx_api import wire

COUNTERS = 64
TOLD = 8
HALF_LIFE_S = 30.0
DECAY_EVERY_S = 1.0
SAME_SHARE = 0.8
"""A prefix is left out when a longer one has this part of its weight: the longer one says it all."""
LEAST_SHARE = 0.01


@dataclass(slots=True)
class _Counter:
    """`parent` is the key at the depth before, where it had a counter."""

    pages: int
    weight: float
    error: float
    parent: bytes | None


def depths(pages: int) -> Iterator[int]:
    """The depths at which a prompt of so many full pages is counted."""
    depth = 1
    while depth <= pages:
        yield depth
        if depth + depth // 2 <= pages and depth > 1:
            yield depth + depth // 2
        depth *= 2


class HeavyPrefixes:
    """Counts prompts by what they begin with."""

    def __init__(self) -> None:
        self._counters: dict[bytes, _Counter] = {}
        self._total = 0.0
        self._decayed_s: float | None = None

    def add(self, keys: Sequence[bytes], num_tokens: int) -> None:
        """Counts a prompt of so many tokens, whose full pages have these keys."""
        self._total += num_tokens
        parent: bytes | None = None
        for depth in depths(len(keys)):
            key = keys[depth - 1]
            counter = self._counters.get(key)
            if counter is None:
                self._begin(key, depth, num_tokens, parent)
                return
            counter.weight += num_tokens
            parent = key

    def heaviest(self) -> list[wire.HeavyPrefix]:
        """The heaviest prefixes, heaviest first, each with at least `LEAST_SHARE`; none that a longer one makes superfluous."""
        least = LEAST_SHARE * self._total
        sure = {key: c.weight - c.error for key, c in self._counters.items() if c.weight - c.error > least}
        covered = {
            counter.parent
            for key, counter in self._counters.items()
            if key in sure and counter.parent in sure and sure[key] >= SAME_SHARE * sure[counter.parent]
        }
        told = sorted((key for key in sure if key not in covered), key=lambda key: -sure[key])[:TOLD]
        return [wire.HeavyPrefix(key, self._counters[key].pages, sure[key] / self._total) for key in told]

    def _begin(self, key: bytes, pages: int, num_tokens: int, parent: bytes | None) -> None:
        """Gives a key a counter, the lightest one's when all are taken."""
        error = 0.0
        if len(self._counters) >= COUNTERS:
            lightest = min(self._counters, key=lambda other: self._counters[other].weight)
            error = self._counters.pop(lightest).weight
        self._counters[key] = _Counter(pages, error + num_tokens, error, parent)

    def decay(self, now: float) -> None:
        """Lets weights fade, as the time since the call before says."""
        if self._decayed_s is None:
            self._decayed_s = now
        passed = now - self._decayed_s
        if passed < DECAY_EVERY_S:
            return
        self._decayed_s = now
        factor: float = 0.5 ** (passed / HALF_LIFE_S)
        self._total *= factor
        for counter in self._counters.values():
            counter.weight *= factor
            counter.error *= factor
