"""Machines of moves with one mistake each, to see that runs in virtual time find it."""

from bench.virtual.world import Cell, Machines
from phalanx_router.moves.machine import Move
from phalanx_router.moves.records import Action, StreamPosition
from phalanx_runtime.core.migration.records import ReleaseMoved, SourceAction, TargetAction, Unfreeze
from phalanx_runtime.core.migration.source import SourceMoves
from phalanx_runtime.core.migration.target import TargetMoves


class NoCompare(Move):
    """Commits without looking where the stream is, and does not hear that it is nowhere."""

    def stream_over(self, why: str, now: float) -> list[Action]:
        return [] if not self.is_committed else super().stream_over(why, now)

    def _is_unchanged(self, at: StreamPosition | None) -> bool:
        return True

    def _commit_if_ready(self, at: StreamPosition | None, now: float) -> list[Action]:
        if self._frozen is None or self._arrived is None:
            return []
        return self._commit(self.proposal.move, "both said so", now)


class NeverThaws(SourceMoves):
    """Freezes for ever when neither Thaw nor Release comes."""

    @property
    def deadline(self) -> float | None:
        return None

    def tick(self, now: float) -> list[SourceAction]:
        return []


class ThawsAfterRelease(SourceMoves):
    """Goes on after Release."""

    def release(self, move: str) -> list[SourceAction]:
        return [Unfreeze(a.move, a.handle, a.why) if isinstance(a, ReleaseMoved) else a for a in super().release(move)]


class NoLease(TargetMoves):
    """Keeps its pages for ever when neither Submit nor Cancel comes."""

    @property
    def deadline(self) -> float | None:
        return None

    def tick(self, now: float) -> list[TargetAction]:
        return []


class TooEarly(TargetMoves):
    """Says that all pages are here with the first of them."""

    def came(self, move: str, rank: int, num_bytes: int, num_computed: int | None, now: float) -> list[TargetAction]:
        held = self._moves.get(move)
        if num_computed is None and held is not None:
            num_computed = len(held.asked.request.prompt)
        return super().came(move, rank, num_bytes, num_computed, now)


WORSE: dict[str, tuple[Machines, Cell, float]] = {
    "no compare": (Machines(move=NoCompare), Cell(3, "source", "hung"), 1.0),
    "source without lease": (Machines(out=NeverThaws), Cell(3, "source", "dropped"), 0.0),
    "thaw after release": (Machines(out=ThawsAfterRelease), Cell(6, "target", "delayed"), 0.0),
    "target without lease": (Machines(into=NoLease), Cell(4, "router", "dropped"), 0.0),
    "starts too early": (Machines(into=TooEarly), Cell(7, "source", "delayed"), 0.0),
    "damaged pages": (Machines(checks_pages=False), Cell(2, "source", "corrupted"), 0.0),
}
"""What is worse, at which fault it shows, and which share of clients leaves during the move."""
