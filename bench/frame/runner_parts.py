"""One runner as several: each has a part of its rows and pages, so that engines that keep apart take turns step by step.

What slows the machine for a while then slows all of them alike.
"""

from collections.abc import Sequence

import msgspec

from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.rank.runner import ModelRunner


class Part:
    """A part of a runner. Rows and pages of its plans count from 0, as do those of the others."""

    def __init__(self, runner: ModelRunner, part: int, parts: int, num_rows: int) -> None:
        self._runner = runner
        self.pool = PoolShape(runner.pool.num_pages // parts, runner.pool.page_size)
        self._first_page, self._first_row = part * self.pool.num_pages, part * num_rows

    def compute(self, plan: StepPlan) -> StepResult:
        """What comes of a plan."""
        self._runner.start(shifted(plan, self._first_row, self._first_page))
        return self._runner.finish()

    def fitting(self, row: int, tokens: Sequence[int], index: int) -> int:
        """How many of these tokens a row may draw, as its runner says."""
        fitting = self._runner.fitting
        return len(tokens) if fitting is None else fitting(self._first_row + row, tokens, index)


def shifted(plan: StepPlan, first_row: int, first_page: int) -> StepPlan:
    """The same plan for rows and pages that begin elsewhere."""
    return msgspec.structs.replace(
        plan,
        admitted=[msgspec.structs.replace(new, row=first_row + new.row) for new in plan.admitted],
        rows=[first_row + row for row in plan.rows],
        pages=[[first_page + page for page in pages] for pages in plan.pages],
        copies=[(first_page + source, first_page + target) for source, target in plan.copies],
    )
