"""Plans the moves of running requests: replicate a prefix, migrate off a hotspot, evacuate a group, rescue from preemption.

Each function plans the moves out of one group, on views that include the moves under way. A plan may exceed the budgets; the
caller starts its first moves up to the limit. The lower rungs are elsewhere: steering and late binding in `routing`, shedding in
`balancer`. Pages move only with a request, so a stream with the hot prefix brings it to another group; routing then prefers that
group for new requests with this prefix.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx_api.summary import Mode
from phalanx_router.balancing.budget import MoveBudget
from phalanx_router.balancing.hotspots import HotGroup
from phalanx_router.balancing.projection import median_itl_s, strain, target_cost, with_request, without_request
from phalanx_router.balancing.records import OPTIONAL_RUNGS, NoMove, PlannedMove, RefusalCode, Rung, StreamView, TransferMode
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
from phalanx_router.routing.view import GroupView

RELIEVED_STRAIN = 0.75
"""Strain below which a hotspot gives no more requests away."""
VERY_SLOW = 1.95
"""Relative slowness from which a straggler gives requests away: 2 minus a margin for the measurement error."""
MEDIAN_MULTIPLE = 2.0
RELIEVED_STRAIN_SLOW = 1.15 / MEDIAN_MULTIPLE
"""`RELIEVED_STRAIN` for a very slow straggler. Its strain is the step time over `MEDIAN_MULTIPLE` times the median step time."""

MAX_PREFIX_HOLDERS, PREFIX_COPY_INTERVAL_S = 3, 10.0
"""Maximum number of groups that hold one hot prefix, and minimum time between two copies of it. Each router applies the limits to
its own view, so concurrent copies by several routers can exceed them."""
PREFIX_TARGET_FREE = 0.2
"""Minimum fraction of free pages in a group that receives a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderInputs:
    """Inputs of one plan."""

    views: Mapping[str, GroupView]  # by key, as if the moves under way had succeeded
    hot: Mapping[str, HotGroup]  # by key
    closed: frozenset[str]  # keys of groups that must not be targets
    budget: MoveBudget
    itl_target_s: float | None
    now: float

    @property
    def median_itl_s(self) -> float:
        """The median step time of the groups with a fresh report."""
        return median_itl_s([view for view in self.views.values() if view.state == "fresh"])


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """Moves out of one group, and the reason for no further ones."""

    proposals: list[PlannedMove]
    refusal: NoMove | None = None


def migrate(source: HotGroup, streams: Sequence[StreamView], scene: LadderInputs) -> LadderPlan:
    """Plans moves from a hotspot to the best group that is not one."""
    view = scene.views[source.key]
    scales = _scales(source, view, scene)
    best = _coolest(view, scene)
    if best is None:
        return _refused(view, "migrate", "no_target", "no group with the same model is fresh and cool")
    chosen = select_victims(view, best, streams, scales, scene.now)
    if not chosen:
        return _refused(view, "migrate", "no_victim", f"no request would make {view.group} and {best.group} better together")
    why = f"{view.group} is {source.cause}-bound ({source.causes[source.cause]:.2f}), {best.group} has room"
    return LadderPlan([_proposal(stream, view, best, "migrate", "precopy", scene=scene, why=why) for stream in chosen])


