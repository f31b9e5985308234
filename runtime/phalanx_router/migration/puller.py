"""Executes pulls: a request waits at the router while its group copies pages of its prompt from another group.

Requests of one group that lack the same pages wait for one pull. Each request waits for at most one.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from phalanx_api import moves, wire
from phalanx_api.summary import BalancePolicy
from phalanx_router.balancing.records import PlannedCopy
from phalanx_router.links.holders import HolderLinks
from phalanx_router.links.leader_link import LeaderLink, MoveFrame
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import PullMetrics
from phalanx_router.migration.balance_loop import BalanceLoop
from phalanx_router.migration.warmup import pages_of_whole_images, submit_warmup, warmup_request
from phalanx_router.moves.pull import Pull, PullAction, PullEnded, PullOrder
from phalanx_router.moves.records import DEFAULT_MOVE_SETTINGS, ToSource, ToTarget
from phalanx_router.routing.prefixes import KeySpace
from phalanx_router.routing.pulling import MIN_PULL_TOKENS, KnownPages, NoPull, PullPlan, PullRates, plan_pull
from phalanx_router.routing.view import GroupView
from phalanx_router.session import StreamSession

log = logging.getLogger(__name__)

COPY_TIMEOUT_S = 10.0
"""Of the copy of a hot prefix, for which no request waits."""
PAUSE_S = 10.0
"""Time without pulls from and to a group that failed one."""
StartRequest = Callable[[str, int], None]
"""Starts a request. Arguments: its move, empty without one, and how many of its tokens the group has."""


@dataclass(slots=True, eq=False, kw_only=True)
class _OpenPull:
    pull: Pull
    plan: PullPlan
    waiting: dict[StreamSession, StartRequest]
    """Without `use`, the first one starts on the pages."""
    use: Callable[[str], None] | None = None
    """Starts a request of its own on the pages of this move."""


class Puller:
    """The pulls of one router, on one event loop."""

    def __init__(
        self,
        links: LinkPool,
        balancing: BalanceLoop,
        router: str,
        metrics: PullMetrics,
        clock: Callable[[], float],
        holders: HolderLinks,
    ) -> None:
        """`holders`: groups of other services, which only send pages."""
        self.end_listeners: list[Callable[[PullPlan, PullEnded], None]] = []
        self._links = links
        self._holders = holders
        self._balancing = balancing
        self._metrics = metrics
        self._clock = clock
        self._name = f"{router}:{secrets.token_hex(4)}:pull"
        self._last_number = 0
        self._open: dict[str, _OpenPull] = {}  # by move
        self._by_page: dict[tuple[str, bytes], str] = {}  # moves, by target and key of the last page
        self._rates = PullRates()
        self._paused: dict[str, float] = {}  # end times, by group key
        self._timer: asyncio.TimerHandle | None = None
        links.move_listeners.append(self)
        holders.move_listeners.append(self)
        balancing.start_copy = self.copy

    @property
    def policy(self) -> BalancePolicy:
        """The current policy."""
        return self._balancing.policy

    def start(self, session: StreamSession, link: LeaderLink, on_end: StartRequest) -> bool:
        """Lets a request wait for pages, if a pull to its group pays; `on_end` is called once, unless `cancel` is."""
        if not self._may_pull(session):
            return False
        plan = self._plan(session, link)
        if isinstance(plan, NoPull):
            self._metrics.declined(plan.code)
            return False
        keys = list(session.keys.keys(_space(link))[: plan.num_pages])
        move = self._by_page.get((plan.target, keys[-1]))
        if move is None:
            is_foreign = self._holders.find(plan.holder) is not None
            refusal = self._balancing.start_pull(plan.holder, plan.target, plan.num_bytes, is_foreign=is_foreign)
            if refusal is not None:
                self._metrics.declined(refusal)
                return False
            found = self._add(plan, keys)
        else:
            found = self._open[move]
            self._metrics.joined()
        found.waiting[session] = on_end
        session.moves.open_pull = found.pull.order.move
        session.moves.num_pulls += 1
        log.debug("request waits for pages", extra={"request": session.stream.journal.id, "why": plan.why})
        if move is None:
            self._execute_all(found, found.pull.start(session.stream.journal.replay(), self._clock()))
        return True

    def copy(self, planned: PlannedCopy, session: StreamSession) -> None:
        """Copies the hot prefix of a group, with which the prompt of `session` begins, into the prefix cache of another one."""
        target = self._links.find(planned.target)
        keys, replay = list[bytes](), session.stream.journal.replay()
        if target is not None and target.is_serving:
            num_pages = pages_of_whole_images(replay.images, planned.num_pages, target.group_report.page_size)
            keys = list(session.keys.keys(_space(target))[:num_pages])
        if target is None or not keys or (planned.target, keys[-1]) in self._by_page:
            self._balancing.end_pull(planned.source, planned.target)
            return
        report = target.group_report
        num_tokens = len(keys) * report.page_size
        request = warmup_request(replay, replay.prompt[: num_tokens + 1])
        found = self._add(
            PullPlan(
                holder=planned.source,
                target=planned.target,
                num_pages=len(keys),
                num_tokens=num_tokens,
                num_bytes=len(keys) * report.served.page_bytes,
                compute_s=COPY_TIMEOUT_S,
                copy_s=0.0,
            ),
            keys,
            lambda move: submit_warmup(target, request, move, num_tokens),
        )
        log.debug("prefix is copied", extra={"move": found.pull.order.move, "why": planned.why})
        self._execute_all(found, found.pull.start(request, self._clock()))

    def cancel(self, session: StreamSession) -> None:
        """Ends the wait of a stream that ended. Others that wait for its pull are computed."""
        found = self._open.get(session.moves.open_pull)
        session.moves.open_pull = ""
        if found is None:
            return
        is_first = found.use is None and next(iter(found.waiting)) is session
        del found.waiting[session]
        if is_first:
            self._execute_all(found, found.pull.cancel("the stream ended"))

    def with_pulls(self, view: GroupView) -> GroupView:
        """The view with the requests that wait for pages there."""
        waiting = [session for found in self._open.values() if found.plan.target == view.key for session in found.waiting]
        if not waiting:
            return view
        return view.plus(len(waiting), sum(session.stream.journal.num_tokens for session in waiting))

    # Events

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        """Handles a frame from a leader, if it is of a pull."""
        if isinstance(frame, moves.RescueRequest):
            return
        found = self._open.get(frame.move)
        if found is not None:
            self._execute_all(found, found.pull.receive(link.key, frame, self._clock()))

    def links_changed(self) -> None:
        """Ends the pulls that lost their holder or a serving target."""
        for found in list(self._open.values()):
            order = found.pull.order
            target = self._links.find(order.target)
            if target is None or not target.is_serving:
                self._execute_all(found, found.pull.lost(order.target, "the target is lost or accepts no more requests"))
            elif self._find(order.holder) is None:
                self._execute_all(found, found.pull.lost(order.holder, "the holder is lost"))

    def _tick(self) -> None:
        for found in list(self._open.values()):
            self._execute_all(found, found.pull.tick(self._clock()))

    # Decision

    def _may_pull(self, session: StreamSession) -> bool:
        journal = session.stream.journal
        if not self.policy.pull_prefixes or session.moves.num_pulls or journal.is_alone:
            return False
        needs_all = journal.wants_prompt_logprobs or journal.is_pooled
        return journal.num_prompt > MIN_PULL_TOKENS and not needs_all

    def _plan(self, session: StreamSession, target: LeaderLink) -> PullPlan | NoPull:
        now, journal = self._clock(), session.stream.journal
        self._paused = {key: until for key, until in self._paused.items() if until > now}
        if target.key in self._paused:
            return NoPull("no_holder", "the last pull to this group has just failed")
        foreign = self._holders.open_links()
        links = [*self._links.open_links(), *foreign]
        senders = {link.key: link for link in links if self._can_send(link, target)}
        fleet, candidates = self._links.fleet_view, {**senders, target.key: target}
        known = KnownPages(fleet.hits(session.keys, candidates), fleet.hits_with_disk(session.keys, candidates))
        others = [link for key, link in senders.items() if key in known.in_memory or key in known.with_disk]
        view, *views = fleet.views([target, *(link for link in others if link not in foreign)])
        views += fleet.foreign_views([link for link in others if link in foreign])
        rate = self._rates.rate(self._balancing.copy_bytes_per_s(view), self.policy.budgets.bytes_per_s, now)
        return plan_pull(view, views, known, min(journal.num_tokens, journal.num_prompt + 1), rate)

    def _can_send(self, link: LeaderLink, target: LeaderLink) -> bool:
        return link is not target and link.can_send_prefixes and link.key not in self._paused

    # Actions

    def _add(self, plan: PullPlan, keys: list[bytes], use: Callable[[str], None] | None = None) -> _OpenPull:
        target = self._links.find(plan.target)
        assert target is not None, "the plan is of an open link"
        report, limits = target.group_report, DEFAULT_MOVE_SETTINGS
        self._last_number += 1
        order = PullOrder(
            move=f"{self._name}:{self._last_number}",
            holder=plan.holder,
            target=plan.target,
            keys=keys,
            page_size=report.page_size,
            timeout_s=plan.timeout_s,
            bytes_per_s=self.policy.budgets.bytes_per_s,
            prepare_s=limits.prepare_s + limits.answer_s(report.longest_step_s),
        )
        found = self._open[order.move] = _OpenPull(pull=Pull(order), plan=plan, waiting={}, use=use)
        self._by_page[plan.target, keys[-1]] = order.move
        return found

    def _execute_all(self, found: _OpenPull, actions: Iterable[PullAction]) -> None:
        for action in actions:
            self._execute(found, action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = [one.pull.deadline for one in self._open.values() if one.pull.deadline is not None]
        if deadlines:
            delay_s = max(0.0, min(deadlines) - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _execute(self, found: _OpenPull, action: PullAction) -> None:
        order = found.pull.order
        match action:
            case ToSource(frame):
                self._send(order.holder, frame)
            case ToTarget(frame):
                self._send(order.target, frame)
            case PullEnded():
                self._end(found, action)
            case _:
                assert_never(action)

    def _send(
        self, key: str, frame: wire.Prepare | moves.SendPrefix | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel
    ) -> None:
        link = self._find(key)
        if link is not None:
            link.send_move_frame(frame)

    def _find(self, key: str) -> LeaderLink | None:
        return self._links.find(key) or self._holders.find(key)

    def _end(self, found: _OpenPull, ended: PullEnded) -> None:
        order, plan, now = found.pull.order, found.plan, self._clock()
        del self._open[order.move], self._by_page[order.target, order.keys[-1]]
        self._balancing.end_pull(plan.holder, plan.target)
        if ended.outcome == "pulled":
            self._rates.record(ended.num_bytes, ended.prepare_s, ended.copy_s, now, read_s=plan.read_s)
        elif ended.outcome == "timeout" and ended.code == "copying":
            self._rates.record_timeout(plan, ended.copy_s, now)
        if (failed := _failed_group(plan, ended)) is not None:
            self._paused[failed] = now + PAUSE_S
        self._metrics.ended(ended.outcome, ended.num_tokens, ended.num_bytes, ended.prepare_s + ended.copy_s)
        fields = {"move": order.move, "outcome": ended.outcome, "code": ended.code, "why": ended.why, "plan": plan.why}
        log.info("pull ended", extra=fields)
        for listener in self.end_listeners:
            listener(plan, ended)
        self._start_requests(found, order.move if ended.outcome == "pulled" else "", ended.num_cached)

    def _start_requests(self, found: _OpenPull, move: str, num_cached: int) -> None:
        """Starts the first request with the move; the others find its pages."""
        if found.use is not None:
            if move:
                found.use(move)
            move = ""
        for session, start in list(found.waiting.items()):
            session.moves.open_pull = ""
            start(move, num_cached)
            move = ""


def _space(link: LeaderLink) -> KeySpace:
    return KeySpace(link.group_report.served.page_model, link.group_report.page_size)


def _failed_group(plan: PullPlan, ended: PullEnded) -> str | None:
    """Key of the group that pulls avoid for a while, if one is at fault."""
    if ended.outcome == "holder":
        return None if ended.code == "evicted" else plan.holder
    if ended.outcome == "timeout":
        return plan.target if ended.code == "preparing" else plan.holder
    return plan.holder if ended.outcome == "target" and ended.code != "target_lost" else None
