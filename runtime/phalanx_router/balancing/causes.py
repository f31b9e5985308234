"""The six causes of a hotspot: the signal of each, and from where on it counts.

    kv         pressure, or a preemption in the last second
    prefill    backlog_s / target of the time to the first token
    decode     itl_s / target of the time between tokens
    prefix     share of the heaviest prefix, when the group also has much of one of the above
    straggler  measured speed
    full       time that a copy needs, twice, over time until no page is free

A cause whose target nobody set has signal 0. Source: balancing.md 3.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx_api.summary import Cause
from phalanx_router.balancing.copying import copy_s
from phalanx_router.routing.view import GroupView

RESCUE_SLACK_S = 0.1


@dataclass(frozen=True, slots=True)
class Threshold:
    """A signal from `high` on is trouble, below `low` it is over; `delta` is the least distance from the other groups."""

    high: float
    low: float
    delta: float


THRESHOLDS: Mapping[Cause, Threshold] = {
    "kv": Threshold(0.85, 0.75, 0.10),
    "prefill": Threshold(0.5, 0.25, 0.2),
    "decode": Threshold(0.90, 0.75, 0.15),
    "prefix": Threshold(0.30, 0.15, 0.15),
    "straggler": Threshold(1.30, 1.15, 0.15),
    "full": Threshold(1.0, 1.0, 0.0),
}
LOADS: tuple[Cause, ...] = ("kv", "prefill", "decode")
"""Causes that say how much a group has to do. When most groups have one, the fleet is saturated."""
EXPLAIN: tuple[Cause, ...] = ("straggler", "prefix", "full")
"""Causes that come before all others, in this order: the first two are the reason for the others, the last one is urgent."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What clients are promised; None is nothing."""

    ttft_s: float | None = None
    itl_s: float | None = None


def signals(view: GroupView, targets: Targets) -> dict[Cause, float]:
    """The signal of each cause in this group."""
    found: dict[Cause, float] = {
        "kv": max(view.pressure, 1.0 if view.preempted_lately else 0.0),
        "prefill": view.backlog_s / targets.ttft_s if targets.ttft_s else 0.0,
        "decode": view.itl_s / targets.itl_s if targets.itl_s and view.running else 0.0,
        "straggler": view.speed,
        "full": _urgency(view),
    }
    is_loaded = any(found[cause] >= THRESHOLDS[cause].low for cause in LOADS)
    return found | {"prefix": view.prefix_share if is_loaded else 0.0}


def _urgency(view: GroupView) -> float:
    """From 1 on there is just time left to copy a request of mean length elsewhere before the pages run out."""
    if view.steps_to_full is None or not view.running:
        return 0.0
    needed_s = 2 * copy_s(view.context_tokens / view.running, view, view.copy_bytes_per_s) + RESCUE_SLACK_S
    return needed_s / max(view.steps_to_full * view.itl_s, 1e-6)


def primary(found: Mapping[Cause, float]) -> Cause:
    """The main one of these causes. Raises ValueError without any."""
    for cause in EXPLAIN:
        if cause in found:
            return cause
    return max(found, key=lambda cause: (found[cause] - THRESHOLDS[cause].high) / (1 - THRESHOLDS[cause].low))