def replicate(source: HotGroup, streams: Sequence[StreamView], homes: Collection[str], scene: LadderInputs) -> LadderPlan:
    """Plans the move of a stream with the heaviest prefix to a group without it. `homes`: keys of the groups that hold the
    prefix.

    The target needs the same layout, and two copies of the prefix must take less time than computing it there, so that the first
    new request already gains.
    """
    view = scene.views[source.key]
    if len(homes) >= MAX_PREFIX_HOLDERS:
        return _refused(view, "replicate", "no_target", f"{len(homes)} groups hold the prefix")
    likes = [one for one in _cool(view, scene) if one.layout == view.layout]  # pages of another layout are unusable
    roomy = [one for one in likes if one.key not in homes and one.free_share >= PREFIX_TARGET_FREE]
    best = min(roomy, key=lambda one: target_cost(one, scene.median_itl_s), default=None)
    if best is None:
        return _refused(view, "replicate", "no_target", "every group with room holds the prefix or is a hotspot")
    bytes_per_s, itl_s = scene.budget.bytes_per_s(is_urgent=False), scene.itl_target_s
    if 2 * copy_s(view.prefix_tokens, view, bytes_per_s) + FREEZE_S >= recompute_s(view.prefix_tokens, best):
        return _refused(view, "replicate", "no_victim", f"{best.group} computes the prefix in less time than two copies take")
    fit = [
        stream
        for stream in streams
        if stream.has_prefix
        and is_movable(stream, view, bytes_per_s, scene.now)
        and can_take(stream, view, best, scene.now)
        and has_room(stream, best)
        and strain(with_request(best, stream.context), itl_s) <= strain(without_request(view, stream.context), itl_s)
    ]
    share = f"{view.prefix_share:.0%} of the prompt tokens of {view.group}"
    why = f"{best.group} gets the prefix of {view.prefix_tokens} tokens, {share}"
    chosen = min(fit, key=lambda stream: (stream.context, stream.stream), default=None)
    proposal = None if chosen is None else _proposal(chosen, view, best, "replicate", "precopy", scene=scene, why=why)
    if proposal is None or proposal.way == "recompute":
        return _refused(view, "replicate", "no_victim", f"no stream of {view.group} can bring the prefix to {best.group}")
    return LadderPlan([proposal])


def evacuate(source: GroupView, streams: Sequence[StreamView], scene: LadderInputs) -> LadderPlan:
    """Plans moves out of a group that is being emptied, longest expected remaining output first."""
    if source.state != "fresh":
        return _refused(source, "evacuate", "stale", f"{source.group} has no fresh load report")
    after = dict(scene.views)
    proposals: list[PlannedMove] = []
    candidates = [key for key in after if key not in scene.closed]
    for stream in sorted(streams, key=lambda stream: (-expected_remaining_tokens(stream, source), stream.stream)):
        if stream.is_pinned:
            continue
        if len(proposals) > scene.budget.out_slots(source.key):
            break  # more than may start now
        open_now = [after[key] for key in candidates if _slots_left(key, proposals, scene) > 0]
        best = select_target(stream, source, open_now, hot=scene.hot, itl_s=scene.median_itl_s, now=scene.now)
        if best is None:
            return LadderPlan(proposals, NoMove(source.key, "evacuate", "no_target", f"no group has room for {stream.stream}"))
        why = f"{source.group} is being emptied, {best.group} has room"
        proposals.append(_proposal(stream, source, best, "evacuate", "precopy", scene=scene, why=why))
        after[best.key] = with_request(after[best.key], stream.context)
    return LadderPlan(proposals)


def rescue(source: GroupView, stream: StreamView, scene: LadderInputs) -> LadderPlan:
    """Plans the move of a request that its group is about to preempt."""
    if stream.is_pinned:
        return _refused(source, "rescue", "no_victim", f"{stream.stream} is moving, or its last move has just failed")
    open_now = [view for key, view in scene.views.items() if key not in scene.closed and scene.budget.in_slots(key) > 0]
    best = select_target(stream, source, open_now, hot=scene.hot, itl_s=scene.median_itl_s, now=scene.now, growth=RESCUE_GROWTH)
    if best is None:
        return _refused(source, "rescue", "no_target", f"no group has room for {stream.stream}")
    why = f"{source.group} would preempt it, {best.group} has room"
    return LadderPlan([_proposal(stream, source, best, "rescue", "stop", scene=scene, why=why)])


