"""Projects a group's load after a move and decides whether the move helps.

    strain = max(pressure, itl_s / itl_scale_s)
    one or several moves help  iff  the larger strain of the two groups falls by EPSILON or more,
                                    the target's strain does not exceed the source's,
                                    and the sum of squares falls by EPSILON^2 or more

The number of moves between arrivals is therefore finite: each lowers the sum of squares over all groups, which is at least 0, by
EPSILON^2. A measurement error below EPSILON / 2 cannot make one move undo the previous one.
Source: balancing.md 3.4 rung 5 and stability (ii).
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from phalanx_api.cost import StepWork
from phalanx_router.balancing.records import PlannedMove
from phalanx_router.routing.view import GroupView

EPSILON = 0.03
FULL_BACKLOG_S = 2.0
"""A prefill backlog of this duration counts fully in the step time; a shorter one counts proportionally."""
STEP_WEIGHT = 0.3
"""Weight of the step time relative to page pressure in the choice of a target."""


def pages_of(context: int, view: GroupView) -> int:
    """Returns the pages that `context` tokens fill in this group."""
    return -(-context // view.page_size)


def without_request(view: GroupView, context: int) -> GroupView:
    """Returns the group after a request with `context` tokens has left."""
    return replace(
        view,
        running=max(0, view.running - 1),
        context_tokens=max(0, view.context_tokens - context),
        used_pages=max(0, view.used_pages - pages_of(context, view)),
    )


def with_request(view: GroupView, context: int) -> GroupView:
    """Returns the group after a request with `context` tokens has joined."""
    return replace(
        view,
        running=view.running + 1,
        context_tokens=view.context_tokens + context,
        used_pages=view.used_pages + pages_of(context, view),
    )


def strain(view: GroupView, itl_scale_s: float | None) -> float:
    """Returns the load of a group. Without `itl_scale_s` the step time does not count."""
    return max(view.pressure, lasting_itl_s(view) / itl_scale_s if itl_scale_s else 0.0)


def lasting_itl_s(view: GroupView) -> float:
    """Returns the lasting time between tokens: a prefill that is almost done does not justify a move."""
    lasting = min(1.0, view.backlog_s / FULL_BACKLOG_S) * view.prompt_tokens_per_step
    return view.speed * view.model.predict(StepWork(int(lasting), view.running, view.context_tokens)) / view.speedup


def is_improvement(before: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether the strains of (source, target) improve enough and the target does not become the more strained one."""
    return (
        after[1] <= after[0]
        and max(after) <= max(before) - EPSILON
        and sum(z * z for z in after) <= sum(z * z for z in before) - EPSILON * EPSILON
    )


def median_itl_s(views: Sequence[GroupView]) -> float:
    """Returns the median step time; 0 without groups."""
    return median(lasting_itl_s(view) for view in views) if views else 0.0


def target_cost(view: GroupView, itl_s: float) -> float:
    """Returns the cost of a target, lower is better. `itl_s`: median step time of the groups."""
    return view.pressure + (STEP_WEIGHT * view.itl_s / itl_s if itl_s > 0 else 0.0)


# Moves under way

RETRY_DELAY_S = 1.0
"""Seconds before a stream whose move failed may move again."""


class MovesInProgress:
    """Moves under way, by stream."""

    def __init__(self) -> None:
        self._proposals: dict[str, PlannedMove] = {}
        self._resting: dict[str, float] = {}

    def keeps(self, stream: str, now: float) -> bool:
        """Whether the stream is moving or its last move failed less than `RETRY_DELAY_S` ago."""
        return stream in self._proposals or now < self._resting.get(stream, now)

    def begin(self, proposal: PlannedMove) -> None:
        """Records the start of a move."""
        self._proposals[proposal.stream] = proposal

    def end(self, stream: str, is_moved: bool, now: float) -> PlannedMove | None:
        """Removes the move of a stream and returns it; `None` if there was no move."""
        proposal = self._proposals.pop(stream, None)
        if proposal is not None and not is_moved:
            self._resting = {name: until for name, until in self._resting.items() if until > now}
            self._resting[stream] = now + RETRY_DELAY_S
        return proposal

    def projected(self, views: Sequence[GroupView]) -> dict[str, GroupView]:
        """Returns the groups by key as if all moves had succeeded. Pages that a target reports as reserved count once."""
        after = {view.key: view for view in views}
        coming: dict[str, int] = {}
        for proposal in self._proposals.values():
            if (source := after.get(proposal.source)) is not None:
                after[source.key] = without_request(source, proposal.context)
            if (target := after.get(proposal.target)) is not None:
                coming[target.key] = coming.get(target.key, 0) + pages_of(proposal.context, target)
                after[target.key] = replace(
                    target, running=target.running + 1, context_tokens=target.context_tokens + proposal.context
                )
        for key, pages in coming.items():
            after[key] = replace(after[key], reserved_pages=max(after[key].reserved_pages, pages))
        return after
