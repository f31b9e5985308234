"""Loads a rank: device, dtype, weights, page pool, runner."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from phalanx_api.wire import Served
from phalanx_api.wire.leader import MemoryAccount
from phalanx_runtime.checkpoint.encoders import is_encoder
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.admission import Limits, check_images
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.page_format import choose_format, codes_name
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.config import read_json
from phalanx_runtime.model.copies import GPU_READERS
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.invariant import invariance_obstacle
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import LoadOptions, Model, ModelFolder
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.states.mixers import mixers_of, states_of
from phalanx_runtime.model.states.store import RowStates
from phalanx_runtime.progress import WeightProgress
from phalanx_runtime.rank.calibrated import use_calibration
from phalanx_runtime.rank.device.limits import DeviceLimits, StepQueue, capture_budget, reserved_bytes
from phalanx_runtime.rank.drafting.loading import Drafting, load_drafting, make_proposer, without_drafting
from phalanx_runtime.rank.drafting.proposer import NO_PROPOSER, Proposer
from phalanx_runtime.rank.encoder_loading import load_encoder_rank
from phalanx_runtime.rank.kernels.loading import KernelLoader, open_kernels
from phalanx_runtime.rank.kv_sizing import KvSizing, agree_on_host_pages, measure_kv_sizing
from phalanx_runtime.rank.memory.kv_cache import divide_caches, make_caches, page_bytes
from phalanx_runtime.rank.memory.memory_profiler import make_memory_profiler
from phalanx_runtime.rank.memory.row_states import open_states
from phalanx_runtime.rank.process.cgroup import System, cpu_limit, memory_limit, rank_threads
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS, GrammarSource, RankGrammars, read_tokenizer
from phalanx_runtime.rank.sampling.registry import choose_sampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.images import ImageCache, no_images, step_embeddings
from phalanx_runtime.rank.step.page_tables import CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank.step.pooling import Pooler
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.host_pages import NO_HOST_PAGES, NO_ROWS, HostCopies, HostPages
from phalanx_runtime.rank.tiers.opening import NO_DISK, open_disk
from phalanx_runtime.rank.tiers.state_slots import StateSlots, record_bytes
from phalanx_runtime.rank_spec import RankReady, RankSpec

log = logging.getLogger(__name__)

SECOND_LAYOUT_SHARE = 0.1
"""Maximum share of the memory limit for a second copy of the weights, for single rows."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def choose_device(spec: RankSpec) -> torch.device:
    """Returns the rank's GPU, or the CPU if the pod has none. Raises ModelError if there are fewer GPUs than local ranks."""
    device = device_of(spec, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    return device


def device_of(spec: RankSpec, num_devices: int) -> torch.device:
    """Returns the device of a rank among `num_devices` GPUs. Raises ModelError if each local rank cannot have one."""
    if 0 < num_devices < spec.local_world_size:
        raise ModelError(
            f"{num_devices} GPUs for {spec.local_world_size} ranks in this pod: the count of a resource claim must be the"
            " number of ranks per pod; an empty CUDA_VISIBLE_DEVICES makes the ranks compute on CPU"
        )
    return torch.device("cuda", spec.local_rank) if num_devices else torch.device("cpu")


def prepare_process(spec: RankSpec, system: System) -> None:
    """Sets the threads, and returns freed memory at once: loading keeps no copies of weights."""
    torch.set_num_threads(rank_threads(spec.num_threads, cpu_limit(system), spec.local_world_size))
    _malloc_options((_M_MMAP_THRESHOLD, 1 << 20))


def keep_freed_memory() -> None:
    """Keeps freed memory in the process, for steps to reuse."""
    _malloc_options((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1))


def _malloc_options(*options: tuple[int, int]) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for name, value in options:
            libc.mallopt(name, value)


def load_rank(
    spec: RankSpec, collective: Collective, device: torch.device, system: System, progress: WeightProgress | None = None
) -> tuple[ModelRunner, RankReady]:
    """Returns the runner, and the report for the supervisor. Raises ModelError, PeerLost, DraftLost."""
    pipeline = Pipeline(collective, spec.pipeline_parallel_size)
    if is_encoder(read_json(Path(spec.model_dir))):
        return load_encoder_rank(spec, pipeline, device, system)
    source = open_model(Path(spec.model_dir), spec.engine.model_impl, spec.engine.enable_expert_parallel, may_classify=True)
    options = replace(_choose_load_options(spec, source, pipeline, device, system), progress=progress)
    return _load_decoder_rank(spec, source, options, pipeline, system)


def _load_decoder_rank(
    spec: RankSpec, source: ModelFolder, options: LoadOptions, pipeline: Pipeline, system: System
) -> tuple[ModelRunner, RankReady]:
    dtype, device, page_size = options.dtype, options.device, spec.engine.page_size
    kernels = open_kernels(device, dtype, page_size, spec.engine.kv_cache_dtype)
    bytes_before = (profiler := make_memory_profiler(device)).allocated_bytes()
    model = _load_model(spec, source, pipeline, options)
    calibration = use_calibration(spec, model, pipeline, device)
    states = open_states(model, spec.engine, device, pipeline.world)
    drafting = load_drafting(spec, model, pipeline, dtype, device)
    kernels.load_models(model, pipeline.peers.world_size, draft=drafting.model)
    budget = capture_budget(spec, model, pipeline, dtype, device)
    keep_freed_memory()
    measure = partial(
        measure_kv_sizing,
        spec,
        model,
        max_position=source.max_position,
        pipeline=pipeline,
        dtype=dtype,
        system=system,
        profiler=profiler,
        reserved_bytes=partial(reserved_bytes, budget, model.vocab_size, spec.engine),
    )
    sizing, drafting = _fit_drafting(spec, drafting, measure, source.max_position)
    max_model_len, window, peers = sizing.max_model_len(spec, source.max_position), sizing.groups.window, pipeline.peers
    format = choose_format(spec.engine.kv_cache_dtype, model.kv.head_dims)
    num_pages, num_parts, has_disk = sizing.num_pages, sizing.num_parts, spec.engine.disk_cache_path is not None
    caches = make_caches(model.kv, num_pages, page_size, dtype, device, format=format, num_parts=num_parts)
    whole = page_bytes(model.kv, page_size, dtype, format)
    host_pages = agree_on_host_pages(spec, sizing.host_page_bytes(whole), pipeline.world, *states.in_host(model, window))
    served = _served(spec, dtype, model, sizing, window, calibration=calibration)
    shape = PoolShape(num_pages, page_size, *host_pages, has_disk=has_disk, window=window, has_blocks=sizing.groups.has_blocks)
    shape = states.in_pool(shape, sizing.group_page_bytes)
    state_bytes = states.fit(model, shape, spec.engine.max_num_seqs, device)
    pool = msgspec.structs.replace(shape, num_parts=num_parts, num_host_parts=host_pages[0] * num_parts // num_pages)
    grammars = RankGrammars(partial(read_tokenizer, Path(spec.model_dir), model.vocab_size), model.vocab_size)
    proposer = make_proposer(spec, drafting, model, caches, pool=pool, peers=peers) if pipeline.stage.is_first else NO_PROPOSER
    limits = None if budget is None else DeviceLimits(spec.engine.max_num_seqs, max_model_len, budget)
    kernels.load_steps(model, -(-max_model_len // page_size) if limits else 0, has_window=window > 0, has_parts=num_parts > 0)
    disks = open_disk(spec, served, record_bytes(sizing.disk_bytes(whole), model, pool), pipeline.world)
    host = open_host_pages(caches, model.kv.windows, pool, disks, states_of(model))
    runner = make_runner(
        model, caches, pool, pipeline, dtype, device=device, grammars=grammars, proposer=proposer, device_limits=limits, host=host
    )
    weights_bytes = max(sizing.held_bytes - states.num_bytes - bytes_before, model.num_bytes + drafting.num_bytes)
    account = _memory_account(spec, sizing, weights_bytes, runner.device_step, kernels, state_bytes=state_bytes)
    kernels.start_serving()
    ready = RankReady(num_pages=num_pages, page_size=page_size, max_model_len=max_model_len, memory=account, served=served)
    return runner, msgspec.structs.replace(ready, image_obstacle=_image_obstacle(model, spec, max_model_len))


def _image_obstacle(model: Model, spec: RankSpec, max_model_len: int) -> str:
    """Returns why no request may have images, if the model takes them."""
    if not isinstance(model, Decoder):
        return "its text is computed by the code of transformers, not by the fused decoder (--model-impl)"
    if model.images is None:
        return ""
    if model.images.num_levels - 1 > len(model.layers):
        return f"the first pipeline stage needs at least {model.images.num_levels - 1} layers, which images change"
    refusal = check_images([model.images.blank()], Limits.of(spec.engine, max_model_len))
    return "" if refusal is None else refusal.message


def _fit_drafting(
    spec: RankSpec, drafting: Drafting, measure: Callable[..., KvSizing], max_position: int
) -> tuple[KvSizing, Drafting]:
    """Returns the sizing, without the draft model if that leaves too few pages."""
    sizing = measure(drafting=drafting)
    if spec.engine.speculative_method == "draft" and not sizing.holds(spec, max_position):
        drafting = without_drafting(f"with the draft model {sizing.lack}")
        sizing = measure(drafting=drafting)
    return sizing, drafting


def _load_model(spec: RankSpec, source: ModelFolder, pipeline: Pipeline, options: LoadOptions) -> Model:
    peers, dtype, device = pipeline.peers, options.dtype, options.device
    model = source.load(peers, options, stage=pipeline.stage)
    if spec.engine.batch_invariant and (reason := invariance_obstacle(model, dtype, spec.engine.page_size)):
        raise ModelError(f"batch-invariant: {reason}")
    if device.type == "cuda" and peers.world_size > 1 and not spec.engine.disable_custom_all_reduce:
        from phalanx_runtime.rank.device.all_reduce_choice import use_one_shot  # imports Triton

        use_one_shot(model, peers, num_local=spec.local_world_size, dtype=dtype, device=device)
    return model


def _memory_account(
    spec: RankSpec, sizing: KvSizing, weights_bytes: int, step: StepQueue | None, kernels: KernelLoader, *, state_bytes: int
) -> MemoryAccount:
    """Returns and logs the account."""
    account = MemoryAccount(
        rank=spec.rank,
        weights_bytes=weights_bytes,
        activations_bytes=sizing.needs.activations,
        logits_sampler_bytes=sizing.needs.logits_sampler,
        kv_pool_bytes=sizing.pool_bytes,
        kv_bytes_per_token=sizing.page_bytes // spec.engine.page_size,
        total_bytes=sizing.usable_bytes,
        graphs_bytes=0 if step is None else step.account.num_bytes,
        graphs_s=0.0 if step is None else step.account.seconds,
        kernels=kernels.account.num_variants,
        kernels_compiled=kernels.account.num_compiled,
        kernels_s=kernels.account.seconds,
        host_cache_bytes=spec.engine.host_cache_memory or 0,
        window_tokens=sizing.groups.window,
        page_groups=sizing.groups.why,
        kv_pool_tokens=sizing.num_pages * spec.engine.page_size,
        window_pool_bytes=sizing.num_parts * sizing.part_bytes,
        window_pool_tokens=sizing.num_parts * spec.engine.page_size,
        state_bytes=state_bytes,
    )
    log.info("memory measured", extra=msgspec.structs.asdict(account))
    return account


def _served(spec: RankSpec, dtype: torch.dtype, model: Model, sizing: KvSizing, window: int, *, calibration: str) -> Served:
    """Returns the group's identity for routers. Rank 0's heads imply those of all ranks."""
    kv, name = model.kv, str(dtype).removeprefix("torch.")
    stages = spec.pipeline_parallel_size
    # Calibrated keys cannot be mixed with others in a request.
    kv_dtype = f"{codes_name(spec.engine.kv_cache_dtype)} {calibration}".rstrip()
    pages = f"page{spec.engine.page_size}{'' if kv_dtype == 'auto' else f' {kv_dtype}'}"
    heads = f"{kv.kv_heads}x{'+'.join(str(dim) for dim in sorted(set(kv.head_dims)))}x{len(kv.head_dims)}"
    extras = (
        f"{' parts' if sizing.num_parts else ''}{' tls' if spec.tls_dir else ''}"  # groups with and without TLS exchange no pages
    )
    kind = "latent" if kv.is_latent else "heads"
    layout = f"tp{spec.world_size // stages} pp{stages} {name} {pages} {kind}{heads}{extras}"
    return Served(
        model_hash(Path(spec.model_dir), name, spec.engine.quantization),
        layout,
        sizing.group_page_bytes,
        spec.model_version,
        kv_dtype,
        embedding_size=model.embedding_size,
        hit_pages=PageWindow(window, spec.engine.page_size).pages_before if window else 0,
        is_classifier=isinstance(model, Decoder) and model.config.num_labels > 0,
    )


def _choose_load_options(
    spec: RankSpec, source: ModelFolder, pipeline: Pipeline, device: torch.device, system: System
) -> LoadOptions:
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
    return LoadOptions(
        dtype=dtype,
        device=device,
        kernels=kernels,
        positions=positions,
        num_readers=GPU_READERS if device.type == "cuda" else 1,
        has_exit=spec.engine.speculative_method == "self_draft",
        is_batch_invariant=spec.engine.batch_invariant,
        max_loras=spec.engine.max_loras if spec.engine.enable_lora else 0,
        max_lora_rank=spec.engine.max_lora_rank,
        has_lora_experts=spec.engine.lora_experts,
    )


def make_runner(
    model: Model,
    caches: list[LayerCache],
    pool: PoolShape,
    pipeline: Pipeline,
    dtype: torch.dtype,
    device: torch.device,
    grammars: GrammarSource = UNSUPPORTED_GRAMMARS,
    proposer: Proposer = NO_PROPOSER,
    device_limits: DeviceLimits | None = None,
    host: tuple[HostCopies, HostCopies] = (NO_HOST_PAGES, NO_HOST_PAGES),
) -> ModelRunner:
    """Makes a runner over these pages. `device_limits`: of the device path, which it opens. `host`: see `open_host_pages`."""
    encoder = model.images if isinstance(model, Decoder) else None
    builder = BatchBuilder(
        _cache_shape(model, pool, dtype, caches[0]),
        dtype,
        device,
        has_adapters=isinstance(model, Decoder) and model.adapters is not None,
        has_states=mixers_of(model) is not None,
        embed=no_images if encoder is None else partial(step_embeddings, ImageCache(encoder)),
    )
    sampler, pooler = choose_sampler(device, model.vocab_size, grammars), Pooler(model)
    device_step: StepQueue | None = None
    if device_limits is not None:
        from phalanx_runtime.rank.device.loading import open_device_step  # imports Triton

        device_step = open_device_step(
            model, caches, pool, builder, sampler, pooler=pooler, peers=pipeline.peers, limits=device_limits
        )
    return ModelRunner(
        model,
        caches,
        builder=builder,
        pool=pool,
        pipeline=pipeline,
        sampler=sampler,
        pooler=pooler,
        proposer=proposer,
        device_step=device_step,
        host_pages=host[0],
        host_parts=host[1],
    )


def _cache_shape(model: Model, pool: PoolShape, dtype: torch.dtype, cache: LayerCache) -> CacheShape:
    layer_page_bytes = page_bytes(model.kv, pool.page_size, dtype, cache.format) // len(model.kv.head_dims)
    window = PageWindow(pool.window, pool.page_size) if pool.window else None
    has_parts = pool.num_parts > 0
    return CacheShape(pool.page_size, model.kv.kv_heads, layer_page_bytes, window, has_parts, has_blocks=pool.has_blocks)


def open_host_pages(
    caches: list[LayerCache],
    windows: Sequence[int | None],
    pool: PoolShape,
    disks: tuple[DiskPages | None, DiskPages | None] = NO_DISK,
    states: RowStates | None = None,
) -> tuple[HostCopies, HostCopies]:
    """Returns the host memory for these pages, and that for their parts, or for snapshots of `states`, if the pool has any.

    `windows`: of each layer. `disks`: keep pages, and parts or snapshots, too.
    """
    if not pool.num_host_pages:
        return NO_HOST_PAGES, NO_HOST_PAGES
    page_caches, part_caches = divide_caches(caches, windows, pool.num_parts)
    pages = HostPages(page_caches, pool.host_floor, disk=disks[0], limit=pool.num_host_pages) if page_caches else NO_ROWS
    if pool.num_host_snapshots and disks[1] is not None:
        return pages, StateSlots(states, disks[1])
    if not pool.num_host_parts:
        return pages, NO_HOST_PAGES
    if not part_caches:
        return pages, NO_ROWS
    return pages, HostPages(part_caches, pool.host_part_floor, disk=disks[1], limit=pool.num_host_parts)
