"""Plans the moves of running requests: replicate a prefix, migrate off a hotspot, evacuate a group, rescue from preemption.

A plan may exceed the budgets; the caller starts its first moves. A hot prefix moves with a stream; routing then prefers its new
group.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from phalanx_api.summary import Mode
from phalanx_router.balancing.budget import MoveBudget
from phalanx_router.balancing.hotspots import RULES, HotGroup
from phalanx_router.balancing.projection import lasting_itl_s, median_itl_s, strain, target_cost, with_request, without_request
from phalanx_router.balancing.records import (
    OPTIONAL_RUNGS,
    HotspotAction,
    NoMove,
    PlannedCopy,
    PlannedMove,
    RefusalCode,
    Rung,
    StreamView,
)
from phalanx_router.balancing.targets import (
    FREEZE_S,
    RESCUE_GROWTH,
    can_take,
    copy_s,
    has_room,
    recompute_s,
    select_target,
    select_transfer,
)
from phalanx_router.balancing.victims import VictimScales, expected_remaining_tokens, is_movable, select_victims
from phalanx_router.moves.records import TransferMode
from phalanx_router.routing.view import GroupView

RELIEVED_STRAIN = 0.75
"""A hotspot with less strain keeps its requests."""
VERY_SLOW = 1.95
"""Relative step time from which a straggler gives requests away: 2 minus the measurement error."""
MEDIAN_MULTIPLE = 2.0
RELIEVED_STRAIN_SLOW = 1.15 / MEDIAN_MULTIPLE
"""`RELIEVED_STRAIN` of a very slow straggler. Its strain: step time / (`MEDIAN_MULTIPLE` * median)."""

MAX_PREFIX_HOLDERS, PREFIX_COPY_INTERVAL_S = 3, 10.0
"""Limits on copies of one hot prefix. Several routers can exceed them together."""
PREFIX_TARGET_FREE = 0.2
"""Minimum share of free pages at the target of a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderInputs:
    """Inputs of one plan."""

    views: Mapping[str, GroupView]  # by key, as if the moves under way had succeeded
    hot: Mapping[str, HotGroup]  # by key
    closed: frozenset[str]  # keys of groups that must not be targets
    budget: MoveBudget
    can_send: Callable[[str], bool]  # whether other groups can pull pages from this one, by key
    itl_target_s: float | None
    now: float

    @property
    def median_itl_s(self) -> float:
        """Median of the groups with a fresh report."""
        return median_itl_s([view for view in self.views.values() if view.state == "fresh"])

    @property
    def usual_itl_s(self) -> float:
        """The same as lower median: of two groups, that of the faster one."""
        return median_low([lasting_itl_s(view) for view in self.views.values() if view.state == "fresh"] or [0.0])


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """Moves out of one group."""

    moves: list[PlannedMove]
    refusal: NoMove | None = None
    copy: PlannedCopy | None = None


def migrate(source: HotGroup, streams: Sequence[StreamView], inputs: LadderInputs) -> LadderPlan:
    """Moves requests from a hotspot to the best other group."""
    view = inputs.views[source.key]
    scales = _scales(source, view, inputs)
    movable = [stream for stream in streams if is_movable(stream, view, scales.bytes_per_s, inputs.now)]
    best = _best_cool_group(view, movable, inputs)
    if best is None:
        return _refusal(view, "migrate", "no_target", "no group with the same model is fresh and cool")
    victims = select_victims(view, best, streams, scales, inputs.now)
    if not victims:
        return _refusal(view, "migrate", "no_victim", f"no request would make {view.group} and {best.group} better together")
    why = f"{view.group} is {source.cause}-bound ({source.causes[source.cause]:.2f}), {best.group} has room"
    return LadderPlan([_plan_move(stream, view, best, "migrate", "precopy", inputs=inputs, why=why) for stream in victims])


