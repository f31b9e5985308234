"""What became of all proposals of an engine: counted, and told as `SpeculationCounts`."""

from collections.abc import Sequence

from phalanx_api.speculation import MAX_DEPTH, SpeculationCounts
from phalanx_runtime.core.draft_tree import levels, places
from phalanx_runtime.core.step_builder import Chunk


class Tally:
    """Of one engine, since it started."""

    __slots__ = ("_accepted", "_branched", "_paths", "_proposed", "_saved")

    def __init__(self) -> None:
        self._paths = self._saved = self._branched = 0
        self._proposed, self._accepted = [0] * MAX_DEPTH, [0] * MAX_DEPTH

    def add(self, chunk: Chunk, accepted: Sequence[int], kept: int) -> None:
        """Of these proposals so many were accepted; their request kept so many tokens."""
        self._paths += chunk.depth > len(chunk.undrafted)
        self._saved += max(0, kept - 1)
        shape = tuple(chunk.parents)
        for node, (level, place) in enumerate(zip(levels(shape), places(shape), strict=True)):
            self._proposed[level] += node not in chunk.undrafted
            self._accepted[level] += node in accepted
            self._branched += place > 0 and node in accepted

    def counts(self, draft_s: float, verify_s: float, lost: str) -> SpeculationCounts:
        """All of it, with the time in drafts, the time that proposals cost their steps, and why there are no drafts any more."""
        longest = max((at + 1 for at, count in enumerate(self._proposed) if count), default=0)
        proposed, accepted = self._proposed[:longest], self._accepted[:longest]
        return SpeculationCounts(self._paths, proposed, accepted, self._saved, draft_s, verify_s, lost, self._branched)
