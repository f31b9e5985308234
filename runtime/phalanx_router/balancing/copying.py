"""Whether a request takes its pages along or is computed anew at its target: what is cheaper, others' waiting included.

    T_copy      = context * bytes per token / bandwidth
    T_recompute = context * token_s + context^2 * attention_s / 2
    pages  iff  (T_copy + FREEZE_S) * (1 + COPY_HURTS * B)  <  T_recompute * (1 + PREFILL_HURTS * B)       B: decodes there

Source: balancing.md 3.6.
"""

from phalanx_router.balancing.records import Way
from phalanx_router.routing.view import GroupView

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
