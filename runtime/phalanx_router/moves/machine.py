"""One move, as the router decides it. It is the commit authority: until it says so the source has the stream, then the target.

    PREPARING -> COPYING -> FROZEN -> COMMITTED -> over           with pages
    WARMING -----------------------> COMMITTED -> over            without: the target computes them first, then the stream follows

    commit  iff  Frozen and Arrived came, and the stream is where it was when the move was proposed: same group, same handle, same
                 epoch, and no token beyond those that the source had when it froze

Everything else before the commit gives the move up: Thaw to the source, Cancel to the target, and the stream goes on where it is.
After the commit a lost target is a loss like any other, and the journal is replayed. Frames that come late or twice do nothing,
but a source that says after the commit that it goes on is told again to let go.
"""

from enum import Enum

from phalanx_api import moves, wire
from phalanx_router.moves.records import (
    Action,
    Commit,
    EndSource,
    MoveSettings,
    Outcome,
    Over,
    Proposal,
    StreamAt,
    ToSource,
    ToTarget,
    Unheard,
    Warm,
)


class State(Enum):
    """Where a move is."""

    NEW = "new"
    PREPARING = "preparing"
    WARMING = "warming"
    COPYING = "copying"
    FROZEN = "frozen"
    COMMITTED = "committed"
    OVER = "over"


