"""Decode steps that need no work on the host but the packed update: rows, inputs, model and sampling on the device.

update -> captured: inputs -> hidden states -> logits -> sampling -> last tokens
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.device.decode_graphs import DecodeGraphs
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs

Obstacle = Literal["no row", "draft", "chunk", "draws", "grammar", "prompt logprobs", "sampling", "size"]
"""Why a step is not computed by a graph. "draws": not one token per row, in order; "size": no captured size holds the rows."""


class DeviceSampling(Protocol):
    """Samples a decode step on the device, without work on the host."""

    def __call__(self, logits: Tensor, rows: Tensor, indices: Tensor, tokens: Tensor) -> None:
        """Writes the tokens of the draws to `tokens`, [size] integers, and to `DeviceRows.last_tokens`.

        logits: [size, vocabulary]; rows: [size] int32, -1 for padding, whose token is not read; indices: [size] int32, of the
        output.
        """
        ...


def is_special(new: NewRow) -> bool:
    """Returns whether `decode_obstacle` depends on the row."""
    return new.sampling.grammar is not None or new.sampling.prompt_logprobs is not None


def decode_obstacle(plan: StepPlan, special: Mapping[int, NewRow]) -> Obstacle | None:
    """Returns why the plan is not a decode step of one sampled token per row. `special`: at least all special rows."""
    if not plan.rows:
        return "no row"
    if plan.paths:
        return "draft"
    if any(count != 1 for count in plan.counts):
        return "chunk"
    if [request for request, _ in plan.draws] != list(range(len(plan.rows))):
        return "draws"
    for row, start in zip(plan.rows, plan.starts, strict=True) if special else ():
        new = special.get(row)
        if new is None:
            continue
        if new.sampling.grammar is not None:
            return "grammar"
        if new.sampling.prompt_logprobs is not None and start + 1 < new.num_prompt:
            return "prompt logprobs"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Computes a decode step of a size: what a graph captures."""

    model: Model
    """Of all layers; on several ranks its collective must be capturable."""
    caches: list[LayerCache]
    inputs: DecodeInputs
    gather: Callable[[Tensor], Tensor]
    """Returns the logits of the whole vocabulary on every rank, so that all ranks sample the same tokens."""
    sample: DeviceSampling

    def __call__(self, size: int) -> None:
        """Computes and samples the first `size` batch rows; the tokens are then in `inputs.sampled`."""
        batch = self.inputs.build(size)
        logits = self.gather(self.model.logits(self.model.hidden(batch, self.caches)))
        self.sample(logits, self.inputs.batch_rows(size), self.inputs.batch_indices(size), self.inputs.sampled[:size])


def _samples_all(new: NewRow) -> bool:
    return True


class DeviceDecodes:
    """Follows all plans of a rank and computes those that are decode steps. `can_sample`: of the sampling in the graphs."""

    def __init__(self, inputs: DecodeInputs, graphs: DecodeGraphs, can_sample: Callable[[NewRow], bool] = _samples_all) -> None:
        self.num_computed = 0
        """Steps computed by graphs."""
        self.obstacles: Counter[Obstacle] = Counter()
        """Other steps, by obstacle."""
        self._inputs = inputs
        self._graphs = graphs
        self._can_sample = can_sample
        self._special: dict[int, NewRow] = {}
        self._unsampled: set[int] = set()
        """Rows that `can_sample` excludes."""

    def update(self, plan: StepPlan) -> None:
        """Applies a plan to the rows, before its step. Every plan, whatever computes it."""
        for new in plan.admitted:
            self._special.pop(new.row, None)
            self._unsampled.discard(new.row)
            if is_special(new):
                self._special[new.row] = new
            if not self._can_sample(new):
                self._unsampled.add(new.row)
        self._inputs.rows.update(plan)

    def exclude(self, row: int) -> None:
        """Leaves a row to other steps until another request is admitted to it."""
        self._unsampled.add(row)

    def compute(self, plan: StepPlan) -> Tensor | None:
        """Computes a plan after `update`; returns the sampled tokens, [rows] in its order, valid until the next step.

        Returns no value and counts the obstacle if the plan is not a decode step.
        """
        obstacle = decode_obstacle(plan, self._special)
        if obstacle is None and not self._unsampled.isdisjoint(plan.rows):
            obstacle = "sampling"
        if obstacle is None and self._graphs.run(len(plan.rows)) is None:
            obstacle = "size"
        if obstacle is not None:
            self.obstacles[obstacle] += 1
            return None
        self.num_computed += 1
        return self._inputs.sampled[: len(plan.rows)]
