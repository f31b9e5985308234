"""A decode step that needs no work on the host but the packed update: what a graph captures.

inputs -> hidden states -> logits -> sampling -> last tokens
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.logits import all_gather_logits
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs

GraphObstacle = Literal["no row", "drafts", "chunk", "draws", "sampling", "size"]
"""Why no graph computes a step.

draws: not one token per row, in order; sampling: a row has logprobs; size: no captured size holds the rows.
"""


class DeviceSampling(Protocol):
    """Samples a decode step on the device, without work on the host."""

    def __call__(self, logits: Tensor, rows: Tensor, indices: Tensor, tokens: Tensor) -> None:
        """Writes the tokens of the draws to `tokens`, [size] integers, and to `DeviceRows.last_tokens`.

        logits: [size, vocabulary]; rows: [size] int32, -1 for padding, whose token is not read; indices: [size] int32, of the
        output.
        """
        ...


def decode_obstacle(plan: StepPlan) -> GraphObstacle | None:
    """Returns why the plan is not a decode step of one sampled token per row."""
    if not plan.rows:
        return "no row"
    if plan.paths:
        return "drafts"
    if any(count != 1 for count in plan.counts):
        return "chunk"
    if [request for request, _ in plan.draws] != list(range(len(plan.rows))):
        return "draws"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Computes a decode step of a size: what a graph captures."""

    model: Model
    """Of all layers."""
    peers: Collective
    """The ranks of the model. Each samples from equal logits, so that all have the tokens."""
    caches: list[LayerCache]
    inputs: DecodeInputs
    sample: DeviceSampling
    has_adapters: bool = False
    """Whether rows may have adapters; else their launches are left out."""

    def __call__(self, size: int) -> None:
        """Computes and samples the first `size` batch rows; the tokens are then in `inputs.sampled`."""
        batch = self.inputs.build(size, has_adapters=self.has_adapters)
        logits = all_gather_logits(self.model, self.model.logits(self.model.hidden(batch, self.caches)), self.peers)
        self.sample(logits, self.inputs.batch_rows(size), self.inputs.batch_indices(size), self.inputs.sampled[:size])
