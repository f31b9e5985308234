"""Opens the device path of a rank: rows, captured decode steps and sampling on the device."""

import time
from dataclasses import replace
from functools import partial

import torch

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.admission import EXTRA_LOGITS_ROWS
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.device.decode_graphs import (
    SHORTAGES,
    CaptureAccount,
    CaptureBudget,
    CudaGraphPool,
    DecodeGraphs,
    Shortage,
    bucket_sizes,
    left_of,
)
from phalanx_runtime.rank.device.decode_inputs import DecodeInputs
from phalanx_runtime.rank.device.decode_step import DecodeStep
from phalanx_runtime.rank.device.device_rows import DeviceRows
from phalanx_runtime.rank.device.device_step import DeviceSampler, DeviceStep
from phalanx_runtime.rank.device.limits import SAMPLING_SLOTS, DeviceLimits
from phalanx_runtime.rank.sampling.gpu.row_state import RowState
from phalanx_runtime.rank.sampling.gpu.sample import make_workspace
from phalanx_runtime.rank.sampling.sampler import Sampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.pooling import Pooler


def open_device_step(
    model: Model,
    caches: list[LayerCache],
    pool: PoolShape,
    builder: BatchBuilder,
    sampler: Sampler,
    *,
    pooler: Pooler,
    peers: Collective,
    limits: DeviceLimits,
) -> DeviceStep:
    """Returns the device path, with the decode steps captured. All `peers`, the ranks of the model, call it together.

    Padding rows write no page: the model's kernels skip negative slots.
    """
    device = caches[0].k.device
    num_pages = pool.num_pages if pool.num_parts else 0
    rows = DeviceRows(limits.max_num_seqs, limits.max_model_len, pool.page_size, device, num_pages_with_parts=num_pages)
    state = RowState(model.vocab_size, limits.max_num_seqs, device, SAMPLING_SLOTS, last_tokens=rows.last_tokens)
    state.allocate_slots()
    sampling = DeviceSampler(
        state=state, workspace=make_workspace(model.vocab_size, limits.max_num_seqs + EXTRA_LOGITS_ROWS, device)
    )
    inputs = DecodeInputs(rows, model.kv.kv_heads, pool.window)
    compute = DecodeStep(model=model, peers=peers, caches=caches, inputs=inputs, sample=sampling)
    make_graph = limits.make_graph or CudaGraphPool().make_graph
    graphs, adapted = (
        DecodeGraphs(bucket_sizes(limits.max_num_seqs), replace(compute, has_adapters=has_adapters), make_graph)
        for has_adapters in (False, True)
    )
    step = DeviceStep(
        model=model,
        peers=peers,
        caches=caches,
        builder=builder,
        inputs=inputs,
        graphs=graphs,
        adapted_graphs=adapted,
        sampler=sampling,
        pooler=pooler,
        sampling_rows=sampler.rows,
    )
    with torch.inference_mode():
        step.account = _capture(graphs, adapted if builder.has_adapters else None, limits.budget, device, peers)
    return step


def _capture(
    graphs: DecodeGraphs, adapted: DecodeGraphs | None, budget: CaptureBudget, device: torch.device, peers: Collective
) -> CaptureAccount:
    """Captures steps without adapters, then within what they left of the budget steps with some."""
    agree = partial(_agree, peers) if peers.world_size > 1 else None
    measures = (time.perf_counter, partial(_used_bytes, device), agree)
    account = graphs.capture(budget, *measures)
    return account if adapted is None else account.with_adapted(adapted.capture(left_of(budget, account), *measures))


def _agree(peers: Collective, lack: Shortage) -> Shortage:
    """Returns the first shortage of all ranks."""
    lacks = [SHORTAGES[index] for (index,) in peers.all_gather_integers([SHORTAGES.index(lack)])]
    return next(filter(None, lacks), "")


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()  # as the next capture does: what eager steps left is no memory of graphs
    return torch.cuda.memory_reserved(device)
