"""A proposer that knows what will be drawn, and is wrong now and then: it makes runs of every length, with any model."""

from collections.abc import Mapping, Sequence

from phalanx_runtime.core.draft_tree import chain, levels, places
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.rank.drafting.proposer import Pageless
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.paths import NO_TOKEN, DraftedPath

WRONG = (3, 4, 9)
"""Of each eleven output indexes those that are proposed wrongly: runs of 0, 1, 4 and 5 follow."""


class Oracle(Pageless):
    """`outputs` by the seed of their request. Behind their end it has no token."""

    def __init__(self, outputs: Mapping[int, Sequence[int]]) -> None:
        self.outputs = outputs

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, SamplingRow]) -> list[DraftedPath]:
        first, drafted = dict(plan.draws), []
        for path in plan.paths:
            if path.is_drafted:
                output = self.outputs[builder.params[plan.rows[path.request]].sampling.seed]
                parents = path.parents or chain(path.depth)
                tokens = [
                    self._token(output, first[path.request] + level, place)
                    for level, place in zip(levels(tuple(parents)), places(tuple(parents)), strict=True)
                ]
                drafted.append(DraftedPath(tokens, [] if path.growth is None else parents))
        return drafted

    def _token(self, output: Sequence[int], index: int, place: int) -> int:
        """What is proposed for an index: the right one first, or second where the first is wrong; behind a wrong one, too."""
        right = output[index] if index < len(output) else NO_TOKEN
        if right == NO_TOKEN:
            return NO_TOKEN
        is_wrong = index % 11 in WRONG
        return right ^ 1 if (place == 0) == is_wrong else right if place <= 1 else right ^ (place + 1)
