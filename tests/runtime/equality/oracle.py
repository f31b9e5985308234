"""A proposer with the expected outputs, wrong at some indices: it gives runs of all lengths with any model."""

from collections.abc import Mapping, Sequence

from phalanx_runtime.core.draft_tree import chain, levels, sibling_ranks
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.rank.drafting.proposer import Pageless
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.draft_paths import NO_TOKEN, DraftedPath

WRONG = (3, 4, 9)
"""Indices modulo 11 with a wrong first child: runs of 0, 1, 4 and 5 draft tokens."""


class Oracle(Pageless):
    """Drafts from `outputs`, by seed of the request."""

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
                    for level, place in zip(levels(tuple(parents)), sibling_ranks(tuple(parents)), strict=True)
                ]
                drafted.append(DraftedPath(tokens, [] if path.tree_bounds is None else parents))
        return drafted

    def _token(self, output: Sequence[int], index: int, place: int) -> int:
        """Returns a draft token: the first child is right, or the second one if the first is wrong."""
        right = output[index] if index < len(output) else NO_TOKEN
        if right == NO_TOKEN:
            return NO_TOKEN
        is_wrong = index % 11 in WRONG
        return right ^ 1 if (place == 0) == is_wrong else right if place <= 1 else right ^ (place + 1)
