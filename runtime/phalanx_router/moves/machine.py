"""State machine of one move. The router is the commit authority: the source owns the stream before the commit, the target after
it.

    PREPARING -> COPYING -> FROZEN -> COMMITTED -> OVER           with pages
    WARMING -----------------------> COMMITTED -> OVER            without pages: the target first computes the prefix

    commit  iff  Frozen and Arrived were received, and the stream is unchanged since the proposal: same group, handle and epoch,
                 and no delivered token that the source had not computed when it froze

Any other event before the commit gives the move up: Thaw to the source, Cancel to the target; the source continues. A target lost
after the commit causes a replay of the journal. Late and repeated frames have no effect, but a source that resumes after the
commit gets another Release.
"""

from enum import Enum

from phalanx_api import moves, wire
from phalanx_router.moves.records import (
    Action,
    Commit,
    EndSource,
    MoveEnded,
    MoveRequest,
    MoveSettings,
    Outcome,
    StreamPosition,
    TargetLost,
    ToSource,
    ToTarget,
    Warm,
)


class MoveState(Enum):
    """State of a move."""

    NEW = "new"
    PREPARING = "preparing"
    WARMING = "warming"
    COPYING = "copying"
    FROZEN = "frozen"
    COMMITTED = "committed"
    OVER = "over"


