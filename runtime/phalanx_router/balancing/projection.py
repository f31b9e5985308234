"""Projects a group's load after a move and decides whether the move helps.

    strain = max(pressure, itl_s / itl_scale_s)
    moves help  iff  the larger strain of the two groups falls by EPSILON or more,
                     the target's strain does not exceed the source's,
                     and the sum of squares falls by EPSILON^2 or more

Moves between arrivals are finite: each lowers the sum of squares of all groups. A measurement error below EPSILON / 2 cannot
make one move undo another. See docs/balancing.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from phalanx_api.cost import StepWork
from phalanx_router.balancing.records import PlannedMove
from phalanx_router.routing.view import GroupView

EPSILON = 0.03
FULL_BACKLOG_S = 2.0
"""A shorter prefill backlog counts proportionally in the step time."""
STEP_WEIGHT = 0.3
"""Weight of the step time relative to page pressure."""


def without_request(view: GroupView, context: int) -> GroupView:
    """The group without a request of `context` tokens."""
    return view.plus(-1, -context, -view.pages_of(context))


def with_request(view: GroupView, context: int) -> GroupView:
    """The group with one more request of `context` tokens."""
    return view.plus(1, context, view.pages_of(context))


def strain(view: GroupView, itl_scale_s: float | None) -> float:
    """Load of a group; without `itl_scale_s` of its pages only."""
    return max(view.pressure, lasting_itl_s(view) / itl_scale_s if itl_scale_s else 0.0)


def lasting_itl_s(view: GroupView) -> float:
    """Inter-token latency without a prefill that is almost done."""
    load = view.load
    prefill_tokens = min(1.0, view.backlog_s / FULL_BACKLOG_S) * load.prompt_tokens_per_step
    work = StepWork(int(prefill_tokens), load.running, load.context_tokens)
    return view.speed * view.step_model.predict(work) / load.speedup


def is_improvement(before: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether moves help, by the strains of (source, target)."""
    return (
        after[1] <= after[0]
        and max(after) <= max(before) - EPSILON
        and sum(z * z for z in after) <= sum(z * z for z in before) - EPSILON * EPSILON
    )


def median_itl_s(views: Sequence[GroupView]) -> float:
    """Median of `lasting_itl_s`; 0 without groups."""
    return median(lasting_itl_s(view) for view in views) if views else 0.0


def target_cost(view: GroupView, itl_s: float) -> float:
    """Cost of a target. `itl_s`: median of the groups."""
    return view.pressure + (STEP_WEIGHT * view.itl_s / itl_s if itl_s > 0 else 0.0)


RETRY_DELAY_S = 1.0


class MovesInProgress:
    """Moves under way, by stream."""

    def __init__(self) -> None:
        self._moves: dict[str, PlannedMove] = {}
        self._blocked_until: dict[str, float] = {}

    def blocks(self, stream: str, now: float) -> bool:
        """Whether the stream is moving or has just failed to."""
        return stream in self._moves or now < self._blocked_until.get(stream, now)

    def add(self, planned: PlannedMove) -> None:
        """Records the start of a move."""
        self._moves[planned.stream] = planned

    def remove(self, stream: str, is_moved: bool, now: float) -> PlannedMove | None:
        """Removes and returns the move of a stream."""
        planned = self._moves.pop(stream, None)
        if planned is not None and not is_moved:
            self._blocked_until = {name: until for name, until in self._blocked_until.items() if until > now}
            self._blocked_until[stream] = now + RETRY_DELAY_S
        return planned

    def projected(self, views: Sequence[GroupView]) -> dict[str, GroupView]:
        """Groups by key as if all moves had succeeded; reserved pages count once."""
        after = {view.key: view for view in views}
        incoming_pages: dict[str, int] = {}
        for planned in self._moves.values():
            if (source := after.get(planned.source)) is not None:
                after[source.key] = without_request(source, planned.context)
            if (target := after.get(planned.target)) is not None:
                incoming_pages[target.key] = incoming_pages.get(target.key, 0) + target.pages_of(planned.context)
                after[target.key] = target.plus(1, planned.context)
        for key, pages in incoming_pages.items():
            load = after[key].load
            after[key] = replace(after[key], load=replace(load, reserved_pages=max(load.reserved_pages, pages)))
        return after
