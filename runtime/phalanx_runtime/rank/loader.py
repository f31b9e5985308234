"""A rank ready to compute: device, dtype, weights, page pool, runner."""

import ctypes
import logging
from functools import partial
from pathlib import Path

import torch

from phalanx_api.wire import Served
from phalanx_api.wire.leader import MemoryAccount
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.invariant import why_not
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import Form, KvLayout, Model, ModelFolder
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.drafting.loading import load_drafting, make_proposer
from phalanx_runtime.rank.drafting.proposer import Proposer
from phalanx_runtime.rank.kv_sizing import KvSizing, measure_kv_sizing
from phalanx_runtime.rank.memory.kv_cache import longest_request, make_caches, page_bytes
from phalanx_runtime.rank.memory.memory_profiler import make_memory_profiler
from phalanx_runtime.rank.process.cgroup import System, cpu_limit, memory_limit, rank_threads
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.grammar import RankGrammars, read_tokenizer
from phalanx_runtime.rank.sampling.sampler import Sampler
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankReady, RankSpec

log = logging.getLogger(__name__)

SECOND_LAYOUT_SHARE = 0.1
"""Share of the memory limit that a second copy of the weights, for single rows, may take in a pod."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def choose_device(spec: RankSpec) -> torch.device:
    """This rank's GPU where the machine has one for it, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= spec.local_world_size:
        return torch.device("cuda", spec.local_rank)
    return torch.device("cpu")


def prepare_process(spec: RankSpec, system: System) -> None:
    """Sets the threads of this rank. What loading frees goes back at once, so that no copy of a weight outlives its use."""
    torch.set_num_threads(rank_threads(spec.num_threads, cpu_limit(system), spec.local_world_size))
    _malloc_options((_M_MMAP_THRESHOLD, 1 << 20))


def keep_freed_memory() -> None:
    """From now on freed memory stays with the process: mapping it anew in every step costs more than using it."""
    _malloc_options((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1))


def _malloc_options(*options: tuple[int, int]) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for name, value in options:
            libc.mallopt(name, value)


def load_rank(spec: RankSpec, collective: Collective, device: torch.device, system: System) -> tuple[ModelRunner, RankReady]:
    """The rank's runner, and what it tells the supervisor. Raises ModelError, PeerLost, DraftLost."""
    pipeline = Pipeline(collective, spec.pipeline_parallel_size)
    source = open_model(Path(spec.model_dir), spec.engine.model_impl)
    form = _form(spec, source, pipeline, device, system)
    dtype = form.dtype
    gauge = make_memory_profiler(device)
    before = gauge.held()
    model = source.load(pipeline.peers, form, stage=pipeline.stage)
    if spec.engine.batch_invariant and (why := why_not(model, dtype, spec.engine.page_size)):
        raise ModelError(f"batch-invariant: {why}")
    drafting = load_drafting(spec, model, pipeline, dtype, device)
    keep_freed_memory()
    measure = partial(
        measure_kv_sizing,
        spec,
        model,
        max_position=source.max_position,
        pipeline=pipeline,
        dtype=dtype,
        system=system,
        gauge=gauge,
    )
    room = measure(drafting=drafting)
    if spec.engine.speculative_method == "draft" and not room.holds(spec, source.max_position):
        drafting = drafting.without(f"beside the draft model {room.lack}")
        room = measure(drafting=drafting)
    max_model_len = longest_request(spec.engine.max_model_len, source.max_position, room.num_pages, spec.engine.page_size)
    caches = make_caches(model.kv, room.num_pages, spec.engine.page_size, dtype, device)
    pool = PoolShape(room.num_pages, spec.engine.page_size)
    grammars = RankGrammars(partial(read_tokenizer, Path(spec.model_dir), model.vocab_size), model.vocab_size)
    proposer = (
        make_proposer(spec, drafting, target=model, caches=caches, pool=pool, peers=pipeline.peers)
        if pipeline.stage.is_first
        else None
    )
    runner = make_runner(
        model, caches, pool=pool, pipeline=pipeline, dtype=dtype, device=device, grammars=grammars, proposer=proposer
    )
    account = _memory_account(spec, room, weights_bytes=max(room.held_bytes - before, model.num_bytes + drafting.num_bytes))
    log.info("memory of rank %d: %s", spec.rank, account)
    served = _served(spec, dtype, model.kv, room.group_page_bytes) if spec.rank == 0 else Served()
    return runner, RankReady(
        num_pages=room.num_pages, page_size=spec.engine.page_size, max_model_len=max_model_len, memory=account, served=served
    )


def _memory_account(spec: RankSpec, sizing: KvSizing, weights_bytes: int) -> MemoryAccount:
    return MemoryAccount(
        rank=spec.rank,
        weights_bytes=weights_bytes,
        activations_bytes=sizing.needs.activations,
        logits_sampler_bytes=sizing.needs.logits_sampler,
        kv_pool_bytes=sizing.num_pages * sizing.page_bytes,
        kv_bytes_per_token=sizing.page_bytes // spec.engine.page_size,
        total_bytes=sizing.usable_bytes,
    )


def _served(spec: RankSpec, dtype: torch.dtype, kv: KvLayout, group_page_bytes: int) -> Served:
    """What routers need to know of the group. Of its pages rank 0 tells its own part: model and ranks give the others'."""
    name = str(dtype).removeprefix("torch.")
    stages = spec.pipeline_parallel_size
    heads = f"{kv.kv_heads}x{'+'.join(str(dim) for dim in sorted(set(kv.head_dims)))}x{len(kv.head_dims)}"
    layout = f"tp{spec.world_size // stages} pp{stages} {name} page{spec.engine.page_size} heads{heads}"
    return Served(model_hash(Path(spec.model_dir), name, spec.engine.quantization), layout, group_page_bytes, spec.model_version)


def _form(spec: RankSpec, source: ModelFolder, pipeline: Pipeline, device: torch.device, system: System) -> Form:
    """The fastest form that this machine has memory for."""
    processor = read_processor()
    dtype = choose_dtype(spec.engine.dtype, source.dtype, device, processor)
    num_weights = source.num_linear_weights(pipeline.peers.rank, pipeline.peers.world_size, pipeline.stage)
    spare = int(SECOND_LAYOUT_SHARE * memory_limit(system)) // spec.local_world_size
    kernels = choose_kernels(
        dtype,
        device,
        cpu=processor,
        spare_bytes=spare,
        num_bytes=num_weights * dtype.itemsize,
        precision=spec.engine.quantization or "bf16",
    )
    positions = max(source.max_position, spec.engine.max_model_len or 0)
    return Form(
        dtype=dtype,
        device=device,
        kernels=kernels,
        positions=positions,
        has_exit=spec.engine.speculative_method == "self_draft",
        is_fixed=spec.engine.batch_invariant,
    )


def make_runner(
    model: Model,
    caches: list[LayerCache],
    pool: PoolShape,
    pipeline: Pipeline,
    dtype: torch.dtype,
    device: torch.device,
    grammars: RankGrammars | None = None,
    proposer: Proposer | None = None,
) -> ModelRunner:
    """A runner of this model over these pages."""
    layer_page_bytes = page_bytes(model.kv, pool.page_size, dtype) // len(model.kv.head_dims)
    shape = CacheShape(pool.page_size, model.kv.kv_heads, layer_page_bytes)
    builder, sampler = BatchBuilder(shape, dtype, device), Sampler(model.vocab_size, grammars)
    return ModelRunner(model, caches, builder=builder, pool=pool, pipeline=pipeline, sampler=sampler, proposer=proposer)