class Move:
    """One move of one stream. Times are arguments."""

    def __init__(self, proposal: MoveRequest, settings: MoveSettings) -> None:
        self.proposal = proposal
        self.state = MoveState.NEW
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
        """Whether the move has ended."""
        return self.state is MoveState.OVER

    def start(self, request: wire.Request, now: float) -> list[Action]:
        """Returns the first actions. `request`: the current replay of the journal."""
        proposal = self.proposal
        if proposal.how == "recompute":
            self._enter(MoveState.WARMING, now, self._settings.copy_s)
            return [Warm(proposal.move, f"{proposal.why}: recompute")]
        self._enter(MoveState.PREPARING, now, self._settings.prepare_s)
        frame_out = wire.Prepare(proposal.move, request, self._settings.lease_s)
        return [ToTarget(frame_out, f"{proposal.why}: {proposal.how}")]

    def prepared(self, frame: moves.Prepared, at: StreamPosition | None, now: float) -> list[Action]:
        """Handles Prepared: the target has allocated pages."""
        if self.state is not MoveState.PREPARING:
            return self._answer_late_target(frame.move)
        proposal = self.proposal
        if not self._is_unchanged(at):
            return self._give_up("stream", "ended", "the stream has left its group or ended", now)
        mode: moves.MoveMode = "stop" if proposal.how == "stop" else "precopy"
        frame_out = moves.MoveOut(
            move=proposal.move,
            handle=proposal.at.handle,
            epoch=proposal.at.epoch,
            prepared=frame,
            mode=mode,
            bytes_per_s=proposal.bytes_per_s,
        )
        self._enter(MoveState.COPYING, now, self._settings.copy_s)
        return [ToSource(frame_out, f"the target already has {frame.held_tokens} tokens")]

    def frozen(self, frame: moves.Frozen, at: StreamPosition | None, now: float) -> list[Action]:
        """Handles Frozen: the source has stopped computing."""
        if self.state is not MoveState.COPYING:
            return self._end_source() if self._is_committed else self._answer_late_frozen()
        self._frozen, self._last_token = frame, now
        self._enter(MoveState.FROZEN, now, self._settings.ready_s + 2 * frame.tail_s)
        return self._commit_if_ready(at, now)

    def arrived(self, frame: moves.Arrived, at: StreamPosition | None, now: float) -> list[Action]:
        """Handles Arrived: the target has all pages."""
        if self.state not in (MoveState.COPYING, MoveState.FROZEN):
            return self._answer_late_target(frame.move)
        self._arrived = frame
        return self._commit_if_ready(at, now)

    def warmed(self, why: str, at: StreamPosition | None, now: float) -> list[Action]:
        """Handles the end of the prefix computation at the target, successful or not."""
        if self.state is not MoveState.WARMING:
            return []
        if not self._is_unchanged(at):
            return self._give_up("stream", "ended", "the stream has left its group or ended", now)
        return self._commit("", why, now)

    def refused_by_target(self, code: str, why: str, now: float) -> list[Action]:
        """Handles a move that the target gave up; the target has freed its pages."""
        if self._is_committed or self.state is MoveState.OVER:
            return []
        outcome: Outcome = "refused" if self.state in (MoveState.PREPARING, MoveState.WARMING) else "target"
        return self._give_up(outcome, code, why, now)

    def refused_by_source(self, code: str, why: str, now: float) -> list[Action]:
        """Handles a move that the source gave up; the source continues the request."""
        if self._is_committed:
            return self._end_source()
        if self.state is MoveState.OVER:
            return []
        return self._give_up("source", code, why, now)

    def target_lost(self, why: str, now: float) -> list[Action]:
        """Handles the loss of the target's link or incarnation. After the commit the stream handles it itself."""
        if self.state is MoveState.OVER:
            return []
        if self._is_committed:
            return self._over("moved", "target_lost", why, now)
        return self._give_up("target", "target_lost", why, now)

    def source_lost(self, why: str, now: float) -> list[Action]:
        """Handles the loss of the source's link or incarnation, which before the commit causes a replay."""
        if self.state is MoveState.OVER or self._is_committed:
            return []
        return self._give_up("source", "source_lost", why, now)

    def stream_over(self, why: str, now: float) -> list[Action]:
        """Handles a stream that ended or left its group for another reason."""
        if self.state is MoveState.OVER:
            return []
        if self._is_committed:
            return self._over("moved", "ended", why, now)
        return self._give_up("stream", "ended", why, now)

    def submitted(self, handle: int) -> None:
        """Records the target's handle of the stream after the commit."""
        self._target_handle = handle

    def first_token(self, now: float) -> list[Action]:
        """Handles the delivery of the target's first token."""
        return self._over("moved", "", "the target goes on", now, now - self._last_token) if self._is_awaiting_token else []

    def reported(self, last_handle: int, now: float) -> list[Action]:
        """Handles a load report of the target that covers handles up to `last_handle`."""
        if not self._is_awaiting_token or self._target_handle is None or last_handle < self._target_handle:
            return []
        self.deadline = None
        return []

    def tick(self, now: float) -> list[Action]:
        """Handles an expired deadline."""
        if self.deadline is None or now < self.deadline or self.state is MoveState.OVER:
            return []
        if self._is_awaiting_token:
            why = "the target did not accept the request in time"
            return [TargetLost(self.proposal.at.epoch + 1, why), *self._over("moved", "unheard", why, now)]
        return self._give_up("timeout", self.state.value, f"no answer in state {self.state.value}", now)

    @property
    def _is_awaiting_token(self) -> bool:
        """Whether the move is committed and no token of the target has been delivered."""
        return self.state is MoveState.COMMITTED

    def _commit_if_ready(self, at: StreamPosition | None, now: float) -> list[Action]:
        if self._frozen is None or self._arrived is None:
            return []
        if not self._is_unchanged(at):
            return self._give_up("stream", "ended", "the stream has left its group or ended", now)
        assert at is not None, "`_is_unchanged` returned true"
        if at.num_delivered > self._frozen.num_output:
            return self._give_up("source", "lease", "the source resumed after its lease expired", now)
        return self._commit(self.proposal.move, f"{self._arrived.num_computed} tokens are at the target", now)

    def _is_unchanged(self, at: StreamPosition | None) -> bool:
        """Whether group, handle and epoch still equal those of the proposal: the compare of a compare-and-set."""
        was = self.proposal.at
        return at is not None and (at.key, at.handle, at.epoch) == (was.key, was.handle, was.epoch)

    def _commit(self, move: str, why: str, now: float) -> list[Action]:
        if self._frozen is None:
            self._last_token = now
        self._is_committed = True
        self._enter(MoveState.COMMITTED, now, self._settings.start_s)
        return [Commit(move, why), *self._end_source()]

    def _end_source(self) -> list[Action]:
        return [EndSource(self.proposal.move, self.proposal.at.handle, "the stream runs at the target")]

    def _answer_late_frozen(self) -> list[Action]:
        if self.state is not MoveState.OVER:
            return []  # a repeated Frozen
        return [ToSource(moves.Thaw(self.proposal.move), "the move is over")]

    def _answer_late_target(self, move: str) -> list[Action]:
        """Returns the answer to a target's late frame about a move that was given up."""
        if self.state is not MoveState.OVER or self._is_committed:
            return []
        return [ToTarget(moves.Cancel(move), "the move is over")]

    def _give_up(self, outcome: Outcome, code: str, why: str, now: float) -> list[Action]:
        """Ends the move and reverts it; the source keeps the stream."""
        move = self.proposal.move
        undo: list[Action] = []
        if self.proposal.how != "recompute":
            if self.state in (MoveState.COPYING, MoveState.FROZEN):
                undo.append(ToSource(moves.Thaw(move), why))
            undo.append(ToTarget(moves.Cancel(move), why))
        return undo + self._over(outcome, code, why, now)

    def _over(self, outcome: Outcome, code: str, why: str, now: float, stall_s: float | None = None) -> list[Action]:
        self._enter(MoveState.OVER, now, self._settings.linger_s)
        num_bytes = 0 if self._arrived is None else self._arrived.num_bytes
        return [MoveEnded(move=self.proposal.move, outcome=outcome, code=code, why=why, num_bytes=num_bytes, stall_s=stall_s)]

    def _enter(self, state: MoveState, now: float, at_most_s: float) -> None:
        self.state, self.deadline = state, now + at_most_s
