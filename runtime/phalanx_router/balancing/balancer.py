"""One router's balancing, tick by tick: hotspots, moves within budgets, the guards, what to shed. The caller carries it out."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from phalanx_api.summary import BalancePolicy, Hotspot
from phalanx_router.balancing.budget import MoveBudget
from phalanx_router.balancing.guards import AttractionGuard, PingPong
from phalanx_router.balancing.hotspots import HotGroup, HotspotBook, Targets, Transition
from phalanx_router.balancing.ladder import (
    HOME_EVERY_S,
    Plan,
    Scene,
    action_of,
    allowed,
    evacuate,
    gives_way,
    migrate,
    replicate,
    rescue,
)
from phalanx_router.balancing.projection import Moving
from phalanx_router.balancing.records import Proposal, Refusal, RefusalCode, StreamView
from phalanx_router.routing.view import GroupView

# When waiting requests are refused: the fleet is saturated, and even its best group misses the target, for a second.
# Each further second one more priority band is refused, the lowest first. A started stream is never shed; who is refused
# within a band is the queue's (`route`).

PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse waiting requests of so many bands, the lowest first, and tell them when to come again."""

    bands: int
    retry_after_s: float
    why: str


class Shedding:
    """Follows how long shedding has been due."""

    def __init__(self) -> None:
        self._since: float | None = None

    def decide(self, is_saturated: bool, best_ttft_s: float | None, target_s: float | None, now: float) -> Shed | None:
        """What to refuse now, if anything. `best_ttft_s`: predicted at the best group for a newcomer, None without a group."""
        is_due = is_saturated and best_ttft_s is not None and target_s is not None and best_ttft_s > target_s
        if not is_due or best_ttft_s is None or target_s is None:
            self._since = None
            return None
        self._since = self._since if self._since is not None else now
        bands = int((now - self._since) / PATIENCE_S)
        if not bands:
            return None
        why = f"every group is loaded, and the best would need {best_ttft_s:.1f} s where {target_s:.1f} s are the target"
        return Shed(bands, max(1.0, best_ttft_s - target_s), why)


StreamsOf = Callable[[str], Sequence[StreamView]]
"""This router's streams in the group of a key. Asked for hotspots and emptied groups only."""
HoldersOf = Callable[[bytes], Collection[str]]
"""Keys of the groups that hold the page of this key. Asked for hotspots of one prefix only."""


