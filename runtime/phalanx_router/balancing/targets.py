"""Which group takes a request over: the one with the most room of those that fit it.

A target has an equal model hash, a fresh report, is neither leaving nor a hotspot, and keeps a reserve after the move; one that
takes a rescued request also room for what its requests fill soon, or it would have to rescue in turn. A request does not come
back to a group that it left less than `pingpong.RETURN_S` ago.
"""

from collections.abc import Collection, Iterable

from phalanx_router.balancing.pingpong import RETURN_S
from phalanx_router.balancing.projection import appeal, pages_of
from phalanx_router.balancing.records import StreamView
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
