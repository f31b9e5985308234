"""Whether a rank has the device path, its sizes, and the memory that it takes. Imports no Triton, which CPU ranks do without."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.core.admission import EXTRA_LOGITS_ROWS
from phalanx_runtime.core.step_plan import StepPlan, StepResult
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.operators import launch_obstacle
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.device.decode_graphs import CaptureAccount, CaptureBudget, StepGraph, default_budget
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)

SAMPLING_SLOTS = 32
"""Rows with penalties, and with a bias, that the device samples."""
SLOT_BYTES_PER_TOKEN = 9
"""Of a row's token counts, bias and masks."""
DRAW_BYTES = 68 << 10
"""Of a sampled row: its candidates, and results of blocks of a vocabulary of up to 450,000 tokens."""
NUM_TABLES = 3
"""Page tables of a row: those of the rows, of the inputs, and of parts of pages."""
MAX_TABLE_BLOCK = 512
"""Pages of a block, of which a table is a multiple."""
OTHER_BYTES = 24 << 20
"""Other inputs and intermediate results."""


def device_obstacle(model: Model, dtype: torch.dtype, stage: Stage) -> str | None:
    """Returns why a rank computes steps without the device path, if it does."""
    if stage.count > 1:
        return "several pipeline stages"
    if not isinstance(model, Decoder):
        return "the model is not fused"
    reason = launch_obstacle()
    if reason is not None:
        return reason
    from phalanx_runtime.model.attention.gpu import can_attend  # imports Triton

    if not all(can_attend(dim, dtype) for dim in model.kv.head_dims):
        return f"no attention kernel for heads of {max(model.kv.head_dims)} in {dtype}"
    return None


def capture_budget(
    spec: RankSpec, model: Model, pipeline: Pipeline, dtype: torch.dtype, device: torch.device
) -> CaptureBudget | None:
    """Returns the budget of the captures; no value if the host launches and samples the steps of any rank."""
    if device.type == "cpu" or spec.engine.enforce_eager:
        return None
    obstacle = device_obstacle(model, dtype, pipeline.stage)
    if any(has_obstacle for (has_obstacle,) in pipeline.world.all_gather_integers([int(obstacle is not None)])):
        log.warning("the host launches and samples each step", extra={"why": obstacle or "another rank has an obstacle"})
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return default_budget(int(total * spec.engine.gpu_memory_utilization))


def reserved_bytes(budget: CaptureBudget | None, vocab_size: int, engine: EngineConfig, longest: int) -> int:
    """Returns the memory that the device path takes after the page pool: graphs, slots of the sampler, and workspaces.

    Without a budget the rank has none. `longest`: tokens of the longest request.
    """
    if budget is None:
        return 0
    slots = SAMPLING_SLOTS * SLOT_BYTES_PER_TOKEN * vocab_size
    return budget.num_bytes + slots + workspace_bytes(engine.max_num_seqs, -(-longest // engine.page_size)) + OTHER_BYTES


def workspace_bytes(num_rows: int, max_pages: int) -> int:
    """Returns at least the memory of page tables with `max_pages` each, and of sampling."""
    table_bytes = 4 * (max_pages + MAX_TABLE_BLOCK)
    return num_rows * NUM_TABLES * table_bytes + (num_rows + EXTRA_LOGITS_ROWS) * DRAW_BYTES


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Sizes of the device path."""

    max_num_seqs: int
    max_model_len: int
    budget: CaptureBudget
    make_graph: Callable[[], StepGraph] | None = None
    """CUDA graphs by default."""


class StepQueue(Protocol):
    """Queues the steps of a rank on its device. Implemented in `device_step`.

    Each rank of a model follows all plans, and all give equal answers to `can_launch`.
    """

    @property
    def account(self) -> CaptureAccount:
        """What the captures took."""
        ...

    def update(self, plan: StepPlan) -> None:
        """Applies a plan to the rows, before its step. Every plan, whatever samples it."""
        ...

    def can_launch(self, plan: StepPlan) -> bool:
        """Returns whether the device can sample the step; else the host must. Once per plan, after `update`."""
        ...

    def launch(self, plan: StepPlan) -> Callable[[], StepResult] | None:
        """Queues a step that it can. Returns a call that waits for its result, on the sampling rank."""
        ...

    def record(self, plan: StepPlan, result: StepResult | None) -> None:
        """Stores the tokens of a step that the host sampled. All ranks call it; the sampling rank has the result."""
        ...