class Move:
    """One move of one stream. All times are arguments."""

    def __init__(self, proposal: Proposal, settings: MoveSettings) -> None:
        self.proposal = proposal
        self.state = State.NEW
        self.deadline: float | None = None
        self._settings = settings
        self._frozen: moves.Frozen | None = None
        self._arrived: moves.Arrived | None = None
        self._is_committed = False
        self._target_handle: int | None = None
        self._last_token = 0.0

    @property
    def is_committed(self) -> bool:
        """Whether the target has the stream."""
        return self._is_committed

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return self.state is State.OVER

    def start(self, request: wire.Request, now: float) -> list[Action]:
        """The first actions. `request`: what the journal would replay now."""
        proposal = self.proposal
        if proposal.how == "recompute":
            self._enter(State.WARMING, now, self._settings.copy_s)
            return [Warm(proposal.move, f"{proposal.why}: recompute")]
        self._enter(State.PREPARING, now, self._settings.prepare_s)
        asked = wire.Prepare(proposal.move, request, self._settings.lease_s)
        return [ToTarget(asked, f"{proposal.why}: {proposal.how}")]

    def prepared(self, told: moves.Prepared, at: StreamAt | None, now: float) -> list[Action]:
        """The target has room."""
        if self.state is not State.PREPARING:
            return self._late(told.move)
        proposal = self.proposal
        if not self._is_where_it_was(at):
            return self._give_up("stream", "ended", "the stream is not where it was", now)
        mode: moves.MoveMode = "stop" if proposal.how == "stop" else "precopy"
        asked = moves.MoveOut(proposal.move, proposal.at.handle, proposal.at.epoch, told, mode, proposal.bytes_per_s)
        self._enter(State.COPYING, now, self._settings.copy_s)
        return [ToSource(asked, f"{told.held_tokens} tokens are at the target already")]

    def frozen(self, told: moves.Frozen, at: StreamAt | None, now: float) -> list[Action]:
        """The source computes no more."""
        if self.state is not State.COPYING:
            return self._end_source() if self._is_committed else self._thaw_late()
        self._frozen, self._last_token = told, now
        self._enter(State.FROZEN, now, self._settings.ready_s + 2 * told.tail_s)
        return self._commit_if_ready(at, now)

    def arrived(self, told: moves.Arrived, at: StreamAt | None, now: float) -> list[Action]:
        """The target has all pages."""
        if self.state not in (State.COPYING, State.FROZEN):
            return self._late(told.move)
        self._arrived = told
        return self._commit_if_ready(at, now)

    def warmed(self, why: str, at: StreamAt | None, now: float) -> list[Action]:
        """The target has computed what the stream had when the move began, or does not compute it ahead."""
        if self.state is not State.WARMING:
            return []
        if not self._is_where_it_was(at):
            return self._give_up("stream", "ended", "the stream is not where it was", now)
        return self._commit("", why, now)

    def refused_by_target(self, code: str, why: str, now: float) -> list[Action]:
        """The target gave the move up, and keeps nothing of it."""
        if self._is_committed or self.state is State.OVER:
            return []
        outcome: Outcome = "refused" if self.state in (State.PREPARING, State.WARMING) else "target"
        return self._give_up(outcome, code, why, now)

    def refused_by_source(self, code: str, why: str, now: float) -> list[Action]:
        """The source gave the move up, and goes on."""
        if self._is_committed:
            return self._end_source()
        if self.state is State.OVER:
            return []
        return self._give_up("source", code, why, now)

    def target_lost(self, why: str, now: float) -> list[Action]:
        """The link of the target ended, or its incarnation. After the commit the stream hears of it itself."""
        if self.state is State.OVER:
            return []
        if self._is_committed:
            return self._over("moved", "target_lost", why, now)
        return self._give_up("target", "target_lost", why, now)

    def source_lost(self, why: str, now: float) -> list[Action]:
        """The link of the source ended, or its incarnation. Before the commit that is a replay."""
        if self.state is State.OVER or self._is_committed:
            return []
        return self._give_up("source", "source_lost", why, now)

    def stream_over(self, why: str, now: float) -> list[Action]:
        """The stream ended, or left its group for another reason."""
        if self.state is State.OVER:
            return []
        if self._is_committed:
            return self._over("moved", "ended", why, now)
        return self._give_up("stream", "ended", why, now)

    def submitted(self, handle: int) -> None:
        """The target's handle of the stream, after the commit."""
        self._target_handle = handle

    def first_token(self, now: float) -> list[Action]:
        """The first token of the target was delivered."""
        return self._over("moved", "", "the target goes on", now, now - self._last_token) if self._waits else []

    def reported(self, last_handle: int, now: float) -> list[Action]:
        """A load report of the target, which had taken in requests up to this handle."""
        if not self._waits or self._target_handle is None or last_handle < self._target_handle:
            return []
        self.deadline = None
        return []

    def tick(self, now: float) -> list[Action]:
        """What follows when nothing came in time."""
        if self.deadline is None or now < self.deadline or self.state is State.OVER:
            return []
        if self._waits:
            why = "the target never took the request"
            return [Unheard(self.proposal.at.epoch + 1, why), *self._over("moved", "unheard", why, now)]
        return self._give_up("timeout", self.state.value, f"nothing came while {self.state.value}", now)

    @property
    def _waits(self) -> bool:
        """Whether the target has the stream and no token of it came yet."""
        return self.state is State.COMMITTED

    def _commit_if_ready(self, at: StreamAt | None, now: float) -> list[Action]:
        if self._frozen is None or self._arrived is None:
            return []
        if not self._is_where_it_was(at):
            return self._give_up("stream", "ended", "the stream is not where it was", now)
        assert at is not None, "it is where it was"
        if at.num_delivered > self._frozen.num_output:
            return self._give_up("source", "lease", "the source went on by itself", now)
        return self._commit(self.proposal.move, f"{self._arrived.num_computed} tokens are at the target", now)

    def _is_where_it_was(self, at: StreamAt | None) -> bool:
        """The compare of compare-and-set: group, handle and epoch are those of the proposal."""
        was = self.proposal.at
        return at is not None and (at.key, at.handle, at.epoch) == (was.key, was.handle, was.epoch)

    def _commit(self, move: str, why: str, now: float) -> list[Action]:
        if self._frozen is None:
            self._last_token = now
        self._is_committed = True
        self._enter(State.COMMITTED, now, self._settings.start_s)
        return [Commit(move, why), *self._end_source()]

    def _end_source(self) -> list[Action]:
        return [EndSource(self.proposal.move, self.proposal.at.handle, "the stream runs at the target")]

    def _thaw_late(self) -> list[Action]:
        if self.state is not State.OVER:
            return []  # the same Frozen again
        return [ToSource(moves.Thaw(self.proposal.move), "the move is over")]

    def _late(self, move: str) -> list[Action]:
        """The answer to a target that tells of a move that was given up."""
        if self.state is not State.OVER or self._is_committed:
            return []
        return [ToTarget(moves.Cancel(move), "the move is over")]

    def _give_up(self, outcome: Outcome, code: str, why: str, now: float) -> list[Action]:
        """Undoes all: the source has the stream, if anybody has."""
        move = self.proposal.move
        undo: list[Action] = []
        if self.proposal.how != "recompute":
            if self.state in (State.COPYING, State.FROZEN):
                undo.append(ToSource(moves.Thaw(move), why))
            undo.append(ToTarget(moves.Cancel(move), why))
        return undo + self._over(outcome, code, why, now)

    def _over(self, outcome: Outcome, code: str, why: str, now: float, stall_s: float | None = None) -> list[Action]:
        self._enter(State.OVER, now, self._settings.linger_s)
        num_bytes = 0 if self._arrived is None else self._arrived.num_bytes
        return [Over(self.proposal.move, outcome, code, why, num_bytes, stall_s)]

    def _enter(self, state: State, now: float, at_most_s: float) -> None:
        self.state, self.deadline = state, now + at_most_s
