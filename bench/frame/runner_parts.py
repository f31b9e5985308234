"""Divides one model runner among several engines that take turns step by step.

A slowdown of the machine then affects all engines alike.
"""

from collections.abc import Sequence

import msgspec

from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.rank.runner import ModelRunner


class Part:
    """One engine's share of a runner's rows and pages; rows and pages of its plans count from 0."""

    def __init__(self, runner: ModelRunner, part: int, parts: int, num_rows: int) -> None:
        self._runner = runner
        self.pool = PoolShape(runner.pool.num_pages // parts, runner.pool.page_size)
        self._first_page, self._first_row = part * self.pool.num_pages, part * num_rows

    def compute(self, plan: StepPlan) -> StepResult:
        self._runner.start(shifted(plan, self._first_row, self._first_page))
        return self._runner.finish()

    def fitting(self, row: int, tokens: Sequence[int], index: int) -> int:
        """Returns how many of these draft tokens the sampler of the row allows."""
        return self._runner.fitting(self._first_row + row, tokens, index)


def shifted(plan: StepPlan, first_row: int, first_page: int) -> StepPlan:
    """Returns the plan with rows and pages offset by `first_row` and `first_page`."""
    return msgspec.structs.replace(
        plan,
        admitted=[msgspec.structs.replace(new, row=first_row + new.row) for new in plan.admitted],
        rows=[first_row + row for row in plan.rows],
        pages=[[first_page + page for page in pages] for pages in plan.pages],
        copies=[(first_page + source, first_page + target) for source, target in plan.copies],
    )
