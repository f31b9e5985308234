"""Decides one router's balancing on each tick: hotspots, moves within budgets, guards, shedding."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from phalanx_api.summary import BalancePolicy, Hotspot
from phalanx_router.balancing.budget import MoveBudget
from phalanx_router.balancing.guards import AttractionGuard, PingPongGuard
from phalanx_router.balancing.hotspots import HotGroup, HotspotBook, HotspotTargets, Transition
from phalanx_router.balancing.ladder import (
    PREFIX_COPY_INTERVAL_S,
    LadderInputs,
    LadderPlan,
    can_moves_relieve,
    evacuate,
    migrate,
    replicate,
    rescue,
    restrict_to_mode,
    select_action,
)
from phalanx_router.balancing.projection import MovesInProgress
from phalanx_router.balancing.records import NoMove, PlannedMove, RefusalCode, StreamView
from phalanx_router.routing.view import GroupView

# Shedding starts when the fleet is saturated and even its best group has missed the TTFT target for `PATIENCE_S`. Each further
# second adds one priority band, the lowest first. Streams that have started are never shed.

PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse the waiting requests of the lowest `bands` priority bands, with `retry_after_s` in the response."""

    bands: int
    retry_after_s: float
    why: str


class SheddingTimer:
    """Measures for how long shedding has been due."""

    def __init__(self) -> None:
        self._since: float | None = None

    def decide(self, is_saturated: bool, best_ttft_s: float | None, target_s: float | None, now: float) -> Shed | None:
        """Returns what to refuse now. `best_ttft_s`: predicted for a new request at the best group; `None` without a group."""
        is_due = is_saturated and best_ttft_s is not None and target_s is not None and best_ttft_s > target_s
        if not is_due or best_ttft_s is None or target_s is None:
            self._since = None
            return None
        self._since = self._since if self._since is not None else now
        bands = int((now - self._since) / PATIENCE_S)
        if not bands:
            return None
        why = f"every group is loaded: the best one predicts a TTFT of {best_ttft_s:.1f} s, the target is {target_s:.1f} s"
        return Shed(bands, max(1.0, best_ttft_s - target_s), why)


StreamsOf = Callable[[str], Sequence[StreamView]]
"""Returns this router's streams in the group with a key. Called for hotspots and groups to be emptied only."""
HoldersOf = Callable[[bytes], Collection[str]]
"""Returns the keys of the groups that hold the page with a key. Called for prefix hotspots only."""


def _no_holders(key: bytes) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceDecision:
    """The findings and orders of one tick."""

    proposals: list[PlannedMove] = field(default_factory=list)
    refusals: list[NoMove] = field(default_factory=list)
    hotspots: list[Hotspot] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    is_saturated: bool = False
    shed: Shed | None = None