def replicate(source: HotGroup, streams: Sequence[StreamView], holders: Collection[str], inputs: LadderInputs) -> LadderPlan:
    """Copies the hot prefix to a group without it: by a pull, or with a stream that moves.

    `holders`: keys of the groups with the prefix.

    Two copies of the prefix must take less time than its computation, so that the first new request gains.
    """
    view = inputs.views[source.key]
    prefix_tokens = view.hot_prefix_tokens
    if len(holders) >= MAX_PREFIX_HOLDERS:
        return _refusal(view, "replicate", "no_target", f"{len(holders)} groups hold the prefix")
    prefixed = [stream for stream in streams if stream.has_hot_prefix]
    targets = [
        group
        for group in _cool_groups(view, inputs)
        if group.layout == view.layout and group.key not in holders and not _is_barred(group, prefixed)
        if group.free_share >= PREFIX_TARGET_FREE
    ]
    best = min(targets, key=lambda group: target_cost(group, inputs.median_itl_s), default=None)
    if best is None:
        return _refusal(view, "replicate", "no_target", "every group with room holds the prefix or is a hotspot")
    bytes_per_s, itl_s = inputs.budget.bytes_per_s(is_urgent=False), inputs.itl_target_s
    if 2 * copy_s(prefix_tokens, view, bytes_per_s) + FREEZE_S >= recompute_s(prefix_tokens, best):
        return _refusal(view, "replicate", "no_victim", f"{best.group} computes the prefix in less time than two copies take")
    share = f"{view.load.hot_prefix.token_share:.0%} of the prompt tokens of {view.group}"
    why = f"{best.group} gets the prefix of {prefix_tokens} tokens, {share}"
    if inputs.can_send(view.key):
        begins = min((stream.stream for stream in prefixed), default=None)
        if begins is not None:
            pages = view.load.hot_prefix.pages
            copy = PlannedCopy(stream=begins, source=view.key, target=best.key, num_pages=pages, bytes_per_s=bytes_per_s, why=why)
            return LadderPlan([], copy=copy)
    fit = [
        stream
        for stream in prefixed
        if is_movable(stream, view, bytes_per_s, inputs.now)
        and can_take(stream, view, best, inputs.now)
        and has_room(stream, best)
        and strain(with_request(best, stream.context), itl_s) <= strain(without_request(view, stream.context), itl_s)
    ]
    victim = min(fit, key=lambda stream: (stream.context, stream.stream), default=None)
    planned = None if victim is None else _plan_move(victim, view, best, "replicate", "precopy", inputs=inputs, why=why)
    if planned is None or planned.transfer == "recompute":
        return _refusal(view, "replicate", "no_victim", f"no stream of {view.group} can bring the prefix to {best.group}")
    return LadderPlan([planned])


def evacuate(source: GroupView, streams: Sequence[StreamView], inputs: LadderInputs) -> LadderPlan:
    """Evacuates a group, longest expected remaining output first. Streams whose adapter no group has delay no others."""
    if source.state != "fresh":
        return _refusal(source, "evacuate", "stale", f"{source.group} has no fresh load report")
    after = dict(inputs.views)
    moves: list[PlannedMove] = []
    refusal: NoMove | None = None
    candidates = [key for key in after if key not in inputs.closed]
    for stream in sorted(streams, key=lambda stream: (-expected_remaining_tokens(stream, source), stream.stream)):
        if stream.is_pinned:
            continue
        if len(moves) > inputs.budget.out_slots(source.key):
            break  # more than may start now
        open_groups = [after[key] for key in candidates if _slots_left(key, moves, inputs) > 0]
        best = select_target(stream, source, open_groups, hot=inputs.hot, itl_s=inputs.median_itl_s, now=inputs.now)
        if best is None:
            refusal = NoMove(source.key, "evacuate", "no_target", f"no group has room for {stream.stream}")
            if stream.barred_targets.isdisjoint(group.key for group in open_groups):
                break  # others find no room either
            continue
        why = f"{source.group} is being evacuated, {best.group} has room"
        moves.append(_plan_move(stream, source, best, "evacuate", "precopy", inputs=inputs, why=why))
        after[best.key] = with_request(after[best.key], stream.context)
    return LadderPlan(moves, refusal)


def rescue(source: GroupView, stream: StreamView, inputs: LadderInputs) -> LadderPlan:
    """Moves a request that its group is about to preempt."""
    if stream.is_pinned:
        return _refusal(source, "rescue", "no_victim", f"{stream.stream} is moving, may not move, or has just failed to")
    open_groups = [view for key, view in inputs.views.items() if key not in inputs.closed and inputs.budget.in_slots(key) > 0]
    best = select_target(
        stream, source, open_groups, hot=inputs.hot, itl_s=inputs.median_itl_s, now=inputs.now, growth=RESCUE_GROWTH
    )
    if best is None:
        return _refusal(source, "rescue", "no_target", f"no group has room for {stream.stream}")
    why = f"{source.group} would preempt it, {best.group} has room"
    return LadderPlan([_plan_move(stream, source, best, "rescue", "stop", inputs=inputs, why=why)])


