"""State machines of moves with one defect each, which the simulated moves must find."""

from bench.virtual.world import Cell, Machines
from phalanx_router.moves.machine import Move
from phalanx_router.moves.records import Action, StreamPosition
from phalanx_runtime.core.migration.records import ReleaseMoved, SourceAction, TargetAction, Unfreeze
from phalanx_runtime.core.migration.source import SourceMoves
from phalanx_runtime.core.migration.target import TargetMoves


class CommitsUnchecked(Move):
    """Commits although the stream has changed or ended."""

    def stream_ended(self, why: str, now: float) -> list[Action]:
        return [] if not self.is_committed else super().stream_ended(why, now)

    def _is_unchanged(self, position: StreamPosition | None) -> bool:
        return True

    def _commit_if_ready(self, position: StreamPosition | None, now: float) -> list[Action]:
        if self._frozen is None or self._arrived is None:
            return []
        return self._commit(self.request.move, "Frozen and Arrived were received", now)


class StaysFrozen(SourceMoves):
    """Waits for Thaw or Release without a timeout."""

    @property
    def deadline(self) -> float | None:
        return None

    def tick(self, now: float) -> list[SourceAction]:
        return []


class ThawsAfterRelease(SourceMoves):
    """Lets the request continue after Release."""

    def release(self, move: str) -> list[SourceAction]:
        return [Unfreeze(a.move, a.handle, a.why) if isinstance(a, ReleaseMoved) else a for a in super().release(move)]


class KeepsPages(TargetMoves):
    """Keeps reserved pages without Submit or Cancel."""

    @property
    def deadline(self) -> float | None:
        return None

    def tick(self, now: float) -> list[TargetAction]:
        return []


class ArrivesEarly(TargetMoves):
    """Reports the arrival of all pages with the first ones."""

    def received(self, move: str, rank: int, num_bytes: int, num_computed: int | None, now: float) -> list[TargetAction]:
        incoming = self._moves.get(move)
        if num_computed is None and incoming is not None:
            num_computed = len(incoming.order.request.prompt)
        return super().received(move, rank, num_bytes, num_computed, now)


DEFECTIVE: dict[str, tuple[Machines, Cell, float]] = {
    "unchecked commit": (Machines(move=CommitsUnchecked), Cell(3, "source", "hung"), 1.0),
    "source without lease": (Machines(source=StaysFrozen), Cell(3, "router", "killed"), 0.0),
    "thaw after release": (Machines(source=ThawsAfterRelease), Cell(6, "target", "delayed"), 0.0),
    "target without lease": (Machines(target=KeepsPages), Cell(4, "router", "dropped"), 0.0),
    "early arrival": (Machines(target=ArrivesEarly), Cell(7, "source", "delayed"), 0.0),
    "damaged pages": (Machines(checks_pages=False), Cell(2, "source", "corrupted"), 0.0),
}
"""The machines, the fault that reveals the defect, and the share of clients that disconnect during the move."""