def _nobody(key: bytes) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What one tick found and wants done."""

    proposals: list[Proposal] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    hotspots: list[Hotspot] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    is_saturated: bool = False
    shed: Shed | None = None


class Balancer:
    """Decides every 250 ms, and when an engine asks for rescue. `policy` is replaced by who hears of a new one.

    Every proposal that is given out must be answered by `ended`.
    """

    def __init__(self, policy: BalancePolicy | None = None, holders_of: HoldersOf = _nobody) -> None:
        self.policy = policy or BalancePolicy()
        self._holders_of = holders_of
        self._copied: dict[bytes, float] = {}
        """When each prefix was last brought to another group."""
        self.guard = AttractionGuard()
        self.pingpong = PingPong()
        self._book = HotspotBook()
        self._budget = MoveBudget()
        self._moving = Moving()
        self._shedding = Shedding()
        self._hot: dict[str, HotGroup] = {}

    def tick(self, views: Sequence[GroupView], streams_of: StreamsOf, now: float) -> Decision:
        """What to do now. `views`: every group with an open link, those that drain too."""
        policy = self.policy
        staying = [view for view in views if not view.draining and view.group not in policy.empty]
        seen = self._book.tick(staying, Targets(policy.ttft_target_s, policy.itl_target_s), now)
        self._hot = seen.hot
        self._begin(views, now)
        plans = self._evacuations(views, streams_of, now)
        plans += self._replications(seen.hot, seen.is_saturated, views, streams_of, now)
        plans += self._migrations(seen.hot, seen.is_saturated, views, streams_of, now)
        best_ttft_s = min((view.backlog_s for view in staying if view.state == "fresh"), default=None)
        by_key = {view.key: view for view in views}
        return Decision(
            [proposal for plan in plans for proposal in plan.proposals],
            [plan.refusal for plan in plans if plan.refusal is not None],
            [self._hotspot(group, by_key[group.key], seen.is_saturated, now) for group in seen.hot.values()],
            seen.transitions,
            seen.is_saturated,
            self._shedding.decide(seen.is_saturated, best_ttft_s, policy.ttft_target_s, now),
        )

    def rescue(self, source: str, stream: StreamView, views: Sequence[GroupView], now: float) -> Proposal | Refusal:
        """Where a request goes that the group of this key is about to preempt."""
        view = next((view for view in views if view.key == source), None)
        if view is None:
            return Refusal(source, "rescue", "stale", "the group is gone")
        if self.policy.mode != "Migrate":
            return Refusal(source, "rescue", "mode", f"the mode is {self.policy.mode}")
        self._begin(views, now)
        plan = self._take(rescue(view, self._pin(stream, now), self._scene(views, now)), view)
        if plan.proposals:
            return plan.proposals[0]
        return plan.refusal or Refusal(source, "rescue", "no_target", "no group has room")

    def ended(self, proposal: Proposal, is_moved: bool, now: float) -> bool:
        """Notes how a move ended; whether it was a return to a group just left."""
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

    def _evacuations(self, views: Sequence[GroupView], streams_of: StreamsOf, now: float) -> list[Plan]:
        """Off the groups that the policy names, in its order; then off those that say themselves that they leave."""
        order = {group: place for place, group in enumerate(self.policy.empty)}
        leaving = [view for view in views if view.draining or view.group in order]
        plans = []
        for view in sorted(leaving, key=lambda view: order.get(view.group, len(order))):
            if streams := [self._pin(stream, now) for stream in streams_of(view.key)]:
                plans.append(self._take(evacuate(view, streams, self._scene(views, now)), view))
        return plans

    def _replications(
        self, hot: dict[str, HotGroup], is_saturated: bool, views: Sequence[GroupView], streams_of: StreamsOf, now: float
    ) -> list[Plan]:
        """Prefixes that many ask for get another home."""
        self._copied = {prefix: at for prefix, at in self._copied.items() if now - at < HOME_EVERY_S}
        by_key, plans = {view.key: view for view in views}, []
        for group in hot.values():
            view = by_key[group.key]
            if "prefix" not in group.causes or view.state != "fresh" or not view.prefix or view.prefix in self._copied:
                continue
            if (why_not := self._why_not(is_saturated, now)) is not None:
                plans.append(Plan([], Refusal(group.key, "replicate", *why_not)))
                continue
            streams = [self._pin(stream, now) for stream in streams_of(group.key)]
            plan = self._take(replicate(group, streams, self._holders_of(view.prefix), self._scene(views, now)), view)
            if plan.proposals:
                self._copied[view.prefix] = now
            plans.append(plan)
        return plans

    def _migrations(
        self, hot: dict[str, HotGroup], is_saturated: bool, views: Sequence[GroupView], streams_of: StreamsOf, now: float
    ) -> list[Plan]:
        by_key = {view.key: view for view in views}
        sources = [group for group in hot.values() if gives_way(group, by_key[group.key])]
        why_not = self._why_not(is_saturated, now)
        plans = []
        for group in sorted(sources, key=lambda group: -max(group.causes.values())):
            view = by_key[group.key]
            if why_not is not None:
                plans.append(Plan([], Refusal(group.key, "migrate", *why_not)))
            elif view.state == "fresh":
                streams = [self._pin(stream, now) for stream in streams_of(group.key)]
                plans.append(self._take(migrate(group, streams, self._scene(views, now)), view))
        return plans

    def _why_not(self, is_saturated: bool, now: float) -> tuple[RefusalCode, str] | None:
        """What forbids moves for balance altogether."""
        if self.policy.mode != "Migrate":
            return "mode", f"the mode is {self.policy.mode}"
        if is_saturated:
            return "saturated", "most groups are loaded: only capacity helps"
        if self.pingpong.is_off(now):
            return "pingpong", "requests went back and forth: moves are off for a minute"
        return None

    def _scene(self, views: Sequence[GroupView], now: float) -> Scene:
        after = self._moving.settled(views)
        closed = frozenset(view.key for view in views if view.group in self.policy.empty or view.draining)
        return Scene(after, self._hot, closed, self._budget, self.policy.itl_target_s, now)

    def _pin(self, stream: StreamView, now: float) -> StreamView:
        """The stream with what is known here: it is moving or rests, and where it was just now."""
        is_kept, left = self._moving.keeps(stream.stream, now), self.pingpong.left(stream.stream, now)
        return replace(stream, is_pinned=stream.is_pinned or is_kept, barred=left) if is_kept or left else stream

    def _take(self, plan: Plan, source: GroupView) -> Plan:
        """The part of a plan that budgets allow; it counts as begun."""
        for place, proposal in enumerate(plan.proposals):
            code = self._budget.forbids(proposal.source, proposal.target, proposal.rung)
            if code is not None:
                return Plan(plan.proposals[:place], Refusal(source.key, proposal.rung, code, f"the budget of {code} is spent"))
            self._moving.begin(proposal)
            self._budget.spend(proposal, proposal.context * source.page_bytes / source.page_size)
        return plan

    def _hotspot(self, group: HotGroup, view: GroupView, is_saturated: bool, now: float) -> Hotspot:
        action = allowed(action_of(group, view), self.policy.mode, is_saturated)
        return Hotspot(group.group, group.cause, group.causes[group.cause], group.median, now - group.since, action)
