"""The balance loop: every `tick_s` it builds the group views, runs `Balancer.tick` and starts the planned moves with `Mover`.

It also handles rescue requests of engines and stores the policy that the operator sends.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx_api.summary import BalancePolicy
from phalanx_router.balancing.balancer import BalanceDecision, Balancer
from phalanx_router.balancing.guards import OFF_S
from phalanx_router.balancing.records import OPTIONAL_RUNGS, NoMove, PlannedMove, Rung, StreamView
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import BalanceMetrics
from phalanx_router.migration.mover import Mover
from phalanx_router.moves.records import MoveEnded, MoveReason, MoveRequest
from phalanx_router.routing.prefixes import KeySpace
from phalanx_router.routing.view import GroupView
from phalanx_router.session import FleetSettings, StreamSession

log = logging.getLogger(__name__)

MOVE_REASONS: dict[Rung, MoveReason] = {"rescue": "rescue", "replicate": "hotspot", "migrate": "hotspot", "evacuate": "drain"}
MIN_MEASURED_BYTES = 1 << 20
"""Copies below this size are ignored in the bandwidth measurement."""
BANDWIDTH_SMOOTHING = 0.2


@dataclass(slots=True)
class MoveCounts:
    """Ended moves of this router since its start, for any reason."""

    moved: int = 0
    failed: int = 0


class BalanceLoop:
    """One router's balancing, on one event loop. `last`: result of the last tick. `ticked`: callbacks after each tick."""

    def __init__(
        self,
        links: LinkPool,
        runs: set[StreamSession],
        moving: Mover,
        metrics: BalanceMetrics,
        settings: FleetSettings,
        clock: Callable[[], float],
    ) -> None:
        self.balancer = Balancer(holders_of=self._holders_of)
        self.last = BalanceDecision()
        self.count = MoveCounts()
        self.ticked: list[Callable[[], None]] = []
        self._links = links
        self._runs = runs
        self._moving = moving
        self._metrics = metrics
        self._clock = clock
        self._begun: dict[StreamSession, tuple[PlannedMove, float]] = {}
        self._bytes_per_s: float | None = None
        self._tick_s = settings.tick_s
        self._follow(settings.policy)
        moving.ended.append(self._move_ended)
        moving.asked_rescue.append(self._rescue)

    @property
    def policy(self) -> BalancePolicy:
        """The current policy."""
        return self.balancer.policy

    def set_policy(self, policy: BalancePolicy) -> None:
        """Stores a policy unless the current one has a higher number."""
        if policy.number >= self.policy.number and policy != self.policy:
            log.info("policy", extra={"number": policy.number, "mode": policy.mode, "empty": policy.empty})
            self._follow(policy)

    def _follow(self, policy: BalancePolicy) -> None:
        self.balancer.policy = policy
        self._links.fleet_view.emptied = frozenset(policy.empty)

    def with_departed_load(self, view: GroupView) -> GroupView:
        """Returns the view that routing should use: a group that just gave streams away does not look free immediately."""
        return self.balancer.guard.with_departed_load(view, self._clock())

    def views(self) -> list[GroupView]:
        """Returns a view of every group that serves or drains."""
        links = [link for link in self._links.all() if link.is_open and (link.is_serving or link.state.draining)]
        views = self._links.fleet_view.views(links)
        measured = self._bytes_per_s
        return views if measured is None else [replace(view, copy_bytes_per_s=measured) for view in views]

    async def run(self) -> None:
        """Ticks until cancelled. An exception in a tick is logged and affects no stream."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                self.tick()
            except Exception:
                log.exception("balancing failed")

    def tick(self) -> None:
        """Runs one tick and starts its moves."""
        found: dict[str, list[StreamSession]] | None = None

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
            fields = {"group": transition.group, "cause": transition.cause, "why": transition.why}
            log.info("hotspot" if transition.cause else "hotspot over", extra=fields)
        self._metrics.show(self.last.hotspots, self.last.is_saturated)
        for callback in self.ticked:
            callback()

    def _holders_of(self, prefix: bytes) -> list[str]:
        """Returns the keys of the groups that hold the page with key `prefix`."""
        holders = frozenset(self._links.fleet_view.prefixes.holders(prefix))
        return [link.key for link in self._links.all() if link.endpoint.key in holders]

    def _by_group(self) -> dict[str, list[StreamSession]]:
        found: dict[str, list[StreamSession]] = {}
        for run in self._runs:
            if run.link is not None:
                found.setdefault(run.group, []).append(run)
        return found

    def _begin(self, run: StreamSession, proposal: PlannedMove) -> None:
        log.debug("proposed", extra={"rung": proposal.rung, "way": proposal.way, "why": proposal.why})
        self._begun[run] = proposal, self._clock()
        why_not = self._moving.move(run, proposal.target, proposal.way, MOVE_REASONS[proposal.rung], proposal.bytes_per_s)
        if why_not is None:
            self._metrics.proposed(proposal.rung)
            return
        log.debug("not moved", extra={"why": why_not})
        del self._begun[run]
        self.balancer.ended(proposal, False, self._clock())
        self._metrics.refused(proposal.rung, "router")

    def _rescue(self, link: LeaderLink, runs: list[StreamSession], within_s: float) -> None:
        """Moves the streams that the group of `link` is about to preempt, as far as other groups have room."""
        for run in runs:
            found = self.balancer.rescue(link.key, _view_of(run), self.views(), self._clock())
            if isinstance(found, NoMove):
                log.debug("not rescued", extra={"code": found.code, "why": found.why})
                self._metrics.refused(found.rung, found.code)
            else:
                self._begin(run, found)

    def _move_ended(self, run: StreamSession, move: MoveRequest, over: MoveEnded) -> None:
        is_moved = over.outcome == "moved"
        self.count.moved += is_moved
        self.count.failed += not is_moved
        proposal, began = self._begun.pop(run, (None, 0.0))
        if proposal is None:
            return
        now = self._clock()
        run.balanced += is_moved and proposal.rung in OPTIONAL_RUNGS
        if over.num_bytes >= MIN_MEASURED_BYTES and now > began:
            measured = over.num_bytes / (now - began)
            before = self._bytes_per_s if self._bytes_per_s is not None else measured
            self._bytes_per_s = before + BANDWIDTH_SMOOTHING * (measured - before)
        was_off = self.balancer.pingpong.is_off(now)
        if self.balancer.ended(proposal, is_moved, now):
            self._metrics.returned()
            if not was_off and self.balancer.pingpong.is_off(now):
                log.warning(
                    "balancing moves paused: streams returned to groups that they had just left",
                    extra={"returns": self.balancer.pingpong.total, "off_s": OFF_S},
                )


def _view_of(run: StreamSession, view: GroupView | None = None) -> StreamView:
    """Returns the stream as balancing sees it. Without `view`, the view of its group, `has_prefix` is false."""
    journal = run.stream.journal
    return StreamView(
        stream=str(run.number),
        key=run.group,
        context=journal.num_tokens,
        generated=len(journal.delivered),
        moves=run.balanced,
        moved_s=run.moved_at,
        left=run.left,
        is_pinned=bool(run.move),
        has_prefix=view is not None and _has_prefix(run, view),
    )


def _has_prefix(run: StreamSession, view: GroupView) -> bool:
    """Whether the prompt begins with the heaviest prefix of its group."""
    place = view.prefix_tokens // view.page_size - 1
    keys = run.keys.keys(KeySpace(view.model_hash, view.page_size)) if view.prefix else ()
    return 0 <= place < len(keys) and keys[place] == view.prefix
