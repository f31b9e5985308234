"""The lag of the engines that a test builds. With lag 1 a step is planned before the tokens of the previous one are known."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import LAST_SAMPLED, PoolShape, StepPlan, StepResult
from phalanx_runtime.engine.ports import StepRunner

_lag = 0


@contextmanager
def lagging(lag: int) -> Iterator[None]:
    """Sets the lag until the block ends. Engines run in threads, so it is a global variable."""
    global _lag
    before, _lag = _lag, lag
    try:
        yield
    finally:
        _lag = before


def lagged(limits: Limits) -> Limits:
    """Returns the limits with the lag of the test."""
    return replace(limits, async_scheduling=_lag == 1)


class PendingCounter:
    """A StepRunner that counts the tokens that were planned before they were known."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.num_pending = self.num_in_flight = 0

    @property
    def pool(self) -> PoolShape:
        return self._inner.pool

    @property
    def depth(self) -> int:
        return self._inner.depth

    def start(self, plan: StepPlan) -> None:
        self._inner.start(plan)
        self.num_pending += plan.tokens.count(LAST_SAMPLED)
        self.num_in_flight += 1

    def finish(self) -> StepResult:
        self.num_in_flight -= 1
        return self._inner.finish()
