"""Chooses the target of a move and whether pages move with the request.

A target has the same model hash and a fresh report, does not drain and keeps a reserve of pages. A request does not return to a
group within `guards.RETURN_S`.
"""

from collections.abc import Collection, Iterable

from phalanx_router.balancing.guards import RETURN_S
from phalanx_router.balancing.projection import target_cost
from phalanx_router.balancing.records import StreamView
from phalanx_router.moves.records import TransferMode
from phalanx_router.routing.view import GroupView

RESERVE = 0.02
"""Share of the target's pages that stays free."""
RESCUE_GROWTH = 32
"""Free tokens per request at the target of a rescue."""


def can_take(stream: StreamView, source: GroupView, target: GroupView, now: float) -> bool:
    """Whether the target can run the request, apart from room."""
    if target.key == source.key or target.model_hash != source.model_hash:
        return False
    if target.state != "fresh" or target.is_draining:
        return False
    has_just_left = stream.moved_at is not None and now - stream.moved_at < RETURN_S and target.key == stream.last_source
    return not has_just_left and target.key not in stream.barred_targets


def has_room(stream: StreamView, target: GroupView, growth: int = 0) -> bool:
    """Whether the request fits, with `growth` more tokens for each running request. Waiting requests start after it."""
    capacity = target.capacity
    reserve = max(RESERVE * capacity.total_pages, (target.load.running + 1) * growth / capacity.page_size)
    return target.free_pages >= target.pages_of(stream.context) + reserve


def select_target(
    stream: StreamView,
    source: GroupView,
    candidates: Iterable[GroupView],
    hot: Collection[str],
    itl_s: float,
    now: float,
    growth: int = 0,
) -> GroupView | None:
    """Best target for a request that must leave; hotspots (`hot`) last."""
    fits = [view for view in candidates if can_take(stream, source, view, now) and has_room(stream, view, growth)]
    cool = [view for view in fits if view.key not in hot]
    return min(cool or fits, key=lambda view: target_cost(view, itl_s), default=None)


# Pages are transferred if that costs less than their computation, with the delay of the target's B decodes:
#     T_copy = context * bytes per token / bandwidth          T_recompute = context * token_s + context^2 * attention_s / 2
#     (T_copy + FREEZE_S) * (1 + COPY_DELAY_FRACTION * B)  <  T_recompute * (1 + PREFILL_DELAY_FRACTION * B)

FREEZE_S = 0.02
"""Cost beyond the copy: two round trips, the step before the freeze, the start at the target."""
COPY_DELAY_FRACTION, PREFILL_DELAY_FRACTION = 0.03, 0.5
"""Delay of each decode at the target, per duration of a copy or prefill."""
MIN_TRANSFER_TOKENS = 256


def copy_s(context: float, source: GroupView, bytes_per_s: float | None) -> float:
    """Seconds to copy the pages of `context` tokens."""
    bandwidth = source.copy_bytes_per_s if bytes_per_s is None else min(bytes_per_s, source.copy_bytes_per_s)
    return source.kv_bytes(context) / max(bandwidth, 1.0)


def recompute_s(context: int, target: GroupView) -> float:
    """Seconds to prefill `context` tokens at the target."""
    return target.prompt_s(context)


def select_transfer(
    context: int, source: GroupView, target: GroupView, bytes_per_s: float | None, with_pages: TransferMode
) -> TransferMode:
    """`with_pages` if the transfer is cheaper, otherwise "recompute"."""
    if source.layout != target.layout or context < MIN_TRANSFER_TOKENS:
        return "recompute"
    running = target.load.running
    transfer_s = (copy_s(context, source, bytes_per_s) + FREEZE_S) * (1 + COPY_DELAY_FRACTION * running)
    prefill_s = recompute_s(context, target) * (1 + PREFILL_DELAY_FRACTION * running)
    return with_pages if transfer_s < prefill_s else "recompute"
