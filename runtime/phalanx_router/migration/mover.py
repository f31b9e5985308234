"""Executes the actions of `moves.board` on the links and streams of one router.

A move counts neither as a replay nor as a loss of the stream.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import assert_never

from phalanx_api import moves, wire
from phalanx_frontend.tracing.span import Value
from phalanx_router.decisions import DecisionRecorder
from phalanx_router.links.connection import Sink
from phalanx_router.links.leader_link import LeaderLink, MoveFrame
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import RouterMetrics
from phalanx_router.migration.warmup import Warmups
from phalanx_router.moves.board import MoveBoard, MoveStep
from phalanx_router.moves.records import (
    DEFAULT_MOVE_SETTINGS,
    Commit,
    CommitNotAccepted,
    EndSource,
    MoveEnded,
    MoveReason,
    MoveRequest,
    MoveSettings,
    StreamPosition,
    ToSource,
    ToTarget,
    TransferMode,
    Warm,
)
from phalanx_router.session import StreamSession

log = logging.getLogger(__name__)

MoveEndListener = Callable[[StreamSession, MoveRequest, MoveEnded], None]
RescueListener = Callable[[LeaderLink, list[StreamSession], float], None]
"""A group will preempt these streams, in this order, within the given seconds."""


class _FirstTokenSink:
    """Forwards frames to `sink` and reports the first token to `on_token`, which then connects `sink` to the link."""

    def __init__(self, sink: Sink, on_token: Callable[[int], None]) -> None:
        self.handle = 0
        self._sink = sink
        self._on_token = on_token

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        self._sink.token(epoch, index, token, detail)
        self._on_token(self.handle)

    def prompt_details(self, details: wire.PromptDetails) -> None:
        self._sink.prompt_details(details)

    def cached(self, frame: wire.Cached) -> None:
        self._sink.cached(frame)

    def finished(self, end: wire.Finished) -> None:
        self._sink.finished(end)

    def refused(self, refused: wire.Refused) -> None:
        self._sink.refused(refused)

    def lost(self, epoch: int, why: str, is_drain: bool = False, cause: wire.EndCause = "") -> None:
        self._sink.lost(epoch, why, is_drain, cause)


class Mover:
    """The moves of one router, on one event loop."""

    def __init__(
        self,
        links: LinkPool,
        sessions: Collection[StreamSession],
        router: str,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        decisions: DecisionRecorder,
        settings: MoveSettings = DEFAULT_MOVE_SETTINGS,
    ) -> None:
        self.board = MoveBoard(settings)
        self.end_listeners: list[MoveEndListener] = []
        self.rescue_listeners: list[RescueListener] = []
        self._links = links
        self._sessions = sessions
        self._metrics = metrics
        self._clock = clock
        self._decisions = decisions
        self._name = f"{router}:{secrets.token_hex(4)}"
        self._last_number = 0
        self._moving: dict[str, StreamSession] = {}  # by open move
        self._warmups = Warmups(self._warmed, self._warmup_refused)
        self._timer: asyncio.TimerHandle | None = None
        links.move_listeners.append(self)

    def move(
        self,
        session: StreamSession,
        target: str,
        transfer: TransferMode,
        reason: MoveReason,
        bytes_per_s: float | None = None,
    ) -> str | None:
        """Starts a move to group `target`. Returns why it cannot. Pages move only between equal layouts."""
        position, link = self._position(session), self._links.find(target)
        if session.assignment is None or position is None:
            return "no group has the stream"
        source = session.assignment.link
        if session.moves.open_move:
            return "the stream is moving already"
        if session.stream.journal.is_pooled:
            return "an embedding is not moved"
        if session.stream.journal.is_alone:  # the target would compute it in steps with others before the commit
            return "a request that runs alone is not moved: groups died under it"
        accepting = self._links.eligible(session.tokenizer, adapter=session.stream.journal.adapter)
        if link is None or link is source or target not in accepting:
            why = "it is unknown, is the source, is not serving, has another tokenizer or lacks the adapter"
            return f"the target does not accept this stream: {why}"
        if link.group_report.served.model_hash != source.group_report.served.model_hash:
            return "the target has a different model"
        if not source.group_report.served.layout or link.group_report.served.layout != source.group_report.served.layout:
            transfer = "recompute"
        self._last_number += 1
        request = MoveRequest(
            move=f"{self._name}:{self._last_number}",
            position=position,
            target=target,
            transfer=transfer,
            reason=reason,
            bytes_per_s=bytes_per_s,
            step_s=max(source.group_report.longest_step_s, link.group_report.longest_step_s),
        )
        session.moves.open_move = request.move
        session.stream.trace.move_started(link.endpoint.group)
        self._moving[request.move] = session
        self._decisions.move_started(request)
        self._execute_all(self.board.start(request, session.stream.journal.replay(), self._clock()))
        return None

    # Events

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """Handles a frame from a leader."""
        if isinstance(frame, moves.RescueRequest):
            self._request_rescue(link, frame)
            return
        position = self._moving_position(frame.move)
        self._execute_all(self.board.receive(link.key, frame, position, self._clock()))

    def links_changed(self) -> None:
        """Ends the moves that lost their source or, before the commit, a serving target."""
        now = self._clock()
        for request in self.board.open():
            source = request.position.key
            if self._links.find(source) is None:
                self._execute_all(self.board.link_lost(source, "the source is lost", now))
            target = self._links.find(request.target)
            if target is None:
                self._execute_all(self.board.link_lost(request.target, "the target is lost", now))
            elif not (target.is_serving or self.board.is_committed(request.move)):
                self._execute_all(self.board.target_lost(request.move, "the target accepts no more requests", now))

    def stream_ended(self, session: StreamSession, why: str) -> None:
        """Handles a stream that ended or leaves its group."""
        if session.moves.open_move:
            self._execute_all(self.board.stream_ended(session.moves.open_move, why, self._clock()))

    def _position(self, session: StreamSession) -> StreamPosition | None:
        """Location of the stream, while a group runs it."""
        journal, assignment = session.stream.journal, session.assignment
        if assignment is None or not session.stream.is_running or self._links.find(assignment.key) is not assignment.link:
            return None
        return StreamPosition(assignment.key, assignment.handle, journal.epoch, len(journal.delivered))

    def _moving_position(self, move: str) -> StreamPosition | None:
        session = self._moving.get(move)
        return None if session is None else self._position(session)

    def _request_rescue(self, link: LeaderLink, request: moves.RescueRequest) -> None:
        by_handle = {
            session.assignment.handle: session
            for session in self._sessions
            if session.assignment is not None and session.assignment.link is link
        }
        sessions = [by_handle[handle] for handle in request.handles if handle in by_handle]
        for listener in self.rescue_listeners:
            listener(link, sessions, request.within_s)

    def _warmed(self, move: str, why: str) -> None:
        self._execute_all(self.board.warmed(move, why, self._moving_position(move), self._clock()))

    def _warmup_refused(self, move: str, code: str, why: str) -> None:
        self._execute_all(self.board.refused(move, code, why, self._clock()))

    def _tick(self) -> None:
        for request in self.board.open():
            target = self._links.find(request.target)
            if target is not None and target.group_report.load is not None:
                self.board.load_reported(request.target, target.group_report.load.last_handle)
        self._execute_all(self.board.tick(self._clock()))

    # Actions

    def _execute_all(self, steps: Iterable[MoveStep]) -> None:
        for step in steps:
            self._execute(step)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.board.deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _execute(self, step: MoveStep) -> None:
        request, action = step.request, step.action
        log.debug("move", extra={"move": request.move, "action": type(action).__name__, "why": action.why})
        source, target = self._links.find(request.position.key), self._links.find(request.target)
        match action:
            case ToSource(frame):
                if source is not None:
                    source.send_move_frame(frame)
            case ToTarget(frame):
                if target is not None:
                    target.send_move_frame(frame)
            case Warm():
                assert target is not None, "checked by `move`"
                self._warmups.start(request.move, self._moving[request.move].stream.journal.replay(), target)
            case Commit(move):
                self._commit(request, move, target)
            case EndSource(move, handle):
                if source is not None:
                    source.send_move_frame(moves.Release(move))
                    source.abort(handle)
            case CommitNotAccepted(epoch, why):
                if (session := self._moving.get(request.move)) is not None:
                    session.stream.lost(epoch, why, cause="outside")  # no sign that the target died
            case MoveEnded():
                self._end(request, action)
            case _:
                assert_never(action)

    def _commit(self, request: MoveRequest, move: str, target: LeaderLink | None) -> None:
        """Submits the stream to the target in a new epoch; a lost target is a loss of that epoch."""
        session = self._moving[request.move]
        session.stream.journal.next_epoch()
        if target is None:
            session.assignment, session.last_key = None, request.target
            session.stream.lost(session.stream.journal.epoch, "the target is lost", cause="outside")  # before the request
            return

        def on_token(handle: int) -> None:
            target.set_sink(handle, session.stream)
            self._execute_all(self.board.first_token(request.move, self._clock()))

        sink = _FirstTokenSink(session.stream, on_token)
        replay = session.replay(self._clock())
        hit_tokens = len(replay.prompt) + len(replay.delivered) if move else self._warmups.cached_tokens(request.move)
        sink.handle = target.submit(replay, sink, move, hit_tokens)
        session.assign(target, request.target, sink.handle)
        session.stream.trace.moved(target.endpoint.group, replay.epoch, len(replay.delivered))
        session.moves.num_completed += 1
        session.moves.last_at, session.moves.last_source = self._clock(), request.position.key
        self.board.submitted(request.move, sink.handle)

    def _end(self, request: MoveRequest, ended: MoveEnded) -> None:
        session = self._moving.pop(request.move)
        session.moves.open_move = ""
        self._warmups.end(request.move)
        self._metrics.move_ended(ended.outcome, request.reason, ended.num_bytes, ended.stall_s)
        fields = {"move": request.move, "outcome": ended.outcome, "code": ended.code, "why": ended.why, "for": request.reason}
        session.stream.trace.move_ended(_attributes(request, ended), "" if ended.outcome == "moved" else ended.why)
        log.info("move ended", extra=fields | session.stream.trace.log_fields)
        self._decisions.move_ended(request, ended, session.stream.journal.id)
        for listener in self.end_listeners:
            listener(session, request, ended)


def _attributes(request: MoveRequest, ended: MoveEnded) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "phalanx.move": request.move,
        "phalanx.why": request.reason,
        "phalanx.transfer": request.transfer,
        "phalanx.target": request.target,
        "phalanx.outcome": ended.outcome,
        "phalanx.bytes": ended.num_bytes,
    }
    return attributes if ended.stall_s is None else attributes | {"phalanx.stall_s": ended.stall_s}