class Balancer:
    """Plans moves every 250 ms and when an engine requests a rescue. The owner replaces `policy` when a newer one arrives.

    The caller must report the end of every returned move to `ended`.
    """

    def __init__(self, policy: BalancePolicy | None = None, holders_of: HoldersOf = _no_holders) -> None:
        self.policy = policy or BalancePolicy()
        self._holders_of = holders_of
        self._copied: dict[bytes, float] = {}
        """Time of the last copy of each prefix to another group."""
        self.guard = AttractionGuard()
        self.pingpong = PingPongGuard()
        self._book = HotspotBook()
        self._budget = MoveBudget()
        self._moving = MovesInProgress()
        self._shedding = SheddingTimer()
        self._hot: dict[str, HotGroup] = {}

    def tick(self, views: Sequence[GroupView], streams_of: StreamsOf, now: float) -> BalanceDecision:
        """Returns the decision of this tick. `views`: every group with an open link, draining ones included."""
        policy = self.policy
        staying = [view for view in views if not view.draining and view.group not in policy.empty]
        seen = self._book.tick(staying, HotspotTargets(policy.ttft_target_s, policy.itl_target_s), now)
        self._hot = seen.hot
        self._begin(views, now)
        plans = self._evacuations(views, streams_of, now)
        plans += self._replications(seen.hot, seen.is_saturated, views, streams_of, now)
        plans += self._migrations(seen.hot, seen.is_saturated, views, streams_of, now)
        best_ttft_s = min((view.backlog_s for view in staying if view.state == "fresh"), default=None)
        by_key = {view.key: view for view in views}
        return BalanceDecision(
            proposals=[proposal for plan in plans for proposal in plan.proposals],
            refusals=[plan.refusal for plan in plans if plan.refusal is not None],
            hotspots=[self._hotspot(group, by_key[group.key], seen.is_saturated, now) for group in seen.hot.values()],
            transitions=seen.transitions,
            is_saturated=seen.is_saturated,
            shed=self._shedding.decide(seen.is_saturated, best_ttft_s, policy.ttft_target_s, now),
        )

    def rescue(self, source: str, stream: StreamView, views: Sequence[GroupView], now: float) -> PlannedMove | NoMove:
        """Returns a target for a request that the group with key `source` is about to preempt."""
        view = next((view for view in views if view.key == source), None)
        if view is None:
            return NoMove(source, "rescue", "stale", "the group does not exist any more")
        if self.policy.mode != "Migrate":
            return NoMove(source, "rescue", "mode", f"the balancing mode is {self.policy.mode}; moves need Migrate")
        self._begin(views, now)
        plan = self._take(rescue(view, self._pin(stream, now), self._scene(views, now)), view)
        if plan.proposals:
            return plan.proposals[0]
        return plan.refusal or NoMove(source, "rescue", "no_target", "no group has room")

    def ended(self, proposal: PlannedMove, is_moved: bool, now: float) -> bool:
        """Records the end of a move; returns whether it was a return to a group that the stream had just left."""
        if self._moving.end(proposal.stream, is_moved, now) is None:
            return False
        self._budget.end(proposal)
        if not is_moved:
            return False
        self.guard.left(proposal.source, proposal.context, now)
        return self.pingpong.moved(proposal.stream, proposal.source, proposal.target, now)

    def _begin(self, views: Sequence[GroupView], now: float) -> None:
        live_tokens = sum(view.context_tokens for view in views)
        self._budget.begin(self.policy.budgets, live_tokens, [view.key for view in views], now)

    def _evacuations(self, views: Sequence[GroupView], streams_of: StreamsOf, now: float) -> list[LadderPlan]:
        """Empties the groups of `policy.empty` in that order, then the groups that report that they drain."""
        order = {group: place for place, group in enumerate(self.policy.empty)}
        leaving = [view for view in views if view.draining or view.group in order]
        plans = []
        for view in sorted(leaving, key=lambda view: order.get(view.group, len(order))):
            if streams := [self._pin(stream, now) for stream in streams_of(view.key)]:
                plans.append(self._take(evacuate(view, streams, self._scene(views, now)), view))
        return plans

    def _replications(
        self, hot: dict[str, HotGroup], is_saturated: bool, views: Sequence[GroupView], streams_of: StreamsOf, now: float
    ) -> list[LadderPlan]:
        """Copies hot prefixes to further groups."""
        self._copied = {prefix: at for prefix, at in self._copied.items() if now - at < PREFIX_COPY_INTERVAL_S}
        by_key, plans = {view.key: view for view in views}, []
        for group in hot.values():
            view = by_key[group.key]
            if "prefix" not in group.causes or view.state != "fresh" or not view.prefix or view.prefix in self._copied:
                continue
            if (why_not := self._why_not(is_saturated, now)) is not None:
                plans.append(LadderPlan([], NoMove(group.key, "replicate", *why_not)))
                continue
            streams = [self._pin(stream, now) for stream in streams_of(group.key)]
            plan = self._take(replicate(group, streams, self._holders_of(view.prefix), self._scene(views, now)), view)
            if plan.proposals:
                self._copied[view.prefix] = now
            plans.append(plan)
        return plans

    def _migrations(
        self, hot: dict[str, HotGroup], is_saturated: bool, views: Sequence[GroupView], streams_of: StreamsOf, now: float
    ) -> list[LadderPlan]:
        by_key = {view.key: view for view in views}
        sources = [group for group in hot.values() if can_moves_relieve(group, by_key[group.key])]
        why_not = self._why_not(is_saturated, now)
        plans = []
        for group in sorted(sources, key=lambda group: -max(group.causes.values())):
            view = by_key[group.key]
            if why_not is not None:
                plans.append(LadderPlan([], NoMove(group.key, "migrate", *why_not)))
            elif view.state == "fresh":
                streams = [self._pin(stream, now) for stream in streams_of(group.key)]
                plans.append(self._take(migrate(group, streams, self._scene(views, now)), view))
        return plans

    def _why_not(self, is_saturated: bool, now: float) -> tuple[RefusalCode, str] | None:
        """Returns what forbids all balancing moves, or `None`."""
        if self.policy.mode != "Migrate":
            return "mode", f"the balancing mode is {self.policy.mode}; moves need Migrate"
        if is_saturated:
            return "saturated", "most groups are loaded: only more groups help"
        if self.pingpong.is_off(now):
            return "pingpong", "too many requests returned to a group that they had just left: moves are off for a minute"
        return None

    def _scene(self, views: Sequence[GroupView], now: float) -> LadderInputs:
        after = self._moving.projected(views)
        closed = frozenset(view.key for view in views if view.group in self.policy.empty or view.draining)
        return LadderInputs(
            views=after,
            hot=self._hot,
            closed=closed,
            budget=self._budget,
            itl_target_s=self.policy.itl_target_s,
            now=now,
        )

    def _pin(self, stream: StreamView, now: float) -> StreamView:
        """Returns the stream with `is_pinned` and `barred` set from the moves under way and the recent ones."""
        is_kept, left = self._moving.keeps(stream.stream, now), self.pingpong.left(stream.stream, now)
        return replace(stream, is_pinned=stream.is_pinned or is_kept, barred=left) if is_kept or left else stream

    def _take(self, plan: LadderPlan, source: GroupView) -> LadderPlan:
        """Starts the moves that the budgets allow; returns these with the refusal of the first other one."""
        for place, proposal in enumerate(plan.proposals):
            code = self._budget.forbids(proposal.source, proposal.target, proposal.rung)
            if code is not None:
                return LadderPlan(
                    plan.proposals[:place], NoMove(source.key, proposal.rung, code, f"the budget for {code} is exhausted")
                )
            self._moving.begin(proposal)
            self._budget.spend(proposal, proposal.context * source.page_bytes / source.page_size)
        return plan

    def _hotspot(self, group: HotGroup, view: GroupView, is_saturated: bool, now: float) -> Hotspot:
        action = restrict_to_mode(select_action(group, view), self.policy.mode, is_saturated)
        return Hotspot(
            group=group.group,
            cause=group.cause,
            signal=group.causes[group.cause],
            median=group.median,
            since_s=now - group.since,
            action=action,
        )
