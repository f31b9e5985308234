"""Decides one router's balancing on each tick: hotspots, moves, shedding."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from phalanx_api.summary import BalancePolicy, Hotspot
from phalanx_router.balancing.budget import MoveBudget
from phalanx_router.balancing.guards import AttractionGuard, PingPongGuard
from phalanx_router.balancing.hotspots import HotGroup, HotspotReport, HotspotTargets, HotspotTracker, Transition
from phalanx_router.balancing.ladder import (
    PREFIX_COPY_INTERVAL_S,
    LadderInputs,
    LadderPlan,
    can_moves_relieve,
    evacuate,
    migrate,
    replicate,
    reported_action,
    rescue,
    restrict_to_mode,
)
from phalanx_router.balancing.projection import MovesInProgress
from phalanx_router.balancing.records import NoMove, PlannedCopy, PlannedMove, RefusalCode, Rung, StreamView
from phalanx_router.routing.view import GroupView

PATIENCE_S = 1.0
"""Shedding starts when even the best group of a saturated fleet misses the TTFT target this long; each second adds one band."""


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse the queued requests of the lowest `bands` priority bands."""

    bands: int
    retry_after_s: float
    why: str


class SheddingTimer:
    """Measures for how long shedding has been due."""

    def __init__(self) -> None:
        self._since: float | None = None

    def decide(self, is_saturated: bool, best_ttft_s: float | None, target_s: float | None, now: float) -> Shed | None:
        """Requests to refuse now. `best_ttft_s`: of the best group."""
        if not is_saturated or best_ttft_s is None or target_s is None or best_ttft_s <= target_s:
            self._since = None
            return None
        self._since = self._since if self._since is not None else now
        bands = int((now - self._since) / PATIENCE_S)
        if not bands:
            return None
        why = f"every group is loaded: the best one predicts a TTFT of {best_ttft_s:.1f} s, the target is {target_s:.1f} s"
        return Shed(bands, max(1.0, best_ttft_s - target_s), why)


StreamsOf = Callable[[str], Sequence[StreamView]]
"""This router's streams in a group, by key."""
HoldersOf = Callable[[bytes], Collection[str]]
"""Keys of the groups with a page, by page key."""
CanSend = Callable[[str], bool]
"""Whether other groups can pull pages from a group, by key."""
DEFAULT_POLICY = BalancePolicy()


def _no_holders(key: bytes) -> Collection[str]:
    return ()


