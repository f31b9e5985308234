"""Fills `LAST_SAMPLED` tokens of a plan with those that the previous plan sampled."""

from collections.abc import Callable
from itertools import accumulate

import msgspec

from phalanx_runtime.core.step_plan import LAST_SAMPLED, StepPlan, StepResult


class LastSampled:
    """The tokens of the latest step, for rank 0 if it samples."""

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._result: Callable[[], StepResult] | None = None

    def record(self, plan: StepPlan, result: Callable[[], StepResult]) -> None:
        """Sets the latest step. `result`: waits for it."""
        self._plan, self._result = plan, result

    def fill(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with tokens for `LAST_SAMPLED`, for which it waits for the latest step.

        Raises KeyError for a row without a draw in that step.
        """
        if LAST_SAMPLED not in plan.tokens:
            return plan
        latest, tokens = self._by_row(), list(plan.tokens)
        for row, end in zip(plan.rows, accumulate(plan.counts), strict=True):
            if tokens[end - 1] == LAST_SAMPLED:
                tokens[end - 1] = latest[row]
        return msgspec.structs.replace(plan, tokens=tokens)

    def _by_row(self) -> dict[int, int]:
        if self._plan is None or self._result is None:
            return {}
        plan, result = self._plan, self._result()
        ends = accumulate(result.run_lengths or [1] * len(plan.draws))
        return {plan.rows[request]: result.tokens[end - 1] for (request, _), end in zip(plan.draws, ends, strict=True)}
