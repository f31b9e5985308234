"""Executes the actions of `moves.board` on the links and streams of one router.

`move` starts a move. Frames of the two leaders, lost links, the end of the stream and timers then drive it to its end, which
`ended` reports. The stream only changes its group: a move counts neither as a retry nor as a loss.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import assert_never

from phalanx_api import moves, wire
from phalanx_router.links.connection import Sink
from phalanx_router.links.leader_link import LeaderLink, MoveFrame
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import RouterMetrics
from phalanx_router.moves.board import MoveBoard, MoveStep
from phalanx_router.moves.records import (
    Commit,
    EndSource,
    MoveEnded,
    MoveReason,
    MoveRequest,
    MoveSettings,
    StreamPosition,
    TargetLost,
    ToSource,
    ToTarget,
    TransferMode,
    Warm,
)
from phalanx_router.session import FleetSettings, StreamSession

# Sinks of requests during a move


class FirstToken:
    """Forwards all events to `sink` and reports the first token to `began`. Implements `phalanx_router.links.connection.Sink`."""

    def __init__(self, sink: Sink, began: Callable[[int], None]) -> None:
        self.handle = 0
        self._sink = sink
        self._began = began

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Forwards and reports the first token; `began` connects the other sink to the link."""
        self._sink.token(epoch, index, token, detail)
        self._began(self.handle)

    def prompt_details_received(self, told: wire.PromptDetails) -> None:
        """Forwards."""
        self._sink.prompt_details_received(told)

    def cached(self, found: wire.Cached) -> None:
        """Forwards."""
        self._sink.cached(found)

    def finished(self, end: wire.Finished) -> None:
        """Forwards."""
        self._sink.finished(end)

    def refused(self, refused: wire.Refused) -> None:
        """Forwards."""
        self._sink.refused(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """Forwards."""
        self._sink.lost(epoch, why, is_leave, cause)


class PrefixWarmup:
    """Sink of a request that only fills the prefix cache. Implements `phalanx_router.links.connection.Sink`."""

    def __init__(self, computed: Callable[[], None], refused: Callable[[str, str], None]) -> None:
        self._computed = computed
        self._refused = refused

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Discards the token."""

    def prompt_details_received(self, told: wire.PromptDetails) -> None:
        """Discards the details."""

    def cached(self, found: wire.Cached) -> None:
        """Discards the report."""

    def finished(self, end: wire.Finished) -> None:
        """Reports that all tokens are in pages."""
        self._computed()

    def refused(self, refused: wire.Refused) -> None:
        """Reports the refusal."""
        self._refused(refused.code, refused.message)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """Reports the lost group as a refusal."""
        self._refused("target_lost", why)


log = logging.getLogger(__name__)

Ended = Callable[[StreamSession, MoveRequest, MoveEnded], None]
"""Callback at the end of a move."""
AskedRescue = Callable[[LeaderLink, list[StreamSession], float], None]
"""Callback when a group will preempt these streams, in this order, within the given seconds."""


class Mover:
    """The moves of one router, on one event loop. Users append callbacks to `ended` and `asked_rescue`."""

    def __init__(
        self,
        links: LinkPool,
        runs: set[StreamSession],
        settings: FleetSettings,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        bounds: MoveSettings | None = None,
    ) -> None:
        self.board = MoveBoard(bounds)
        self.ended: list[Ended] = []
        self.asked_rescue: list[AskedRescue] = []
        self._links = links
        self._runs = runs
        self._metrics = metrics
        self._clock = clock
        self._name = f"{settings.link.router}:{secrets.token_hex(4)}"
        self._number = 0
        self._moved: dict[str, StreamSession] = {}
        """Stream of each open move."""
        self._warming: dict[str, tuple[LeaderLink, int]] = {}
        self._warmed: dict[str, int] = {}
        """Tokens that the target has computed for its prefix cache, by move."""
        self._timer: asyncio.TimerHandle | None = None
        links.moves = self

    def move(
        self, run: StreamSession, target: str, how: TransferMode, why: MoveReason, bytes_per_s: float | None = None
    ) -> str | None:
        """Starts to move a stream to the group with key `target`. Returns `None`, or why it cannot.

        Pages are transferred only between equal layouts.
        """
        source, link = run.link, self._links.find(target)
        at = self._at(run)
        if source is None or at is None:
            return "no group has the stream"
        if run.move:
            return "the stream is moving already"
        if link is None or link is source or target not in self._links.eligible(run.tokenizer):
            return "the target does not accept this stream: it is unknown, is the source, is not serving or has another tokenizer"
        if link.group_report.served.model_hash != source.group_report.served.model_hash:
            return "the target has a different model"
        if not source.group_report.served.layout or link.group_report.served.layout != source.group_report.served.layout:
            how = "recompute"
        self._number += 1
        proposal = MoveRequest(
            move=f"{self._name}:{self._number}", at=at, target=target, how=how, why=why, bytes_per_s=bytes_per_s
        )
        run.move = proposal.move
        self._moved[proposal.move] = run
        self._execute_all(self.board.start(proposal, run.stream.journal.replay(), self._clock()))
        return None

    # Events

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """Handles a frame from a leader."""
        if isinstance(frame, moves.AskRescue):
            self._rescue(link, frame)
            return
        run = self._moved.get(frame.move)
        self._execute_all(self.board.take(link.key, frame, None if run is None else self._at(run), self._clock()))

    def links_changed(self) -> None:
        """Ends the moves that lost their source or target. Before the commit a target that is not serving counts as lost."""
        now = self._clock()
        for proposal in self.board.open():
            if self._links.find(proposal.at.key) is None:
                self._execute_all(self.board.link_lost(proposal.at.key, "the source is lost", now))
            target = self._links.find(proposal.target)
            if target is None:
                self._execute_all(self.board.link_lost(proposal.target, "the target is lost", now))
            elif not (target.is_serving or self.board.is_committed(proposal.move)):
                self._execute_all(self.board.target_lost(proposal.move, "the target accepts no more requests", now))

    def stream_over(self, run: StreamSession, why: str) -> None:
        """Handles a stream that ended or leaves its group for another reason."""
        if run.move:
            self._execute_all(self.board.stream_over(run.move, why, self._clock()))

    def _at(self, run: StreamSession) -> StreamPosition | None:
        """Returns the location of the stream; `None` if it has ended or its link is lost."""
        journal = run.stream.journal
        if run.link is None or not run.stream.is_running or self._links.find(run.group) is not run.link:
            return None
        return StreamPosition(run.group, run.handle, journal.epoch, len(journal.delivered))

    def _rescue(self, link: LeaderLink, asked: moves.AskRescue) -> None:
        mine = {run.handle: run for run in self._runs if run.link is link}
        runs = [mine[handle] for handle in asked.handles if handle in mine]
        for callback in self.asked_rescue:
            callback(link, runs, asked.within_s)

    def _tick(self) -> None:
        now = self._clock()
        for proposal in self.board.open():
            target = self._links.find(proposal.target)
            if target is not None and target.group_report.load is not None:
                self.board.reported(proposal.target, target.group_report.load.last_handle, now)
        self._execute_all(self.board.tick(now))

    # Actions

    def _execute_all(self, todo: Iterable[MoveStep]) -> None:
        for step in todo:
            self._execute(step)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.board.deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _execute(self, todo: MoveStep) -> None:
        proposal, action = todo.proposal, todo.action
        log.debug("move", extra={"move": proposal.move, "action": type(action).__name__, "why": action.why})
        source, target = self._links.find(proposal.at.key), self._links.find(proposal.target)
        match action:
            case ToSource(frame):
                if source is not None:
                    source.send_move_frame(frame)
            case ToTarget(frame):
                if target is not None:
                    target.send_move_frame(frame)
            case Warm():
                self._warm(proposal, target)
            case Commit(move):
                self._commit(proposal, move, target)
            case EndSource(move, handle):
                if source is not None:
                    source.send_move_frame(moves.Release(move))
                    source.abort(handle)
            case TargetLost(epoch, why):
                if (run := self._moved.get(proposal.move)) is not None:
                    run.stream.lost(epoch, why)
            case MoveEnded():
                self._end(proposal, action)
            case _:
                assert_never(action)

    def _warm(self, proposal: MoveRequest, target: LeaderLink | None) -> None:
        """Submits prompt and output tokens to the target so that its prefix cache contains them at the commit."""
        assert target is not None, "checked by `move`"
        request = self._moved[proposal.move].stream.journal.replay()
        tokens = request.prompt + request.delivered
        ahead = wire.Request(
            id=request.id,
            epoch=0,
            prompt=tokens,
            delivered=[],
            sampling=wire.Sampling(max_tokens=1, seed=0, temperature=0.0),
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )

        def computed() -> None:
            self._warmed[proposal.move] = len(tokens) // target.group_report.page_size * target.group_report.page_size
            self._warming.pop(proposal.move, None)
            run = self._moved.get(proposal.move)
            at = None if run is None else self._at(run)
            self._execute_all(self.board.warmed(proposal.move, f"{len(tokens)} tokens are computed", at, self._clock()))

        def refused(code: str, why: str) -> None:
            self._warming.pop(proposal.move, None)
            self._execute_all(self.board.refused(proposal.move, code, why, self._clock()))

        self._warming[proposal.move] = (target, target.submit(ahead, PrefixWarmup(computed, refused)))

    def _commit(self, proposal: MoveRequest, move: str, target: LeaderLink | None) -> None:
        """Increments the epoch and submits the stream to the target. If the target was just lost, the loss is of the new
        epoch."""
        run = self._moved[proposal.move]
        run.stream.journal.next_epoch()
        epoch = run.stream.journal.epoch
        if target is None:
            run.link, run.group = None, proposal.target
            run.stream.lost(epoch, "the target is lost")
            return

        def began(handle: int) -> None:
            target.set_sink(handle, run.stream)
            self._execute_all(self.board.first_token(proposal.move, self._clock()))

        run.link, run.group = target, proposal.target
        first = FirstToken(run.stream, began)
        request = run.replay(self._clock())
        held = len(request.prompt) + len(request.delivered) if move else self._warmed.get(proposal.move, 0)
        run.handle = first.handle = target.submit(request, first, move, held)
        run.moved += 1
        run.moved_at, run.left = self._clock(), proposal.at.key
        self.board.submitted(proposal.move, run.handle)

    def _end(self, proposal: MoveRequest, over: MoveEnded) -> None:
        run = self._moved.pop(proposal.move)
        run.move = ""
        self._warmed.pop(proposal.move, None)
        ahead = self._warming.pop(proposal.move, None)
        if ahead is not None:
            ahead[0].abort(ahead[1])
        self._metrics.move_over(over.outcome, proposal.why, over.num_bytes, over.stall_s)
        fields = {"move": proposal.move, "outcome": over.outcome, "code": over.code, "why": over.why, "for": proposal.why}
        log.info("move ended", extra=fields)
        for callback in self.ended:
            callback(run, proposal, over)