def _never(key: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceDecision:
    """Result of one tick."""

    moves: list[PlannedMove] = field(default_factory=list)
    copies: list[PlannedCopy] = field(default_factory=list)
    refusals: list[NoMove] = field(default_factory=list)
    hotspots: list[Hotspot] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    is_saturated: bool = False
    shed: Shed | None = None


class Balancer:
    """Plans moves. The caller passes the end of each move to `record_end`, that of each copy to `end_pull`."""

    def __init__(
        self, policy: BalancePolicy = DEFAULT_POLICY, holders_of: HoldersOf = _no_holders, can_send: CanSend = _never
    ) -> None:
        self.policy = policy
        self.attraction = AttractionGuard()
        self.pingpong = PingPongGuard()
        self._holders_of = holders_of
        self._can_send = can_send
        self._copied_at: dict[bytes, float] = {}  # last copy of each prefix
        self._tracker = HotspotTracker()
        self._budget = MoveBudget()
        self._in_progress = MovesInProgress()
        self._shedding = SheddingTimer()
        self._hot: dict[str, HotGroup] = {}

    def tick(self, views: Sequence[GroupView], streams_of: StreamsOf, now: float) -> BalanceDecision:
        """Runs every 250 ms. `views`: every group with an open link."""
        policy = self.policy
        staying = [view for view in views if not view.is_draining and view.group not in policy.evacuate]
        report = self._tracker.tick(staying, HotspotTargets(policy.ttft_target_s, policy.itl_target_s), now)
        self._hot = report.hot
        self._refill(views, now)
        plans = self._evacuations(views, streams_of, now)
        plans += self._replications(report, views, streams_of, now)
        plans += self._migrations(report, views, streams_of, now)
        best_ttft_s = min((view.backlog_s for view in staying if view.state == "fresh"), default=None)
        by_key = {view.key: view for view in views}
        return BalanceDecision(
            moves=[planned for plan in plans for planned in plan.moves],
            copies=[plan.copy for plan in plans if plan.copy is not None],
            refusals=[plan.refusal for plan in plans if plan.refusal is not None],
            hotspots=[self._hotspot(group, by_key[group.key], report.is_saturated, now) for group in report.hot.values()],
            transitions=report.transitions,
            is_saturated=report.is_saturated,
            shed=self._shedding.decide(report.is_saturated, best_ttft_s, policy.ttft_target_s, now),
        )

    def rescue(self, source: str, stream: StreamView, views: Sequence[GroupView], now: float) -> PlannedMove | NoMove:
        """Moves a request that group `source` will preempt."""
        view = next((view for view in views if view.key == source), None)
        if view is None:
            return NoMove(source, "rescue", "stale", "the group does not exist any more")
        if self.policy.mode != "Migrate":
            return NoMove(source, "rescue", "mode", f"the balancing mode is {self.policy.mode}; moves need Migrate")
        self._refill(views, now)
        plan = self._start_allowed(rescue(view, self._restrict(stream, now), self._inputs(views, now)), view)
        if plan.moves:
            return plan.moves[0]
        return plan.refusal or NoMove(source, "rescue", "no_target", "no group has room")

    def record_end(self, planned: PlannedMove, is_moved: bool, now: float) -> bool:
        """Records the end of a move; returns whether it was a return."""
        if self._in_progress.remove(planned.stream, is_moved, now) is None:
            return False
        self._budget.record_end(planned)
        if not is_moved:
            return False
        self.attraction.record_departure(planned.source, planned.context, now)
        return self.pingpong.record_move(planned.stream, planned.source, planned.target, now)

    def start_pull(
        self,
        holder: str,
        target: str,
        num_bytes: float,
        views: Sequence[GroupView],
        now: float,
        *,
        is_foreign: bool = False,
    ) -> RefusalCode | None:
        """Counts a pull between groups, by key, or returns the limit that forbids it; then call `end_pull`.

        `is_foreign`: the holder is a group of another service.
        """
        self._refill(views, now)
        return self._budget.start_pull(holder, target, num_bytes, is_foreign=is_foreign)

    def end_pull(self, holder: str, target: str) -> None:
        """Records the end of a pull."""
        self._budget.end_pull(holder, target)

    def _refill(self, views: Sequence[GroupView], now: float) -> None:
        live_tokens = sum(view.load.context_tokens for view in views)
        self._budget.refill(self.policy.budgets, live_tokens, [view.key for view in views], now)

    def _evacuations(self, views: Sequence[GroupView], streams_of: StreamsOf, now: float) -> list[LadderPlan]:
        """Evacuates the groups of `policy.evacuate` in order, then draining ones."""
        order = {group: position for position, group in enumerate(self.policy.evacuate)}
        leaving = [view for view in views if view.is_draining or view.group in order]
        plans = []
        for view in sorted(leaving, key=lambda view: order.get(view.group, len(order))):
            if streams := [self._restrict(stream, now) for stream in streams_of(view.key)]:
                plans.append(self._start_allowed(evacuate(view, streams, self._inputs(views, now)), view))
        return plans

    def _replications(
        self, report: HotspotReport, views: Sequence[GroupView], streams_of: StreamsOf, now: float
    ) -> list[LadderPlan]:
        self._copied_at = {prefix: at for prefix, at in self._copied_at.items() if now - at < PREFIX_COPY_INTERVAL_S}
        by_key = {view.key: view for view in views}
        plans = []
        for group in report.hot.values():
            view = by_key[group.key]
            prefix = view.load.hot_prefix.key
            if "prefix" not in group.causes or view.state != "fresh" or not prefix or prefix in self._copied_at:
                continue
            if (obstacle := self._obstacle(report.is_saturated, now)) is not None:
                plans.append(LadderPlan([], NoMove(group.key, "replicate", *obstacle)))
                continue
            streams = [self._restrict(stream, now) for stream in streams_of(group.key)]
            plan = self._start_allowed(replicate(group, streams, self._holders_of(prefix), self._inputs(views, now)), view)
            if plan.moves or plan.copy is not None:
                self._copied_at[prefix] = now
            plans.append(plan)
        return plans

    def _migrations(
        self, report: HotspotReport, views: Sequence[GroupView], streams_of: StreamsOf, now: float
    ) -> list[LadderPlan]:
        by_key = {view.key: view for view in views}
        sources = [group for group in report.hot.values() if can_moves_relieve(group, by_key[group.key])]
        obstacle = self._obstacle(report.is_saturated, now)
        plans = []
        for group in sorted(sources, key=lambda group: -max(group.causes.values())):
            view = by_key[group.key]
            if obstacle is not None:
                plans.append(LadderPlan([], NoMove(group.key, "migrate", *obstacle)))
            elif view.state == "fresh":
                streams = [self._restrict(stream, now) for stream in streams_of(group.key)]
                plans.append(self._start_allowed(migrate(group, streams, self._inputs(views, now)), view))
        return plans

    def _obstacle(self, is_saturated: bool, now: float) -> tuple[RefusalCode, str] | None:
        if self.policy.mode != "Migrate":
            return "mode", f"the balancing mode is {self.policy.mode}; moves need Migrate"
        if is_saturated:
            return "saturated", "most groups are loaded: only more groups help"
        if self.pingpong.is_paused(now):
            return "pingpong", "too many requests returned to a group that they had just left: moves are off for a minute"
        return None

    def _inputs(self, views: Sequence[GroupView], now: float) -> LadderInputs:
        return LadderInputs(
            views=self._in_progress.projected(views),
            hot=self._hot,
            closed=frozenset(view.key for view in views if view.group in self.policy.evacuate or view.is_draining),
            budget=self._budget,
            can_send=self._can_send,
            itl_target_s=self.policy.itl_target_s,
            now=now,
        )

    def _restrict(self, stream: StreamView, now: float) -> StreamView:
        """Pins a stream with a current or failed move; bars its recent sources too."""
        is_blocked, sources = self._in_progress.blocks(stream.stream, now), self.pingpong.recent_sources(stream.stream, now)
        if not is_blocked and not sources:
            return stream
        return replace(stream, is_pinned=stream.is_pinned or is_blocked, barred_targets=stream.barred_targets | sources)

    def _start_allowed(self, plan: LadderPlan, source: GroupView) -> LadderPlan:
        """Starts the moves or the copy within the budgets; refuses the next one."""
        if plan.copy is not None:
            code = self._budget.start_pull(plan.copy.source, plan.copy.target, plan.copy.num_pages * source.capacity.page_bytes)
            return plan if code is None else LadderPlan([], _exhausted(source, "replicate", code))
        for index, planned in enumerate(plan.moves):
            code = self._budget.exceeded_limit(planned.source, planned.target, planned.rung)
            if code is not None:
                return LadderPlan(plan.moves[:index], _exhausted(source, planned.rung, code))
            self._in_progress.add(planned)
            self._budget.record_start(planned, source.kv_bytes(planned.context))
        return plan

    def _hotspot(self, group: HotGroup, view: GroupView, is_saturated: bool, now: float) -> Hotspot:
        action = restrict_to_mode(reported_action(group, view), self.policy.mode, is_saturated)
        return Hotspot(
            group=group.group,
            cause=group.cause,
            signal=group.causes[group.cause],
            median=group.median,
            since_s=now - group.since,
            action=action,
        )


def _exhausted(source: GroupView, rung: Rung, code: RefusalCode) -> NoMove:
    return NoMove(source.key, rung, code, f"the budget for {code} is exhausted")
