"""Moves streams from group to group: carries out what `moves.board` decides, on the links and the streams of one router.

`move` begins one. From then on frames of the two leaders, lost links, the end of the stream and time lead it to its end, which
`ended` hears. The stream itself notices nothing: no setback, no loss; its tokens come from another group.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import assert_never

from phalanx_api import moves, wire
from phalanx_router.links.connection import Sink
from phalanx_router.links.leader_link import LeaderLink, MoveFrame
from phalanx_router.links.link_pool import Links
from phalanx_router.metrics import RouterMetrics
from phalanx_router.moves.board import Board, Todo
from phalanx_router.moves.records import (
    Commit,
    EndSource,
    How,
    MoveSettings,
    Over,
    Proposal,
    StreamAt,
    ToSource,
    ToTarget,
    Unheard,
    Warm,
    Why,
)
from phalanx_router.session import FleetSettings, Run

# Who hears of a request during a move: the stream with an ear for its first token, and nobody's request that warms a cache.


class FirstToken:
    """Gives all to another sink, and says once that the first token came. Implements `phalanx_router.links.connection.Sink`."""

    def __init__(self, sink: Sink, began: Callable[[int], None]) -> None:
        self.handle = 0
        self._sink = sink
        self._began = began

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """The first token; after it the other sink hears by itself."""
        self._sink.token(epoch, index, token, detail)
        self._began(self.handle)

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """For the other sink."""
        self._sink.prompt_told(told)

    def cached(self, found: wire.Cached) -> None:
        """For the other sink."""
        self._sink.cached(found)

    def finished(self, end: wire.Finished) -> None:
        """For the other sink."""
        self._sink.finished(end)

    def refused(self, refused: wire.Refused) -> None:
        """For the other sink."""
        self._sink.refused(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """For the other sink."""
        self._sink.lost(epoch, why, is_leave, cause)


class Warming:
    """Hears of a request that is computed for the prefix cache alone. Implements `phalanx_router.links.connection.Sink`."""

    def __init__(self, computed: Callable[[], None], refused: Callable[[str, str], None]) -> None:
        self._computed = computed
        self._refused = refused

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Nobody wants it."""

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """Nobody asked."""

    def cached(self, found: wire.Cached) -> None:
        """Nobody asked."""

    def finished(self, end: wire.Finished) -> None:
        """All of it is in pages."""
        self._computed()

    def refused(self, refused: wire.Refused) -> None:
        """The group does not compute it."""
        self._refused(refused.code, refused.message)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The group is lost."""
        self._refused("target_lost", why)


log = logging.getLogger(__name__)

Ended = Callable[[Run, Proposal, Over], None]
"""Hears how a move ended."""
AskedRescue = Callable[[LeaderLink, list[Run], float], None]
"""Hears that a group will preempt these streams of this router, the first one first, within so many seconds."""


class Moving:
    """The moves of one router. Belongs to one running event loop. Who decides on moves adds to `ended` and `asked_rescue`."""

    def __init__(
        self,
        links: Links,
        runs: set[Run],
        settings: FleetSettings,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        bounds: MoveSettings | None = None,
    ) -> None:
        self.board = Board(bounds)
        self.ended: list[Ended] = []
        self.asked_rescue: list[AskedRescue] = []
        self._links = links
        self._runs = runs
        self._metrics = metrics
        self._clock = clock
        self._name = f"{settings.link.router}:{secrets.token_hex(4)}"
        self._number = 0
        self._moved: dict[str, Run] = {}
        """The stream of each move that is not over."""
        self._warming: dict[str, tuple[LeaderLink, int]] = {}
        self._warmed: dict[str, int] = {}
        """Tokens that the target computed ahead."""
        self._timer: asyncio.TimerHandle | None = None
        links.moves = self

    def move(self, run: Run, target: str, how: How, why: Why, bytes_per_s: float | None = None) -> str | None:
        """Begins to move a stream to the group of this key; or why that cannot be. Pages go only to an equal layout."""
        source, link = run.link, self._links.find(target)
        at = self._at(run)
        if source is None or at is None:
            return "no group has the stream"
        if run.move:
            return "the stream is moving"
        if link is None or link is source or target not in self._links.eligible(run.tokenizer):
            return "the target takes no requests of this stream"
        if link.told.served.model_hash != source.told.served.model_hash:
            return "the target has another model"
        if not source.told.served.layout or link.told.served.layout != source.told.served.layout:
            how = "recompute"
        self._number += 1
        proposal = Proposal(f"{self._name}:{self._number}", at, target, how, why, bytes_per_s)
        run.move = proposal.move
        self._moved[proposal.move] = run
        self._carry_out(self.board.start(proposal, run.stream.journal.replay(), self._clock()))
        return None

    # What happens

    def told(self, link: LeaderLink, frame: MoveFrame) -> None:
        """A frame of a leader."""
        if isinstance(frame, moves.AskRescue):
            self._rescue(link, frame)
            return
        run = self._moved.get(frame.move)
        self._carry_out(self.board.take(link.key, frame, None if run is None else self._at(run), self._clock()))

    def links_changed(self) -> None:
        """Ends the moves whose source or target is lost. Before the commit one that takes no requests counts as lost."""
        now = self._clock()
        for proposal in self.board.open():
            if self._links.find(proposal.at.key) is None:
                self._carry_out(self.board.link_lost(proposal.at.key, "the source is lost", now))
            target = self._links.find(proposal.target)
            if target is None:
                self._carry_out(self.board.link_lost(proposal.target, "the target is lost", now))
            elif not (target.is_serving or self.board.is_committed(proposal.move)):
                self._carry_out(self.board.target_lost(proposal.move, "the target takes no requests any more", now))

    def stream_over(self, run: Run, why: str) -> None:
        """The stream ended, or leaves its group for another reason."""
        if run.move:
            self._carry_out(self.board.stream_over(run.move, why, self._clock()))

    def _at(self, run: Run) -> StreamAt | None:
        """Where the stream is; None when it has ended, or its group is lost and it does not know yet."""
        journal = run.stream.journal
        if run.link is None or not run.stream.goes_on or self._links.find(run.group) is not run.link:
            return None
        return StreamAt(run.group, run.handle, journal.epoch, len(journal.delivered))

    def _rescue(self, link: LeaderLink, asked: moves.AskRescue) -> None:
        mine = {run.handle: run for run in self._runs if run.link is link}
        runs = [mine[handle] for handle in asked.handles if handle in mine]
        for hear in self.asked_rescue:
            hear(link, runs, asked.within_s)

    def _tick(self) -> None:
        now = self._clock()
        for proposal in self.board.open():
            target = self._links.find(proposal.target)
            if target is not None and target.told.load is not None:
                self.board.reported(proposal.target, target.told.load.last_handle, now)
        self._carry_out(self.board.tick(now))

    # What is done

    def _carry_out(self, todo: Iterable[Todo]) -> None:
        for one in todo:
            self._do(one)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.board.deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _do(self, todo: Todo) -> None:
        proposal, action = todo.proposal, todo.action
        log.debug("move", extra={"move": proposal.move, "action": type(action).__name__, "why": action.why})
        source, target = self._links.find(proposal.at.key), self._links.find(proposal.target)
        match action:
            case ToSource(frame):
                if source is not None:
                    source.tell(frame)
            case ToTarget(frame):
                if target is not None:
                    target.tell(frame)
            case Warm():
                self._warm(proposal, target)
            case Commit(move):
                self._commit(proposal, move, target)
            case EndSource(move, handle):
                if source is not None:
                    source.tell(moves.Release(move))
                    source.abort(handle)
            case Unheard(epoch, why):
                if (run := self._moved.get(proposal.move)) is not None:
                    run.stream.lost(epoch, why)
            case Over():
                self._end(proposal, action)
            case _:
                assert_never(action)

    def _warm(self, proposal: Proposal, target: LeaderLink | None) -> None:
        """Lets the target compute prompt and tokens so far for nobody, so that its prefix cache has them at the commit."""
        assert target is not None, "looked at by `move`"
        request = self._moved[proposal.move].stream.journal.replay()
        tokens = request.prompt + request.delivered
        ahead = wire.Request(
            request.id,
            0,
            tokens,
            [],
            wire.Sampling(max_tokens=1, seed=0, temperature=0.0),
            request.priority,
            request.tenant,
            request.cache_salt,
        )

        def computed() -> None:
            self._warmed[proposal.move] = len(tokens) // target.told.page_size * target.told.page_size
            self._warming.pop(proposal.move, None)
            run = self._moved.get(proposal.move)
            at = None if run is None else self._at(run)
            self._carry_out(self.board.warmed(proposal.move, f"{len(tokens)} tokens are computed", at, self._clock()))

        def refused(code: str, why: str) -> None:
            self._warming.pop(proposal.move, None)
            self._carry_out(self.board.refused(proposal.move, code, why, self._clock()))

        self._warming[proposal.move] = (target, target.submit(ahead, Warming(computed, refused)))

    def _commit(self, proposal: Proposal, move: str, target: LeaderLink | None) -> None:
        """The epoch rises, and the target has the stream. A target lost in this very moment is a loss of the new epoch."""
        run = self._moved[proposal.move]
        run.stream.journal.next_epoch()
        epoch = run.stream.journal.epoch
        if target is None:
            run.link, run.group = None, proposal.target
            run.stream.lost(epoch, "the target is lost")
            return

        def began(handle: int) -> None:
            target.hear(handle, run.stream)
            self._carry_out(self.board.first_token(proposal.move, self._clock()))

        run.link, run.group = target, proposal.target
        first = FirstToken(run.stream, began)
        request = run.replay(self._clock())
        held = len(request.prompt) + len(request.delivered) if move else self._warmed.get(proposal.move, 0)
        run.handle = first.handle = target.submit(request, first, move, held)
        run.moved += 1
        run.moved_at, run.left = self._clock(), proposal.at.key
        self.board.submitted(proposal.move, run.handle)

    def _end(self, proposal: Proposal, over: Over) -> None:
        run = self._moved.pop(proposal.move)
        run.move = ""
        self._warmed.pop(proposal.move, None)
        ahead = self._warming.pop(proposal.move, None)
        if ahead is not None:
            ahead[0].abort(ahead[1])
        self._metrics.move_over(over.outcome, proposal.why, over.num_bytes, over.stall_s)
        told = {"move": proposal.move, "outcome": over.outcome, "code": over.code, "why": over.why, "for": proposal.why}
        log.info("move ended", extra=told)
        for hear in self.ended:
            hear(run, proposal, over)
