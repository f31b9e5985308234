"""How a group would stand with or without a request, and the one number by which moves are judged.

    strain = max(pressure, itl_s / itl_scale_s)
    a move (or several at once) helps  iff  the larger strain of the two groups falls by EPSILON or more,
                                            the target stays at most as strained as the source,
                                            and the sum of squares falls

So between arrivals only so many moves happen: each lowers the sum of squares over all groups, which is never negative, by at
least EPSILON^2, and an error of the measured strains below EPSILON / 2 makes no move undo the one before it.
Source: balancing.md 3.4 rung 5 and stability (ii).
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from phalanx_api.cost import StepWork
from phalanx_router.balancing.records import Proposal
from phalanx_router.routing.view import GroupView

EPSILON = 0.03
LASTS_S = 2.0
"""Prompts that take so long to compute count wholly in the time of a step; of those that are done sooner, their part."""
STEP_WEIGHT = 0.3
"""How much the time of a step counts beside the pages when a target is chosen."""


def pages_of(context: int, view: GroupView) -> int:
    """Pages that so many tokens fill there."""
    return -(-context // view.page_size)


def without(view: GroupView, context: int) -> GroupView:
    """The group after a request of this context left."""
    return replace(
        view,
        running=max(0, view.running - 1),
        context_tokens=max(0, view.context_tokens - context),
        used_pages=max(0, view.used_pages - pages_of(context, view)),
    )


def joined(view: GroupView, context: int) -> GroupView:
    """The group after a request of this context came."""
    return replace(
        view,
        running=view.running + 1,
        context_tokens=view.context_tokens + context,
        used_pages=view.used_pages + pages_of(context, view),
    )


def strain(view: GroupView, itl_scale_s: float | None) -> float:
    """How much a group has to bear. Without a scale the time of a step does not count."""
    return max(view.pressure, lasting_itl_s(view) / itl_scale_s if itl_scale_s else 0.0)


def lasting_itl_s(view: GroupView) -> float:
    """The time between tokens as it stays: a prompt that is nearly computed makes no group worth leaving."""
    lasting = min(1.0, view.backlog_s / LASTS_S) * view.prompt_tokens_per_step
    return view.speed * view.model.predict(StepWork(int(lasting), view.running, view.context_tokens)) / view.speedup


def does_help(before: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether strains of (source, target) become better: no overshoot, and enough to be worth it."""
    return (
        after[1] <= after[0]
        and max(after) <= max(before) - EPSILON
        and sum(z * z for z in after) <= sum(z * z for z in before) - EPSILON * EPSILON
    )


def median_itl_s(views: Sequence[GroupView]) -> float:
    """The median time of a step; 0 without groups."""
    return median(lasting_itl_s(view) for view in views) if views else 0.0


def appeal(view: GroupView, itl_s: float) -> float:
    """By which targets are ordered, the least first: pages, and the time of a step over the median one."""
    return view.pressure + (STEP_WEIGHT * view.itl_s / itl_s if itl_s > 0 else 0.0)


# Moves that are under way, and the groups as they will be when those have ended. A stream whose move failed rests a while.

REST_S = 1.0


class Moving:
    """Proposals that were made and have not ended, by stream."""

    def __init__(self) -> None:
        self._proposals: dict[str, Proposal] = {}
        self._resting: dict[str, float] = {}

    def keeps(self, stream: str, now: float) -> bool:
        """Whether this stream is moving, or rests."""
        return stream in self._proposals or now < self._resting.get(stream, now)

    def begin(self, proposal: Proposal) -> None:
        """Notes a move."""
        self._proposals[proposal.stream] = proposal

    def end(self, stream: str, is_moved: bool, now: float) -> Proposal | None:
        """Forgets a move, and gives it back; None when there was none."""
        proposal = self._proposals.pop(stream, None)
        if proposal is not None and not is_moved:
            self._resting = {name: until for name, until in self._resting.items() if until > now}
            self._resting[stream] = now + REST_S
        return proposal

    def settled(self, views: Sequence[GroupView]) -> dict[str, GroupView]:
        """The groups by key, as if all moves had succeeded. What a target says it reserved is not counted twice."""
        after = {view.key: view for view in views}
        coming: dict[str, int] = {}
        for proposal in self._proposals.values():
            if (source := after.get(proposal.source)) is not None:
                after[source.key] = without(source, proposal.context)
            if (target := after.get(proposal.target)) is not None:
                coming[target.key] = coming.get(target.key, 0) + pages_of(proposal.context, target)
                after[target.key] = replace(
                    target, running=target.running + 1, context_tokens=target.context_tokens + proposal.context
                )
        for key, pages in coming.items():
            after[key] = replace(after[key], reserved_pages=max(after[key].reserved_pages, pages))
        return after
