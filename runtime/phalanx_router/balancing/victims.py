"""Which requests of a hotspot go: those that gain most for what their copy costs, as few as bring it back to rest.

    worth = E[rest] * sqrt(context) / (T_copy + 20 ms)         E[rest] = max(mean output, generated) / 2

Never: one that has not begun, was moved 3 times or less than 5 s ago, or ends before its copy pays: E[rest] * itl_s < 2 T_copy.
Source: balancing.md 3.4 rung 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from phalanx_router.balancing.hotspots import THRESHOLDS
from phalanx_router.balancing.projection import does_help, joined, strain, without
from phalanx_router.balancing.records import StreamView
from phalanx_router.balancing.targets import FREEZE_S, copy_s, may_take
from phalanx_router.routing.view import GroupView

DWELL_S = 5.0
MOST_MOVES = 3


@dataclass(frozen=True, slots=True)
class Scales:
    """Of strain: the time of a step that counts as 1; of times: the bound of a transfer; and the strain that is rest."""

    itl_s: float | None
    bytes_per_s: float | None
    rest: float


def expected_rest(stream: StreamView, source: GroupView) -> float:
    """Output tokens still to come, without a prediction: half of what is usual, or of what it has already."""
    return max(source.mean_output_tokens, stream.generated) / 2


def worth(stream: StreamView, source: GroupView, bytes_per_s: float | None) -> float:
    """By which victims are ordered, the largest first."""
    return expected_rest(stream, source) * sqrt(stream.context) / (copy_s(stream.context, source, bytes_per_s) + FREEZE_S)


def may_go(stream: StreamView, source: GroupView, bytes_per_s: float | None, now: float) -> bool:
    """Whether this request may be moved for balance."""
    if stream.is_pinned or stream.generated < 1 or stream.moves >= MOST_MOVES:
        return False
    if stream.moved_s is not None and now - stream.moved_s < DWELL_S:
        return False
    return expected_rest(stream, source) * source.itl_s >= 2 * copy_s(stream.context, source, bytes_per_s)


def victims(source: GroupView, target: GroupView, streams: Sequence[StreamView], scales: Scales, now: float) -> list[StreamView]:
    """The requests that go from here to there, the best first: together they pass the test of `projection`, or none goes."""
    fit = [s for s in streams if may_go(s, source, scales.bytes_per_s, now) and may_take(s, source, target, now)]
    fit.sort(key=lambda stream: (-worth(stream, source, scales.bytes_per_s), stream.stream))
    chosen: list[StreamView] = []
    here, there = source, target
    for stream in fit:
        if strain(here, scales.itl_s) < scales.rest:
            break
        next_here, next_there = without(here, stream.context), joined(there, stream.context)
        if strain(next_there, scales.itl_s) <= strain(next_here, scales.itl_s) and not _is_hot(next_there):
            here, there = next_here, next_there
            chosen.append(stream)
    before = strain(source, scales.itl_s), strain(target, scales.itl_s)
    return chosen if does_help(before, (strain(here, scales.itl_s), strain(there, scales.itl_s))) else []


def _is_hot(view: GroupView) -> bool:
    """Whether a move would make a hotspot of its target."""
    return view.pressure >= THRESHOLDS["kv"].high
