"""A proposer that knows what will be drawn, and is wrong now and then: it makes runs of every length, with any model."""

from collections.abc import Mapping, Sequence

from phalanx_runtime.core.plan import StepPlan
from phalanx_runtime.rank.batch import BatchBuilder
from phalanx_runtime.rank.paths import NO_TOKEN
from phalanx_runtime.rank.proposer import Pageless
from phalanx_runtime.rank.row import Row

WRONG = (3, 4, 9)
"""Of each eleven output indexes those that are proposed wrongly: runs of 0, 1, 4 and 5 follow."""


class Oracle(Pageless):
    """`outputs` by the seed of their request. Behind their end it has no token."""

    def __init__(self, outputs: Mapping[int, Sequence[int]]) -> None:
        self.outputs = outputs

    def propose(self, plan: StepPlan, builder: BatchBuilder, rows: Mapping[int, Row]) -> list[int]:
        first = dict(plan.draws)
        tokens = []
        for path in plan.paths:
            if path.is_drafted:
                output = self.outputs[builder.params[plan.rows[path.request]].sampling.seed]
                for index in range(first[path.request], first[path.request] + path.depth):
                    right = output[index] if index < len(output) else NO_TOKEN
                    tokens.append(right ^ 1 if index % 11 in WRONG and right > NO_TOKEN else right)
        return tokens
