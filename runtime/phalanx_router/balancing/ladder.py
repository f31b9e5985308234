"""The rungs of the ladder that move running requests: replicate a prefix, migrate off a hotspot, evacuate a group, rescue what
would be preempted.

Each function plans for one source on views that already contain the moves under way, and changes nothing. It may plan more than
budgets allow: whoever carries a plan out begins with its first moves, and stops where a budget ends.
The rungs below are elsewhere: steering and late binding in `route`, shedding in `shed`. Pages go only with a request, so a prefix
gets another home by a stream that begins with it: what came with it stays in the cache there, and newcomers choose (`route`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx_api.summary import Mode
from phalanx_router.balancing.budget import MoveBudget
from phalanx_router.balancing.hotspots import HotGroup
from phalanx_router.balancing.projection import appeal, joined, median_itl_s, strain, without
from phalanx_router.balancing.records import FOR_BALANCE, Proposal, Refusal, RefusalCode, Rung, StreamView, Way
from phalanx_router.balancing.targets import FREEZE_S, RESCUE_GROWTH, copy_s, has_room, may_take, recompute_s, roomiest, way_of
from phalanx_router.balancing.victims import Scales, expected_rest, may_go, victims
from phalanx_router.routing.view import GroupView

REST = 0.75
"""Strain at which a hotspot has given enough away."""
SLOW = 1.95
"""A straggler from this speed on gives requests away: one of half the speed, a little less for the error of its measure."""
USUAL = 2.0
SLOW_REST = 1.15 / USUAL
"""The same for a straggler, whose strain is its time of a step over `USUAL` times the median."""

MOST_HOMES, HOME_EVERY_S = 3, 10.0
"""Groups that hold one hot prefix, and how soon after one of them was made the next may be. Both as one router sees it: several
may copy a prefix at once, each to another group, and so exceed them."""
HOME_FREE = 0.2
"""Of its pages, what a new home of a prefix has free."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What one plan looks at: groups by key with all moves under way, hotspots by key, what may be spent."""

    views: Mapping[str, GroupView]
    hot: Mapping[str, HotGroup]
    closed: frozenset[str]
    budget: MoveBudget
    itl_target_s: float | None
    now: float

    @property
    def median_itl_s(self) -> float:
        """Of the groups that report."""
        return median_itl_s([view for view in self.views.values() if view.state == "fresh"])


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves out of one group, and why there are no more."""

    proposals: list[Proposal]
    refusal: Refusal | None = None


def migrate(source: HotGroup, streams: Sequence[StreamView], scene: Scene) -> Plan:
    """What a hotspot gives to the best of the groups that are none."""
    view = scene.views[source.key]
    scales = _scales(source, view, scene)
    best = _coolest(view, scene)
    if best is None:
        return _refused(view, "migrate", "no_target", "no group with the same model is fresh and cool")
    chosen = victims(view, best, streams, scales, scene.now)
    if not chosen:
        return _refused(view, "migrate", "no_victim", f"no request would make {view.group} and {best.group} better together")
    why = f"{view.group} is {source.cause}-bound ({source.causes[source.cause]:.2f}), {best.group} has room"
    return Plan([_proposal(stream, view, best, "migrate", "precopy", scene, why) for stream in chosen])


def replicate(source: HotGroup, streams: Sequence[StreamView], homes: Collection[str], scene: Scene) -> Plan:
    """The stream that brings the heaviest prefix to a group that has none of it. `homes`: keys of the groups that hold it.

    Only to one of the same layout, which can use its pages, and where the first newcomer already gains: two copies of the prefix
    take less than to compute it there.
    """
    view = scene.views[source.key]
    if len(homes) >= MOST_HOMES:
        return _refused(view, "replicate", "no_target", f"{len(homes)} groups hold the prefix")
    likes = [one for one in _cool(view, scene) if one.layout == view.layout]  # pages mean nothing to others
    roomy = [one for one in likes if one.key not in homes and one.free_share >= HOME_FREE]
    best = min(roomy, key=lambda one: appeal(one, scene.median_itl_s), default=None)
    if best is None:
        return _refused(view, "replicate", "no_target", "no cool group with room is without the prefix")
    bytes_per_s, itl_s = scene.budget.bytes_per_s(is_urgent=False), scene.itl_target_s
    if 2 * copy_s(view.prefix_tokens, view, bytes_per_s) + FREEZE_S >= recompute_s(view.prefix_tokens, best):
        return _refused(view, "replicate", "no_victim", f"{best.group} computes the prefix as soon as it is copied")
    fit = [
        stream
        for stream in streams
        if stream.has_prefix
        and may_go(stream, view, bytes_per_s, scene.now)
        and may_take(stream, view, best, scene.now)
        and has_room(stream, best)
        and strain(joined(best, stream.context), itl_s) <= strain(without(view, stream.context), itl_s)
    ]
    why = (
        f"{best.group} gets the prefix of {view.prefix_tokens} tokens that {view.prefix_share:.0%} of {view.group}'s prompts are"
    )
    chosen = min(fit, key=lambda stream: (stream.context, stream.stream), default=None)
    proposal = None if chosen is None else _proposal(chosen, view, best, "replicate", "precopy", scene, why)
    if proposal is None or proposal.way == "recompute":
        return _refused(view, "replicate", "no_victim", f"no stream of {view.group} can bring the prefix to {best.group}")
    return Plan([proposal])


def evacuate(source: GroupView, streams: Sequence[StreamView], scene: Scene) -> Plan:
    """What leaves a group that is to be emptied: those first that would stay longest."""
    if source.state != "fresh":
        return _refused(source, "evacuate", "stale", f"{source.group} has not reported lately")
    after = dict(scene.views)
    proposals: list[Proposal] = []
    candidates = [key for key in after if key not in scene.closed]
    for stream in sorted(streams, key=lambda stream: (-expected_rest(stream, source), stream.stream)):
        if stream.is_pinned:
            continue
        if len(proposals) > scene.budget.out_slots(source.key):
            break  # more than may begin now
        open_now = [after[key] for key in candidates if _slots_left(key, proposals, scene) > 0]
        best = roomiest(stream, source, open_now, scene.hot, scene.median_itl_s, scene.now)
        if best is None:
            return Plan(proposals, Refusal(source.key, "evacuate", "no_target", f"no group has room for {stream.stream}"))
        why = f"{source.group} is to be emptied, {best.group} has room"
        proposals.append(_proposal(stream, source, best, "evacuate", "precopy", scene, why))
        after[best.key] = joined(after[best.key], stream.context)
    return Plan(proposals)


def rescue(source: GroupView, stream: StreamView, scene: Scene) -> Plan:
    """Where a request goes that its group would preempt now."""
    if stream.is_pinned:
        return _refused(source, "rescue", "no_victim", f"{stream.stream} cannot leave")
    open_now = [view for key, view in scene.views.items() if key not in scene.closed and scene.budget.in_slots(key) > 0]
    best = roomiest(stream, source, open_now, scene.hot, scene.median_itl_s, scene.now, RESCUE_GROWTH)
    if best is None:
        return _refused(source, "rescue", "no_target", f"no group has room for {stream.stream}")
    why = f"{source.group} would preempt it, {best.group} has room"
    return Plan([_proposal(stream, source, best, "rescue", "stop", scene, why)])


def gives_way(group: HotGroup, view: GroupView) -> bool:
    """Whether a hotspot is one that moving requests helps: pages, time of a step, or a group that is very slow or ever slower."""
    return bool({"kv", "decode", "full"} & group.causes.keys()) or _is_very_slow(group, view)


def _is_very_slow(group: HotGroup, view: GroupView) -> bool:
    return "straggler" in group.causes and (view.speed >= SLOW or group.speed_rises)


Action = Literal["none", "steer", "weigh", "requeue", "replicate", "rescue", "migrate", "evacuate", "scale"]
"""What is done about a hotspot: the rungs of the ladder, and `weigh`: a slow group counts as one, so it gets less."""
RUNGS: dict[Mode, tuple[Action, ...]] = {
    "Off": (),
    "Route": ("steer", "weigh"),
    "Requeue": ("steer", "weigh", "requeue"),
    "Migrate": ("steer", "weigh", "requeue", "replicate", "rescue", "migrate", "evacuate"),
}
"""What each mode allows, the lowest rung first."""


def allowed(action: Action, mode: Mode, is_saturated: bool) -> Action:
    """What is done where this would help: that, or less if the mode allows no more; when all are loaded only more groups do."""
    if not RUNGS[mode]:
        return "none"
    if is_saturated and action in ("requeue", "replicate", "migrate"):
        return "scale"
    if action in RUNGS[mode]:
        return action
    return "requeue" if mode == "Requeue" else "steer"


def action_of(group: HotGroup, view: GroupView) -> Action:
    """The first rung that helps against the cause of a hotspot."""
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


def _scales(group: HotGroup, view: GroupView, scene: Scene) -> Scales:
    """Of a very slow group the time of a step is measured against that of the others."""
    scale, rest = scene.itl_target_s, REST
    if _is_very_slow(group, view):
        usual_s = USUAL * scene.median_itl_s
        scale, rest = min(usual_s, scale or usual_s), SLOW_REST
    return Scales(scale, scene.budget.bytes_per_s(is_urgent=False), rest)


def _cool(source: GroupView, scene: Scene) -> list[GroupView]:
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


def _coolest(source: GroupView, scene: Scene) -> GroupView | None:
    itl_s = scene.median_itl_s
    return min(_cool(source, scene), key=lambda view: appeal(view, itl_s), default=None)


def _slots_left(key: str, proposals: Sequence[Proposal], scene: Scene) -> int:
    return scene.budget.in_slots(key) - sum(proposal.target == key for proposal in proposals)


def _proposal(
    stream: StreamView, source: GroupView, target: GroupView, rung: Rung, with_pages: Way, scene: Scene, why: str
) -> Proposal:
    bytes_per_s = scene.budget.bytes_per_s(is_urgent=rung not in FOR_BALANCE)
    way = way_of(stream.context, source, target, bytes_per_s, with_pages) if stream.generated else "recompute"
    return Proposal(stream.stream, source.key, target.key, way, rung, stream.context, bytes_per_s, why)


def _refused(source: GroupView, rung: Rung, code: RefusalCode, why: str) -> Plan:
    return Plan([], Refusal(source.key, rung, code, why))
