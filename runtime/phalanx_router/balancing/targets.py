"""Which group takes a request over: the one with the most room of those that fit it.

A target has an equal model hash, a fresh report, is neither leaving nor a hotspot, and keeps a reserve after the move; one that
takes a rescued request also room for what its requests fill soon, or it would have to rescue in turn. A request does not come
back to a group that it left less than `pingpong.RETURN_S` ago.
"""

from collections.abc import Collection, Iterable

from phalanx_router.balancing.guards import RETURN_S
from phalanx_router.balancing.projection import appeal, pages_of
from phalanx_router.balancing.records import StreamView, Way
from phalanx_router.routing.view import GroupView

RESERVE = 0.02
"""Of its pages, what a target keeps free after the move."""
RESCUE_GROWTH = 32
"""Tokens by which each request at the target of a rescue, the rescued one too, may grow before pages run out there."""


def may_take(stream: StreamView, source: GroupView, target: GroupView, now: float) -> bool:
    """Whether the request could run there at all, now."""
    if target.key == source.key or target.model_hash != source.model_hash:
        return False
    if target.state != "fresh" or target.draining:
        return False
    just_left = stream.moved_s is not None and now - stream.moved_s < RETURN_S and target.key == stream.left
    return not just_left and target.key not in stream.barred


def has_room(stream: StreamView, target: GroupView, growth: int = 0) -> bool:
    """Whether the request fits beside what the target has and promised, with so many tokens to grow for each. What waits there
    has not begun, and comes after it."""
    free = target.total_pages - target.used_pages - target.reserved_pages
    reserve = max(RESERVE * target.total_pages, (target.running + 1) * growth / target.page_size)
    return free >= pages_of(stream.context, target) + reserve


def roomiest(
    stream: StreamView,
    source: GroupView,
    candidates: Iterable[GroupView],
    hot: Collection[str],
    itl_s: float,
    now: float,
    growth: int = 0,
) -> GroupView | None:
    """The best target of these for a request that has to leave; hotspots (keys) only when there is no other."""
    fits = [view for view in candidates if may_take(stream, source, view, now) and has_room(stream, view, growth)]
    cool = [view for view in fits if view.key not in hot]
    return min(cool or fits, key=lambda view: appeal(view, itl_s), default=None)


# Whether a request takes its pages along or is computed anew at its target: what is cheaper, others' waiting included.
#     T_copy      = context * bytes per token / bandwidth     T_recompute = context * token_s + context^2 * attention_s / 2
# pages  iff  (T_copy + FREEZE_S) * (1 + COPY_HURTS * B)  <  T_recompute * (1 + PREFILL_HURTS * B)       B: decodes there
# Source: balancing.md 3.6.

FREEZE_S = 0.02
"""What a move costs beside the copy: two round trips, the step that a freeze waits for, the start at the target."""
COPY_HURTS, PREFILL_HURTS = 0.03, 0.5
"""By which part of itself a copy, and a prompt's computation, delays each request that decodes there."""
SHORT = 256
"""A context of fewer tokens is always computed anew."""


def copy_s(context: float, source: GroupView, bytes_per_s: float | None) -> float:
    """Seconds to copy the pages of so many tokens. A bound of None is no bound beside what transfers reach."""
    bandwidth = source.copy_bytes_per_s if bytes_per_s is None else min(bytes_per_s, source.copy_bytes_per_s)
    return context * source.page_bytes / source.page_size / max(bandwidth, 1.0)


def recompute_s(context: int, target: GroupView) -> float:
    """Seconds to compute so many tokens at the target."""
    return target.prompt_s(context)


def way_of(context: int, source: GroupView, target: GroupView, bytes_per_s: float | None, with_pages: Way) -> Way:
    """How a request of this context should go; `with_pages` if its pages go too."""
    if source.layout != target.layout or context < SHORT:
        return "recompute"
    copy = (copy_s(context, source, bytes_per_s) + FREEZE_S) * (1 + COPY_HURTS * target.running)
    anew = recompute_s(context, target) * (1 + PREFILL_HURTS * target.running)
    return with_pages if copy < anew else "recompute"
