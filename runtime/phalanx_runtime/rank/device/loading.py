"""Opens the device path of a rank: rows, captured decode steps and sampling on the device."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from phalanx_runtime.core.admission import EXTRA_LOGITS_ROWS
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.gpu import can_attend
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.device.decode_graphs import (
    CaptureBudget,
    CudaGraphPool,
    DecodeGraphs,
    StepGraph,
    bucket_sizes,
    default_budget,
)
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs
from phalanx_runtime.rank.device.device_decodes import DecodeStep, DeviceDecodes
from phalanx_runtime.rank.device.device_rows import DeviceRows
from phalanx_runtime.rank.device.device_step import DeviceSampler, DeviceStep
from phalanx_runtime.rank.sampling.gpu.row_state import NUM_SLOTS, RowState
from phalanx_runtime.rank.sampling.gpu.sample import make_workspace
from phalanx_runtime.rank.sampling.sampler import Sampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)

SLOT_BYTES_PER_TOKEN = 9
"""Of a row's token counts, bias and masks."""
WORKSPACE_BYTES = 64 << 20
"""Page tables, inputs and intermediate results of sampling; below 64 MiB up to 256 requests of 131,072 tokens."""


def device_obstacle(model: Model, dtype: torch.dtype, world_size: int) -> str | None:
    """Returns why a rank computes steps without the device path, if it does."""
    if world_size > 1:
        return "several ranks"
    if not isinstance(model, Decoder):
        return "the model is not fused"
    if not all(can_attend(dim, dtype) for dim in model.kv.head_dims):
        return f"no attention kernel for heads of {max(model.kv.head_dims)} in {dtype}"
    return None


def capture_budget(spec: RankSpec, model: Model, dtype: torch.dtype, device: torch.device) -> CaptureBudget | None:
    """Returns the budget of the captures; no value if the host launches and samples the steps."""
    if device.type == "cpu" or spec.engine.enforce_eager:
        return None
    obstacle = device_obstacle(model, dtype, spec.world_size)
    if obstacle is not None:
        log.warning("the host launches and samples each step", extra={"why": obstacle})
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return default_budget(int(total * spec.engine.gpu_memory_utilization))


def reserved_bytes(budget: CaptureBudget, vocab_size: int) -> int:
    """Returns the memory that the device path takes after the page pool: graphs, slots of the sampler, and workspaces."""
    return budget.num_bytes + NUM_SLOTS * SLOT_BYTES_PER_TOKEN * vocab_size + WORKSPACE_BYTES


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Sizes of the device path."""

    max_num_seqs: int
    max_model_len: int
    budget: CaptureBudget
    make_graph: Callable[[], StepGraph] | None = None
    """CUDA graphs by default."""


def open_device_step(
    model: Model,
    caches: list[LayerCache],
    pool: PoolShape,
    builder: BatchBuilder,
    sampler: Sampler,
    *,
    limits: DeviceLimits,
) -> DeviceStep:
    """Returns the device path, with the decode steps captured.

    Padding rows write no page: the model's kernels skip negative slots.
    """
    device = caches[0].k.device
    rows = DeviceRows(limits.max_num_seqs, limits.max_model_len, pool.page_size, device)
    state = RowState(model.vocab_size, limits.max_num_seqs, device, last_tokens=rows.last_tokens)
    state.allocate_slots()
    sampling = DeviceSampler(
        state=state, workspace=make_workspace(model.vocab_size, limits.max_num_seqs + EXTRA_LOGITS_ROWS, device)
    )
    inputs = DecodeInputs(rows, model.kv.kv_heads)
    compute = DecodeStep(model=model, caches=caches, inputs=inputs, gather=_whole, sample=sampling)
    graphs = DecodeGraphs(bucket_sizes(limits.max_num_seqs), compute, limits.make_graph or CudaGraphPool().make_graph)
    decodes = DeviceDecodes(inputs, graphs, lambda new: step.can_decode(new))
    step = DeviceStep(
        model=model, caches=caches, builder=builder, rows=rows, decodes=decodes, sampler=sampling, sampling_rows=sampler.rows
    )
    with torch.inference_mode():
        step.account = graphs.capture(limits.budget, time.perf_counter, partial(_used_bytes, device))
    return step


def _whole(logits: Tensor) -> Tensor:
    """Returns the logits of the only rank."""
    return logits


def _used_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" and torch.cuda.is_available() else 0
