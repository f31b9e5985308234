"""The tick of balancing: every 250 ms (`tick_s`) it looks at groups, asks `balance` what to do, and has it done by `moving`.

It also answers an engine that asks for rescue, and follows the policy that the operator tells. What it decides is in `balance`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx_api.summary import BalancePolicy
from phalanx_router.balancing.balancer import Balancer, Decision
from phalanx_router.balancing.guards import OFF_S
from phalanx_router.balancing.records import FOR_BALANCE, Proposal, Refusal, Rung, StreamView
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import Links
from phalanx_router.metrics import BalanceMetrics
from phalanx_router.migration.mover import Moving
from phalanx_router.moves.records import Over, Why
from phalanx_router.moves.records import Proposal as Move
from phalanx_router.routing.prefixes import KeySpace
from phalanx_router.routing.view import GroupView
from phalanx_router.session import FleetSettings, Run

log = logging.getLogger(__name__)

WHY: dict[Rung, Why] = {"rescue": "rescue", "replicate": "hotspot", "migrate": "hotspot", "evacuate": "drain"}
TELLING_BYTES = 1 << 20
"""A copy of fewer bytes tells nothing of how fast copies are."""
FOLLOW = 0.2


@dataclass(slots=True)
class Count:
    """Moves of this router since its start, whoever wanted them."""

    moved: int = 0
    failed: int = 0


class Balancing:
    """One router's balancing. Belongs to one running event loop. `last`: what the last tick found; `ticked` hears of each."""

    def __init__(
        self,
        links: Links,
        runs: set[Run],
        moving: Moving,
        metrics: BalanceMetrics,
        settings: FleetSettings,
        clock: Callable[[], float],
    ) -> None:
        self.balancer = Balancer(holders_of=self._holders_of)
        self.last = Decision()
        self.count = Count()
        self.ticked: list[Callable[[], None]] = []
        self._links = links
        self._runs = runs
        self._moving = moving
        self._metrics = metrics
        self._clock = clock
        self._begun: dict[Run, tuple[Proposal, float]] = {}
        self._bytes_per_s: float | None = None
        self._tick_s = settings.tick_s
        self._follow(settings.policy)
        moving.ended.append(self._move_ended)
        moving.asked_rescue.append(self._rescue)

    @property
    def policy(self) -> BalancePolicy:
        """What is followed now."""
        return self.balancer.policy

    def obey(self, policy: BalancePolicy) -> None:
        """Follows this policy from now on, unless a newer one is known: numbers rise."""
        if policy.number >= self.policy.number and policy != self.policy:
            log.info("policy", extra={"number": policy.number, "mode": policy.mode, "empty": policy.empty})
            self._follow(policy)

    def _follow(self, policy: BalancePolicy) -> None:
        self.balancer.policy = policy
        self._links.outlook.emptied = frozenset(policy.empty)

    def burdened(self, view: GroupView) -> GroupView:
        """How a group looks to newcomers: one that just gave streams away does not look free at once."""
        return self.balancer.guard.burdened(view, self._clock())

    def views(self) -> list[GroupView]:
        """Every group that serves or drains, as it is now."""
        links = [link for link in self._links.all() if link.is_open and (link.is_serving or link.state.draining)]
        views = self._links.outlook.views(links)
        measured = self._bytes_per_s
        return views if measured is None else [replace(view, copy_bytes_per_s=measured) for view in views]

    async def run(self) -> None:
        """Ticks until it is cancelled. A bug costs the ticks that it spoils, and no stream anything."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                self.tick()
            except Exception:
                log.exception("balancing failed")

    def tick(self) -> None:
        """One look at all groups, and what follows from it."""
        found: dict[str, list[Run]] | None = None

        def streams_of(key: str) -> Sequence[StreamView]:
            nonlocal found
            found = found if found is not None else self._by_group()
            return [_view_of(run, by_key.get(key)) for run in found.get(key, [])]

        views = self.views()
        by_key = {view.key: view for view in views}
        self.last = self.balancer.tick(views, streams_of, self._clock())
        named = {str(run.number): run for runs in (found or {}).values() for run in runs}
        for proposal in self.last.proposals:
            self._begin(named[proposal.stream], proposal)
        for refusal in self.last.refusals:
            self._metrics.refused(refusal.rung, refusal.code)
        for transition in self.last.transitions:
            told = {"group": transition.group, "cause": transition.cause, "why": transition.why}
            log.info("hotspot" if transition.cause else "hotspot over", extra=told)
        self._metrics.show(self.last.hotspots, self.last.is_saturated)
        for hear in self.ticked:
            hear()

    def _holders_of(self, prefix: bytes) -> list[str]:
        """Keys of the groups that hold the page of this key."""
        holders = frozenset(self._links.outlook.prefixes.holders(prefix))
        return [link.key for link in self._links.all() if link.endpoint.key in holders]

    def _by_group(self) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = {}
        for run in self._runs:
            if run.link is not None:
                found.setdefault(run.group, []).append(run)
        return found

    def _begin(self, run: Run, proposal: Proposal) -> None:
        log.debug("proposed", extra={"rung": proposal.rung, "way": proposal.way, "why": proposal.why})
        self._begun[run] = proposal, self._clock()
        why_not = self._moving.move(run, proposal.target, proposal.way, WHY[proposal.rung], proposal.bytes_per_s)
        if why_not is None:
            self._metrics.proposed(proposal.rung)
            return
        log.debug("not moved", extra={"why": why_not})
        del self._begun[run]
        self.balancer.ended(proposal, False, self._clock())
        self._metrics.refused(proposal.rung, "router")

    def _rescue(self, link: LeaderLink, runs: list[Run], within_s: float) -> None:
        """Moves what the group of this link would preempt, where another has room; nothing is said where none has."""
        for run in runs:
            found = self.balancer.rescue(link.key, _view_of(run), self.views(), self._clock())
            if isinstance(found, Refusal):
                log.debug("not rescued", extra={"code": found.code, "why": found.why})
                self._metrics.refused(found.rung, found.code)
            else:
                self._begin(run, found)

    def _move_ended(self, run: Run, move: Move, over: Over) -> None:
        is_moved = over.outcome == "moved"
        self.count.moved += is_moved
        self.count.failed += not is_moved
        proposal, began = self._begun.pop(run, (None, 0.0))
        if proposal is None:
            return
        now = self._clock()
        run.balanced += is_moved and proposal.rung in FOR_BALANCE
        if over.num_bytes >= TELLING_BYTES and now > began:
            measured = over.num_bytes / (now - began)
            before = self._bytes_per_s if self._bytes_per_s is not None else measured
            self._bytes_per_s = before + FOLLOW * (measured - before)
        was_off = self.balancer.pingpong.is_off(now)
        if self.balancer.ended(proposal, is_moved, now):
            self._metrics.returned()
            if not was_off and self.balancer.pingpong.is_off(now):
                log.warning("streams go back and forth", extra={"returns": self.balancer.pingpong.total, "off_s": OFF_S})


def _view_of(run: Run, view: GroupView | None = None) -> StreamView:
    """The stream as balancing sees it. `view`: of its group; then it is told whether it begins with the heaviest prefix there."""
    journal = run.stream.journal
    return StreamView(
        str(run.number),
        run.group,
        journal.num_tokens,
        len(journal.delivered),
        run.balanced,
        run.moved_at,
        run.left,
        is_pinned=bool(run.move),
        has_prefix=view is not None and _has_prefix(run, view),
    )


def _has_prefix(run: Run, view: GroupView) -> bool:
    """Whether the prompt begins with the heaviest prefix of its group."""
    place = view.prefix_tokens // view.page_size - 1
    keys = run.keys.keys(KeySpace(view.model_hash, view.page_size)) if view.prefix else ()
    return 0 <= place < len(keys) and keys[place] == view.prefix
