"""The seam between the engine loop and the ranks."""

from typing import Protocol

from phalanx_runtime.core.plan import PoolShape, StepPlan, StepResult


class StepRunner(Protocol):
    """Runs step plans on all ranks of the group. Implemented by `phalanx_runtime.rank`; tests have fakes."""

    @property
    def pool(self) -> PoolShape:
        """The page pool that every rank made."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """The tokens drawn by this step, after all ranks computed it. Raises phalanx_runtime.errors.PeerLost when a rank is gone."""
        ...