def can_moves_relieve(group: HotGroup, view: GroupView) -> bool:
    """Whether moves relieve the hotspot: its cause is page pressure or step time, or it is a very slow straggler."""
    return bool({"kv", "decode", "full"} & group.causes.keys()) or _is_very_slow(group, view)


def _is_very_slow(group: HotGroup, view: GroupView) -> bool:
    return "straggler" in group.causes and (view.speed >= VERY_SLOW or group.speed_rises)


Action = Literal["none", "steer", "weigh", "requeue", "replicate", "rescue", "migrate", "evacuate", "scale"]
"""Measures against a hotspot: the rungs of the ladder, and `weigh`: routing includes the group's measured slowness."""
RUNGS: dict[Mode, tuple[Action, ...]] = {
    "Off": (),
    "Route": ("steer", "weigh"),
    "Requeue": ("steer", "weigh", "requeue"),
    "Migrate": ("steer", "weigh", "requeue", "replicate", "rescue", "migrate", "evacuate"),
}
"""Actions that each mode allows, lowest rung first."""


def restrict_to_mode(action: Action, mode: Mode, is_saturated: bool) -> Action:
    """Returns `action` if the mode allows it, otherwise the highest lower one. A saturated fleet needs more groups: "scale"."""
    if not RUNGS[mode]:
        return "none"
    if is_saturated and action in ("requeue", "replicate", "migrate"):
        return "scale"
    if action in RUNGS[mode]:
        return action
    return "requeue" if mode == "Requeue" else "steer"


def select_action(group: HotGroup, view: GroupView) -> Action:
    """Returns the first rung that relieves the cause of a hotspot."""
    match group.cause:
        case "straggler":
            return "evacuate" if _is_very_slow(group, view) else "weigh"
        case "prefill":
            return "requeue"
        case "prefix":
            return "replicate"
        case "full":
            return "rescue"
        case "kv" | "decode":
            return "migrate"


def _scales(group: HotGroup, view: GroupView, scene: LadderInputs) -> VictimScales:
    """Returns the bounds for victims. The step time of a very slow group is compared with the median of the groups."""
    scale, rest = scene.itl_target_s, RELIEVED_STRAIN
    if _is_very_slow(group, view):
        usual_s = MEDIAN_MULTIPLE * scene.median_itl_s
        scale, rest = min(usual_s, scale or usual_s), RELIEVED_STRAIN_SLOW
    return VictimScales(scale, scene.budget.bytes_per_s(is_urgent=False), rest)


def _cool(source: GroupView, scene: LadderInputs) -> list[GroupView]:
    return [
        view
        for key, view in scene.views.items()
        if key not in scene.hot
        and key not in scene.closed
        and key != source.key
        and view.state == "fresh"
        and not view.draining
        and view.model_hash == source.model_hash
    ]


def _coolest(source: GroupView, scene: LadderInputs) -> GroupView | None:
    itl_s = scene.median_itl_s
    return min(_cool(source, scene), key=lambda view: target_cost(view, itl_s), default=None)


def _slots_left(key: str, proposals: Sequence[PlannedMove], scene: LadderInputs) -> int:
    return scene.budget.in_slots(key) - sum(proposal.target == key for proposal in proposals)


def _proposal(
    stream: StreamView, source: GroupView, target: GroupView, rung: Rung, with_pages: TransferMode, scene: LadderInputs, why: str
) -> PlannedMove:
    bytes_per_s = scene.budget.bytes_per_s(is_urgent=rung not in OPTIONAL_RUNGS)
    way = select_transfer(stream.context, source, target, bytes_per_s, with_pages) if stream.generated else "recompute"
    return PlannedMove(
        stream=stream.stream,
        source=source.key,
        target=target.key,
        way=way,
        rung=rung,
        context=stream.context,
        bytes_per_s=bytes_per_s,
        why=why,
    )


def _refused(source: GroupView, rung: Rung, code: RefusalCode, why: str) -> LadderPlan:
    return LadderPlan([], NoMove(source.key, rung, code, why))
