"""Chooses the target of a move and whether the pages move with the request.

A target has the same model hash and a fresh report, does not drain and keeps a reserve of pages. Hotspots are the last choice.
The target of a rescue also needs room for the growth of its requests, or it would soon need rescue itself. A request does not
return to a group within `guards.RETURN_S` of leaving it.
"""

from collections.abc import Collection, Iterable

from phalanx_router.balancing.guards import RETURN_S
from phalanx_router.balancing.projection import pages_of, target_cost
from phalanx_router.balancing.records import StreamView, TransferMode
from phalanx_router.routing.view import GroupView

RESERVE = 0.02
"""Fraction of the target's pages that stays free after the move."""
RESCUE_GROWTH = 32
"""Tokens that each request at the target of a rescue can grow, the rescued one included, before the page pool is exhausted."""


def can_take(stream: StreamView, source: GroupView, target: GroupView, now: float) -> bool:
    """Whether the target can run the request now, apart from room."""
    if target.key == source.key or target.model_hash != source.model_hash:
        return False
    if target.state != "fresh" or target.draining:
        return False
    just_left = stream.moved_s is not None and now - stream.moved_s < RETURN_S and target.key == stream.left
    return not just_left and target.key not in stream.barred


def has_room(stream: StreamView, target: GroupView, growth: int = 0) -> bool:
    """Whether the request fits next to used and reserved pages, with `growth` tokens left for each running request.

    The target's waiting requests do not count: they start after the moved one.
    """
    free = target.total_pages - target.used_pages - target.reserved_pages
    reserve = max(RESERVE * target.total_pages, (target.running + 1) * growth / target.page_size)
    return free >= pages_of(stream.context, target) + reserve


def select_target(
    stream: StreamView,
    source: GroupView,
    candidates: Iterable[GroupView],
    hot: Collection[str],
    itl_s: float,
    now: float,
    growth: int = 0,
) -> GroupView | None:
    """Returns the best target for a request that must leave, a hotspot (`hot`: keys) only if no other group fits."""
    fits = [view for view in candidates if can_take(stream, source, view, now) and has_room(stream, view, growth)]
    cool = [view for view in fits if view.key not in hot]
    return min(cool or fits, key=lambda view: target_cost(view, itl_s), default=None)


# Pages are transferred if that costs less than recomputing them, the delay of the target's B decodes included:
#     T_copy = context * bytes per token / bandwidth          T_recompute = context * token_s + context^2 * attention_s / 2
#     (T_copy + FREEZE_S) * (1 + COPY_DELAY_FRACTION * B)  <  T_recompute * (1 + PREFILL_DELAY_FRACTION * B)
# Source: balancing.md 3.6.

FREEZE_S = 0.02
"""Seconds that a move costs beyond the copy: two round trips, the step that a freeze waits for, the start at the target."""
COPY_DELAY_FRACTION, PREFILL_DELAY_FRACTION = 0.03, 0.5
"""Delay of each decode at the target, as a fraction of the duration of a copy or of a prefill."""
MIN_TRANSFER_TOKENS = 256
"""A shorter context is always recomputed."""


def copy_s(context: float, source: GroupView, bytes_per_s: float | None) -> float:
    """Returns the seconds to copy the pages of `context` tokens. `bytes_per_s=None`: only the measured bandwidth limits it."""
    bandwidth = source.copy_bytes_per_s if bytes_per_s is None else min(bytes_per_s, source.copy_bytes_per_s)
    return context * source.page_bytes / source.page_size / max(bandwidth, 1.0)


def recompute_s(context: int, target: GroupView) -> float:
    """Returns the seconds to prefill `context` tokens at the target."""
    return target.prompt_s(context)


def select_transfer(
    context: int, source: GroupView, target: GroupView, bytes_per_s: float | None, with_pages: TransferMode
) -> TransferMode:
    """Returns `with_pages` if the transfer is cheaper, otherwise "recompute"."""
    if source.layout != target.layout or context < MIN_TRANSFER_TOKENS:
        return "recompute"
    copy = (copy_s(context, source, bytes_per_s) + FREEZE_S) * (1 + COPY_DELAY_FRACTION * target.running)
    anew = recompute_s(context, target) * (1 + PREFILL_DELAY_FRACTION * target.running)
    return with_pages if copy < anew else "recompute"
