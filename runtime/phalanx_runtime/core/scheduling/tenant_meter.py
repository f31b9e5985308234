"""Divides step times and tokens among tenants.

The time of a step is divided by what the tokens of each request add to it, as the cost model predicts, its fixed time in the same
proportion. Before the model is fitted, it is divided by the number of tokens.
"""

from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork, step_work
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder

_EMPTY = StepWork(0, 0, 0)


@dataclass(slots=True)
class _Use:
    step_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


class TenantMeter:
    """Counters of each tenant since the engine's start."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def add_tokens(self, builder: StepBuilder) -> None:
        """Counts the tokens of a finished step."""
        for chunk in builder.chunks:
            use = self._use_of(chunk)
            use.output_tokens += chunk.num_gained
            if not chunk.is_decode:
                use.prompt_tokens += chunk.count

    def add_time(self, builder: StepBuilder, model: StepModel | None, seconds: float) -> None:
        """Divides the time of a finished step."""
        uses = [self._use_of(chunk) for chunk in builder.chunks]
        if all(use is uses[0] for use in uses):
            uses[0].step_s += seconds
            return
        weights = [_weight(chunk, model) for chunk in builder.chunks]
        total = sum(weights)
        for use, weight in zip(uses, weights, strict=True):
            use.step_s += seconds * weight / total

    def report(self) -> list[wire.TenantUse]:
        """Returns the counters, in the order of the tenants' first steps."""
        return [wire.TenantUse(name, use.step_s, use.prompt_tokens, use.output_tokens) for name, use in self._uses.items()]

    def _use_of(self, chunk: ScheduledChunk) -> _Use:
        tenant = chunk.request.params.hints.tenant[: wire.MAX_TENANT_NAME]
        use = self._uses.get(tenant)
        if use is None:
            name = tenant if len(self._uses) < wire.MAX_TENANTS else wire.OTHER_TENANTS
            use = self._uses.setdefault(name, _Use())
        return use


def _weight(chunk: ScheduledChunk, model: StepModel | None) -> float:
    """Returns what a chunk adds to a step, in any unit; above 0."""
    if model is None:
        return float(chunk.count)
    work = step_work([chunk.end], []) if chunk.is_decode else step_work([], [(chunk.start, chunk.count)])
    return max(model.predict(work) - model.predict(_EMPTY), 1e-9 * chunk.count)
