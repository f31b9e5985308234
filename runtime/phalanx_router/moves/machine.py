"""State machine of one move. The router is the commit authority: the source owns the stream before the commit, the target
after.

    PREPARING -> COPYING -> FROZEN -> COMMITTED -> OVER           with pages
    WARMING -----------------------> COMMITTED -> OVER            without pages: the target first computes the prefix

    commit  iff  Frozen and Arrived were received, and the stream is unchanged since the request: same group, handle and epoch,
                 and no delivered token that the source had not computed when it froze

Any other event before the commit gives the move up: Thaw to the source, Cancel to the target. A target lost after the commit
causes a replay. Late and repeated frames have no effect, but a source that resumes after the commit gets another Release.
"""

from enum import Enum

from phalanx_api import moves, wire
from phalanx_router.moves.records import (
    Action,
    Commit,
    CommitNotAccepted,
    EndSource,
    MoveEnded,
    MoveRequest,
    MoveSettings,
    Outcome,
    StreamPosition,
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
    """One move of one stream. `position`: of the stream, absent after its end."""

    def __init__(self, request: MoveRequest, settings: MoveSettings) -> None:
        self.request = request
        self.state = MoveState.NEW
        self.deadline: float | None = None
        self._settings = settings
        self._answer_s = settings.answer_s(request.step_s)
        self._frozen: moves.Frozen | None = None
        self._arrived: moves.Arrived | None = None
        self._is_committed = False
        self._target_handle: int | None = None
        self._last_token_at = 0.0  # of the source

    @property
    def is_committed(self) -> bool:
        """Whether the target has the stream."""
        return self._is_committed

    @property
    def is_over(self) -> bool:
        """Whether the move has ended."""
        return self.state is MoveState.OVER

    def start(self, replay: wire.Request, now: float) -> list[Action]:
        """First actions. `replay`: replay of the journal."""
        request = self.request
        if request.transfer == "recompute":
            self._enter(MoveState.WARMING, now, self._settings.copy_s)
            return [Warm(request.move, f"{request.reason}: recompute")]
        self._enter(MoveState.PREPARING, now, self._settings.prepare_s + self._answer_s)
        return [ToTarget(wire.Prepare(request.move, replay, self._settings.lease_s), f"{request.reason}: {request.transfer}")]

    def prepared(self, frame: moves.Prepared, position: StreamPosition | None, now: float) -> list[Action]:
        """The target has allocated pages."""
        if self.state is not MoveState.PREPARING:
            return self._answer_late_target(frame.move)
        request = self.request
        if not self._is_unchanged(position):
            return self._give_up("stream", "ended", "the stream has left its group or ended", now)
        order = moves.MoveOut(
            move=request.move,
            handle=request.position.handle,
            epoch=request.position.epoch,
            prepared=frame,
            mode="stop" if request.transfer == "stop" else "precopy",
            bytes_per_s=request.bytes_per_s,
            answer_s=self._answer_s,
        )
        self._enter(MoveState.COPYING, now, self._settings.copy_s)
        return [ToSource(order, f"the target has {frame.cached_tokens} tokens cached")]

    def frozen(self, frame: moves.Frozen, position: StreamPosition | None, now: float) -> list[Action]:
        """The source has stopped computing."""
        if self.state is not MoveState.COPYING:
            return self._end_source() if self._is_committed else self._answer_late_source()
        self._frozen, self._last_token_at = frame, now
        self._enter(MoveState.FROZEN, now, self._settings.ready_s + self._answer_s + 2 * frame.tail_s)
        return self._commit_if_ready(position, now)

    def arrived(self, frame: moves.Arrived, position: StreamPosition | None, now: float) -> list[Action]:
        """The target has all pages."""
        if self.state not in (MoveState.COPYING, MoveState.FROZEN):
            return self._answer_late_target(frame.move)
        self._arrived = frame
        return self._commit_if_ready(position, now)

    def warmed(self, why: str, position: StreamPosition | None, now: float) -> list[Action]:
        """The target has computed the prefix."""
        if self.state is not MoveState.WARMING:
            return []
        if not self._is_unchanged(position):
            return self._give_up("stream", "ended", "the stream has left its group or ended", now)
        return self._commit("", why, now)

    def refused_by_target(self, code: str, why: str, now: float) -> list[Action]:
        """The target has given up and freed its pages."""
        if self._is_committed or self.state is MoveState.OVER:
            return []
        outcome: Outcome = "refused" if self.state in (MoveState.PREPARING, MoveState.WARMING) else "target"
        return self._give_up(outcome, code, why, now)

    def refused_by_source(self, code: str, why: str, now: float) -> list[Action]:
        """The source has given up and continues the request."""
        if self._is_committed:
            return self._end_source()
        if self.state is MoveState.OVER:
            return []
        return self._give_up("source", code, why, now)

    def target_lost(self, why: str, now: float) -> list[Action]:
        """The target's link or incarnation is lost."""
        if self.state is MoveState.OVER:
            return []
        if self._is_committed:
            return self._end("moved", "target_lost", why, now)
        return self._give_up("target", "target_lost", why, now)

    def source_lost(self, why: str, now: float) -> list[Action]:
        """The source's link or incarnation is lost."""
        if self.state is MoveState.OVER or self._is_committed:
            return []
        return self._give_up("source", "source_lost", why, now)

    def stream_ended(self, why: str, now: float) -> list[Action]:
        """The stream ended or left its group."""
        if self.state is MoveState.OVER:
            return []
        if self._is_committed:
            return self._end("moved", "ended", why, now)
        return self._give_up("stream", "ended", why, now)

    def submitted(self, handle: int) -> None:
        """Records the target's handle of the committed stream."""
        self._target_handle = handle

    def first_token(self, now: float) -> list[Action]:
        """The target's first token is delivered."""
        if not self._is_awaiting_token:
            return []
        return self._end("moved", "", "the target continues the stream", now, now - self._last_token_at)

    def load_reported(self, last_handle: int) -> None:
        """A load report of the target covers `last_handle`."""
        if self._is_awaiting_token and self._target_handle is not None and last_handle >= self._target_handle:
            self.deadline = None

    def tick(self, now: float) -> list[Action]:
        """Handles an expired deadline."""
        if self.deadline is None or now < self.deadline or self.state is MoveState.OVER:
            return []
        if self._is_awaiting_token:
            why = "the target did not accept the request in time"
            return [CommitNotAccepted(self.request.position.epoch + 1, why), *self._end("moved", "not_accepted", why, now)]
        return self._give_up("timeout", self.state.value, f"no answer in state {self.state.value}", now)

    @property
    def _is_awaiting_token(self) -> bool:
        return self.state is MoveState.COMMITTED

    def _commit_if_ready(self, position: StreamPosition | None, now: float) -> list[Action]:
        if self._frozen is None or self._arrived is None:
            return []
        if not self._is_unchanged(position):
            return self._give_up("stream", "ended", "the stream has left its group or ended", now)
        assert position is not None, "`_is_unchanged` returned true"
        if position.num_delivered > self._frozen.num_output:
            return self._give_up("source", "lease", "the source resumed after its lease expired", now)
        return self._commit(self.request.move, f"{self._arrived.num_computed} tokens are at the target", now)

    def _is_unchanged(self, position: StreamPosition | None) -> bool:
        """Compare-and-set on group, handle and epoch."""
        before = self.request.position
        return position is not None and (position.key, position.handle, position.epoch) == (
            before.key,
            before.handle,
            before.epoch,
        )

    def _commit(self, move: str, why: str, now: float) -> list[Action]:
        if self._frozen is None:
            self._last_token_at = now
        self._is_committed = True
        self._enter(MoveState.COMMITTED, now, self._settings.start_s + self._answer_s)
        return [Commit(move, why), *self._end_source()]

    def _end_source(self) -> list[Action]:
        return [EndSource(self.request.move, self.request.position.handle, "the stream runs at the target")]

    def _answer_late_source(self) -> list[Action]:
        if self.state is not MoveState.OVER:
            return []  # a repeated Frozen
        return [ToSource(moves.Thaw(self.request.move), "the move is over")]

    def _answer_late_target(self, move: str) -> list[Action]:
        if self.state is not MoveState.OVER or self._is_committed:
            return []
        return [ToTarget(moves.Cancel(move), "the move is over")]

    def _give_up(self, outcome: Outcome, code: str, why: str, now: float) -> list[Action]:
        """Ends and reverts the move; the source keeps the stream."""
        move = self.request.move
        undo: list[Action] = []
        if self.request.transfer != "recompute":
            if self.state in (MoveState.COPYING, MoveState.FROZEN):
                undo.append(ToSource(moves.Thaw(move), why))
            undo.append(ToTarget(moves.Cancel(move), why))
        return undo + self._end(outcome, code, why, now)

    def _end(self, outcome: Outcome, code: str, why: str, now: float, stall_s: float | None = None) -> list[Action]:
        self._enter(MoveState.OVER, now, self._settings.linger_s)
        num_bytes = 0 if self._arrived is None else self._arrived.num_bytes
        return [MoveEnded(move=self.request.move, outcome=outcome, code=code, why=why, num_bytes=num_bytes, stall_s=stall_s)]

    def _enter(self, state: MoveState, now: float, timeout_s: float) -> None:
        self.state, self.deadline = state, now + timeout_s
