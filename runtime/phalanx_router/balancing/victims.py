"""Chooses the requests that leave a hotspot: highest gain per transfer cost first, as few as relieve it.

    move_value = E[remaining] * sqrt(context) / (T_copy + 20 ms)         E[remaining] = max(mean output, generated) / 2

Excluded: requests without an output token, with `MAX_MOVES` moves, moved less than `DWELL_S` ago, or with E[remaining] * itl_s <
2 T_copy. See docs/balancing.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from phalanx_router.balancing.hotspots import RULES
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
    relieved_strain: float  # at which the source keeps its other requests


def expected_remaining_tokens(stream: StreamView, source: GroupView) -> float:
    """Returns the expected number of output tokens left."""
    return max(source.mean_output_tokens, stream.generated) / 2


def move_value(stream: StreamView, source: GroupView, bytes_per_s: float | None) -> float:
    """Rank of a victim; the highest leaves first."""
    return (
        expected_remaining_tokens(stream, source)
        * sqrt(stream.context)
        / (copy_s(stream.context, source, bytes_per_s) + FREEZE_S)
    )


def is_movable(stream: StreamView, source: GroupView, bytes_per_s: float | None, now: float) -> bool:
    """Whether balancing may move this request."""
    if stream.is_pinned or stream.generated < 1 or stream.num_moves >= MAX_MOVES:
        return False
    if stream.moved_at is not None and now - stream.moved_at < DWELL_S:
        return False
    return expected_remaining_tokens(stream, source) * source.itl_s >= 2 * copy_s(stream.context, source, bytes_per_s)


def select_victims(
    source: GroupView, target: GroupView, streams: Sequence[StreamView], scales: VictimScales, now: float
) -> list[StreamView]:
    """Requests to move, if they pass `projection.is_improvement` together."""
    fit = [s for s in streams if is_movable(s, source, scales.bytes_per_s, now) and can_take(s, source, target, now)]
    fit.sort(key=lambda stream: (-move_value(stream, source, scales.bytes_per_s), stream.stream))
    victims: list[StreamView] = []
    relieved, loaded = source, target
    for stream in fit:
        if strain(relieved, scales.itl_s) < scales.relieved_strain:
            break
        next_source, next_target = without_request(relieved, stream.context), with_request(loaded, stream.context)
        if strain(next_target, scales.itl_s) <= strain(next_source, scales.itl_s) and not _is_full(next_target):
            relieved, loaded = next_source, next_target
            victims.append(stream)
    before = strain(source, scales.itl_s), strain(target, scales.itl_s)
    return victims if is_improvement(before, (strain(relieved, scales.itl_s), strain(loaded, scales.itl_s))) else []


def _is_full(view: GroupView) -> bool:
    return view.pressure >= RULES["kv"].high