def can_moves_relieve(group: HotGroup, view: GroupView) -> bool:
    """Whether running requests move off the hotspot: for a cause with `moves_relieve`, or a very slow straggler."""
    return any(RULES[cause].moves_relieve for cause in group.causes) or _is_very_slow(group, view)


def _is_very_slow(group: HotGroup, view: GroupView) -> bool:
    return "straggler" in group.causes and (view.speed >= VERY_SLOW or group.speed_rises)


RUNGS: dict[Mode, tuple[HotspotAction, ...]] = {
    "Off": (),
    "Route": ("steer", "weigh"),
    "Requeue": ("steer", "weigh", "requeue"),
    "Migrate": ("steer", "weigh", "requeue", "replicate", "rescue", "migrate", "evacuate"),
}
"""Allowed actions, lowest rung first."""


def restrict_to_mode(action: HotspotAction, mode: Mode, is_saturated: bool) -> HotspotAction:
    """The highest allowed action up to `action`; "scale" if only more groups help."""
    if not RUNGS[mode]:
        return "none"
    if is_saturated and action in ("requeue", "replicate", "migrate"):
        return "scale"
    if action in RUNGS[mode]:
        return action
    return "requeue" if mode == "Requeue" else "steer"


def reported_action(group: HotGroup, view: GroupView) -> HotspotAction:
    """Action that the summary shows for the hotspot; the operator replaces a straggler with "evacuate".

    `Balancer` starts migrations and replications, `RouterBackend` requeues on every tick, also without a hotspot.
    """
    is_very_slow = group.cause == "straggler" and _is_very_slow(group, view)
    return "evacuate" if is_very_slow else RULES[group.cause].action


def _scales(group: HotGroup, view: GroupView, inputs: LadderInputs) -> VictimScales:
    itl_s, relieved_strain = inputs.itl_target_s, RELIEVED_STRAIN
    if _is_very_slow(group, view):
        usual_s = MEDIAN_MULTIPLE * inputs.usual_itl_s
        itl_s, relieved_strain = min(usual_s, itl_s or usual_s), RELIEVED_STRAIN_SLOW
    return VictimScales(itl_s, inputs.budget.bytes_per_s(is_urgent=False), relieved_strain)


def _cool_groups(source: GroupView, inputs: LadderInputs) -> list[GroupView]:
    return [
        view
        for key, view in inputs.views.items()
        if key not in inputs.hot
        and key not in inputs.closed
        and key != source.key
        and view.state == "fresh"
        and not view.is_draining
        and view.model_hash == source.model_hash
    ]


def _best_cool_group(source: GroupView, streams: Sequence[StreamView], inputs: LadderInputs) -> GroupView | None:
    """Best target; those that may take none of the streams last."""
    itl_s = inputs.median_itl_s
    return min(_cool_groups(source, inputs), key=lambda view: (_is_barred(view, streams), target_cost(view, itl_s)), default=None)


def _is_barred(target: GroupView, streams: Sequence[StreamView]) -> bool:
    return bool(streams) and all(target.key in stream.barred_targets for stream in streams)


def _slots_left(key: str, moves: Sequence[PlannedMove], inputs: LadderInputs) -> int:
    return inputs.budget.in_slots(key) - sum(planned.target == key for planned in moves)


def _plan_move(
    stream: StreamView,
    source: GroupView,
    target: GroupView,
    rung: Rung,
    with_pages: TransferMode,
    inputs: LadderInputs,
    why: str,
) -> PlannedMove:
    bytes_per_s = inputs.budget.bytes_per_s(is_urgent=rung not in OPTIONAL_RUNGS)
    transfer = select_transfer(stream.context, source, target, bytes_per_s, with_pages) if stream.generated else "recompute"
    return PlannedMove(
        stream=stream.stream,
        source=source.key,
        target=target.key,
        transfer=transfer,
        rung=rung,
        context=stream.context,
        bytes_per_s=bytes_per_s,
        why=why,
    )


def _refusal(source: GroupView, rung: Rung, code: RefusalCode, why: str) -> LadderPlan:
    return LadderPlan([], NoMove(source.key, rung, code, why))
