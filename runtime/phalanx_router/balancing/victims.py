"""Chooses the requests that leave a hotspot: highest gain per transfer cost first, as few as relieve it.

    move_value = E[remaining] * sqrt(context) / (T_copy + 20 ms)         E[remaining] = max(mean output, generated) / 2

Excluded: requests without an output token, with `MAX_MOVES` moves, moved less than `DWELL_S` ago, or likely to end before the
transfer pays off (E[remaining] * itl_s < 2 T_copy). Source: balancing.md 3.4 rung 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from phalanx_router.balancing.hotspots import THRESHOLDS
from phalanx_router.balancing.projection import is_improvement, strain, with_request, without_request
from phalanx_router.balancing.records import StreamView
from phalanx_router.balancing.targets import FREEZE_S, can_take, copy_s
from phalanx_router.routing.view import GroupView

DWELL_S = 5.0
MAX_MOVES = 3


@dataclass(frozen=True, slots=True)
class VictimScales:
    """Bounds for the choice of victims."""

    itl_s: float | None  # step time that equals strain 1
    bytes_per_s: float | None  # transfer cap
    rest: float  # strain below which the source gives no more requests away


def expected_remaining_tokens(stream: StreamView, source: GroupView) -> float:
    """Estimates the output tokens still to come: half of the group's mean, or of the tokens generated if those are more."""
    return max(source.mean_output_tokens, stream.generated) / 2


def move_value(stream: StreamView, source: GroupView, bytes_per_s: float | None) -> float:
    """Returns the sort key of victims, highest first."""
    return (
        expected_remaining_tokens(stream, source)
        * sqrt(stream.context)
        / (copy_s(stream.context, source, bytes_per_s) + FREEZE_S)
    )


def is_movable(stream: StreamView, source: GroupView, bytes_per_s: float | None, now: float) -> bool:
    """Whether balancing may move this request."""
    if stream.is_pinned or stream.generated < 1 or stream.moves >= MAX_MOVES:
        return False
    if stream.moved_s is not None and now - stream.moved_s < DWELL_S:
        return False
    return expected_remaining_tokens(stream, source) * source.itl_s >= 2 * copy_s(stream.context, source, bytes_per_s)


def select_victims(
    source: GroupView, target: GroupView, streams: Sequence[StreamView], scales: VictimScales, now: float
) -> list[StreamView]:
    """Returns the requests to move, best first. The list is empty unless they pass `projection.is_improvement` together."""
    fit = [s for s in streams if is_movable(s, source, scales.bytes_per_s, now) and can_take(s, source, target, now)]
    fit.sort(key=lambda stream: (-move_value(stream, source, scales.bytes_per_s), stream.stream))
    chosen: list[StreamView] = []
    here, there = source, target
    for stream in fit:
        if strain(here, scales.itl_s) < scales.rest:
            break
        next_here, next_there = without_request(here, stream.context), with_request(there, stream.context)
        if strain(next_there, scales.itl_s) <= strain(next_here, scales.itl_s) and not _is_hot(next_there):
            here, there = next_here, next_there
            chosen.append(stream)
    before = strain(source, scales.itl_s), strain(target, scales.itl_s)
    return chosen if is_improvement(before, (strain(here, scales.itl_s), strain(there, scales.itl_s))) else []


def _is_hot(view: GroupView) -> bool:
    """Whether the page pressure makes this group a hotspot."""
    return view.pressure >= THRESHOLDS["kv"].high
