"""Consistent hashing with bounded loads, as KubeAI has it: the hash of the prompt's beginning names a place on a ring, and the
first group from there on takes it that has at most 1.25 times its share. Source: Mirrokni et al. 2018; balancing.md 1.12."""

from bisect import bisect_left
from hashlib import blake2b

from bench.simulate.jobs import Job
from bench.simulate.scene import Plain, Scene

NODES = 256
BOUND = 1.25


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class BoundedHash(Plain):
    """A ring of 256 places for each group. A prompt without known blocks has a beginning of its own."""

    def __init__(self) -> None:
        self._ring: list[tuple[int, int]] = []

    def choose(self, job: Job, scene: Scene) -> int:
        """The first group on the ring with room."""
        count = len(scene.groups)
        if len(self._ring) != NODES * count:
            self._ring = sorted((_place(f"{group}/{node}"), group) for group in range(count) for node in range(NODES))
        first = f"block {job.blocks[0]}" if job.blocks else f"prompt {job.number}"
        bound = BOUND * (1 + sum(seen.sent.requests for seen in scene.groups)) / count
        start = bisect_left(self._ring, (_place(first), 0))
        for step in range(len(self._ring)):
            group = self._ring[(start + step) % len(self._ring)][1]
            if scene.groups[group].sent.requests + 1 <= bound:
                return group
        return self._ring[start % len(self._ring)][1]
