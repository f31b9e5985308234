"""How many requests of batches may start without delaying those of clients."""

from collections.abc import Sequence

from phalanx_router.routing.view import GroupView, is_stale

SHARE = 0.8
"""Share of a group's rows, pages and latency target that batches may fill."""
UNKNOWN_ROWS = 16
"""Rows of a group that reports none."""


def spare_requests(
    views: Sequence[GroupView], *, queued: int, in_flight: int, itl_target_s: float = 0.0, routers: int = 1
) -> int:
    """Returns how many more requests of batches one of the routers may start.

    None while requests wait at the router or in a group. Without groups one starts, so that a service scaled to zero wakes.
    itl_target_s: 0 without a target.
    """
    if not views:
        return max(0, 1 - in_flight)
    return 0 if queued else -(-sum(_spare(view, itl_target_s) for view in views) // max(1, routers))


def _spare(view: GroupView, itl_target_s: float) -> int:
    load, capacity = view.load, view.capacity
    is_slow = 0 < SHARE * itl_target_s <= view.itl_s and load.running > 0
    is_full = load.used_pages + load.reserved_pages >= SHARE * capacity.total_pages
    if view.is_draining or is_stale(view.state) or not view.has_report or load.waiting or is_slow or is_full:
        return 0
    return max(0, int(SHARE * (capacity.max_num_seqs or UNKNOWN_ROWS)) - load.running)
