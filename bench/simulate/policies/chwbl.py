"""Consistent hashing with bounded loads, as in KubeAI.

The hash of the prompt's first block names a position on a ring; the first group from there with at most 1.25 times its share
takes the request. Source: Mirrokni et al. 2018.
"""

from bisect import bisect_left
from hashlib import blake2b

from bench.simulate.jobs import Job
from bench.simulate.policy import DispatchOnly, RouterState

POSITIONS = 256
BOUND = 1.25


def _position(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class BoundedHash(DispatchOnly):
    """A ring with 256 positions per group. A prompt without known blocks is hashed by its number."""

    def __init__(self) -> None:
        self._ring: list[tuple[int, int]] = []

    def choose(self, job: Job, state: RouterState) -> int:
        count = len(state.groups)
        if len(self._ring) != POSITIONS * count:
            self._ring = sorted((_position(f"{group}/{node}"), group) for group in range(count) for node in range(POSITIONS))
        first = f"block {job.blocks[0]}" if job.blocks else f"prompt {job.number}"
        bound = BOUND * (1 + sum(group.sent.requests for group in state.groups)) / count
        start = bisect_left(self._ring, (_position(first), 0))
        for step in range(len(self._ring)):
            group = self._ring[(start + step) % len(self._ring)][1]
            if state.groups[group].sent.requests + 1 <= bound:
                return group
        return self._ring[start % len(self._ring)][1]
