"""Sizes the page pool: memory left by weights and the largest step, with one page count on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.page_window import (
    ALL_PAGES,
    PageDivision,
    PageGroups,
    PageWindow,
    choose_page_groups,
    max_request_tokens,
)
from phalanx_runtime.errors import DraftLost, ModelError
from phalanx_runtime.model.attention.page_format import choose_format
from phalanx_runtime.model.protocol import KvLayout, Model
from phalanx_runtime.rank.drafting.loading import Drafting
from phalanx_runtime.rank.memory.kv_cache import cpu_pool_bytes, page_bytes, part_bytes, pool_bytes, resolve_max_model_len
from phalanx_runtime.rank.memory.memory_profiler import MemoryProfiler
from phalanx_runtime.rank.memory.row_states import useful_pages
from phalanx_runtime.rank.process.cgroup import System, memory_limit
from phalanx_runtime.rank.profile_run import PeakMemory, profile_largest_step
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank.tiers.opening import PageBytes
from phalanx_runtime.rank_spec import RankSpec

MIN_TOKENS_WITH_DRAFT = 4096
"""Tokens that the pool must hold with a draft model if `max_model_len` is unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizing:
    """Page pool and memory of this rank. Pages include a draft model's layers."""

    num_pages: int
    """Equal on all ranks."""
    page_bytes: int
    """Bytes of a page on this rank."""
    draft_bytes: int = 0
    """Of these, a draft model's."""
    group_page_bytes: int
    """Bytes of a page on all ranks."""
    held_bytes: int
    """Before the pool is allocated."""
    needs: PeakMemory
    usable_bytes: int
    groups: PageGroups = ALL_PAGES
    """Of the model's layers on all ranks."""
    part_bytes: int = 0
    """Bytes of a part on this rank."""
    num_parts: int = 0
    """Parts of pages, equal on all ranks; 0: each page has the keys and values of all layers."""
    lack: str = "there are too few pages: raise kv_cache_memory_bytes"
    """Why the pool is too small."""

    def max_request_tokens(self, page_size: int) -> int:
        """Returns the tokens of the longest request that fits the pool."""
        return max_request_tokens(self.num_pages, page_size, self.groups.window, self.num_parts)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool on this rank."""
        part_bytes = self.part_bytes if self.num_parts else 0
        return self.num_pages * (self.page_bytes - part_bytes) + self.num_parts * part_bytes

    def host_page_bytes(self, whole_bytes: int) -> int:
        """Returns the host memory for each page, with its share of the parts, of which host memory has as many per page.

        `whole_bytes`: of a page and a part, without a draft model's layers.
        """
        if not self.num_parts:
            return whole_bytes
        return whole_bytes - self.part_bytes + -(-self.part_bytes * self.num_parts // self.num_pages)

    def disk_bytes(self, whole_bytes: int) -> PageBytes:
        """Returns the bytes of what a disk keeps; arguments as in `host_page_bytes`."""
        if not self.num_parts:
            return PageBytes(whole_bytes)
        return PageBytes(whole_bytes - self.part_bytes, self.part_bytes, self.num_parts / self.num_pages)

    def max_model_len(self, spec: RankSpec, max_position: int) -> int:
        """Returns the tokens of the longest request. Raises ModelError if the pool is too small."""
        engine = spec.engine
        return resolve_max_model_len(
            engine.max_model_len,
            max_position,
            num_pages=self.num_pages,
            page_size=engine.page_size,
            window=self.groups.window,
            num_parts=self.num_parts,
        )

    def holds(self, spec: RankSpec, max_position: int) -> bool:
        """Returns whether the longest request fits."""
        longest = spec.engine.max_model_len or min(max_position, MIN_TOKENS_WITH_DRAFT)
        return self.max_request_tokens(spec.engine.page_size) >= longest


def measure_kv_sizing(
    spec: RankSpec,
    model: Model,
    max_position: int,
    pipeline: Pipeline,
    dtype: torch.dtype,
    system: System,
    profiler: MemoryProfiler,
    drafting: Drafting,
    reserved_bytes: Callable[[int], int] = lambda longest: 0,
) -> KvSizing:
    """Measures the largest step and sizes the pool; collective. No pages if a draft model leaves no memory.

    reserved_bytes: of captured decode steps, allocated after the pool, by the longest request. Raises ModelError, PeerLost,
    and DraftLost if a draft model fails while other ranks wait.
    """
    device, held, has_draft = profiler.device, profiler.allocated_bytes(), drafting.model is not None
    format, page_size = choose_format(spec.engine.kv_cache_dtype, model.kv.head_dims), spec.engine.page_size
    size = page_bytes(model.kv, page_size, dtype, format) + (draft_bytes := drafting.page_bytes(page_size))
    usable = _usable_bytes(spec, device, system)
    taken = held + reserved_bytes(_longest_request(spec, model, max_position, usable // size * page_size))
    num_pages = _num_pages(spec, usable, taken=taken, size=size, device=device, system=system, has_draft=has_draft)
    num_pages, group_page_bytes = _agree(useful_pages(model, spec.engine, max_position, num_pages), size, pipeline.world)
    groups = choose_page_groups(*agree_on_windows(model.kv, pipeline.world), config=spec.engine)
    empty = KvSizing(
        num_pages=0,
        page_bytes=size,
        draft_bytes=draft_bytes,
        group_page_bytes=group_page_bytes,
        held_bytes=held,
        needs=PeakMemory(0, 0),
        usable_bytes=usable,
        groups=groups if not groups.has_parts else replace(groups, window=0),
        part_bytes=part_bytes(model.kv, page_size, dtype, format),
    )
    if not num_pages:  # the same on all ranks: either all profile or no rank does
        return empty
    longest = _longest_context(spec, max_position, replace(empty, num_pages=num_pages))
    try:
        needs = profile_largest_step(spec, model, pipeline, dtype=dtype, device=device, profiler=profiler, longest=longest)
    except ModelError as error:
        return _without_memory(empty, error, has_draft, pipeline)
    draft_needs, num_pages = _profile_draft(spec, drafting.model, dtype, profiler, longest), 0
    needs, usable = needs.max_with(draft_needs or needs), _usable_bytes(spec, device, system)  # again: libraries keep memory
    if draft_needs is not None:
        taken += needs.activations + needs.logits_sampler
        num_pages = _num_pages(spec, usable, taken=taken, size=size, device=device, system=system, has_draft=has_draft)
    num_pages, group_page_bytes = _agree(useful_pages(model, spec.engine, max_position, num_pages), size, pipeline.world)
    sizing = replace(empty, num_pages=num_pages, group_page_bytes=group_page_bytes, needs=needs, usable_bytes=usable)
    return with_parts(sizing, groups, spec.engine, max_position, pipeline.world)


def _longest_request(spec: RankSpec, model: Model, max_position: int, most_tokens: int) -> int:
    """Returns the tokens of the longest request that may be accepted. most_tokens: of a pool in all memory, without windows."""
    longest = spec.engine.max_model_len or max_position
    return longest if any(model.kv.windows) else min(longest, most_tokens)


def with_parts(sizing: KvSizing, groups: PageGroups, engine: EngineConfig, max_position: int, collective: Collective) -> KvSizing:
    """Returns the sizing with its memory divided between pages and parts, if some layers have a window and that gains pages;
    collective."""
    if not groups.has_parts:
        return sizing
    rest = sizing.page_bytes - sizing.part_bytes
    sizes = collective.all_gather_integers([rest, sizing.part_bytes, rest - sizing.draft_bytes])
    own, part, _ = min(sizes, key=lambda sizes: sizes[1] / (sizes[0] + sizes[1]))
    longest = engine.max_model_len or max_position
    num_whole, window = sizing.num_pages, PageWindow(groups.window, engine.page_size)
    division = PageDivision(
        page_bytes=own,
        part_bytes=part,
        longest=min(longest, num_whole * (own + part) // max(1, own) * engine.page_size),
        required=engine.max_model_len or 0,
        max_num_seqs=engine.max_num_seqs,
        max_new_tokens=Limits.of(engine, longest).max_new_tokens,
    )
    num_pages, num_parts = division.divide(num_whole, window)
    if not part:
        why = "a pipeline stage has full attention in all its layers"
    elif not num_parts:
        why = "no request is much longer than the window"
    elif engine.disk_cache_path is not None and not all(page for _, _, page in sizes):
        why = "a pipeline stage, which has windows in all its layers, would have no pages on disk"
    else:
        return replace(sizing, num_pages=num_pages, num_parts=num_parts, groups=groups)
    return replace(sizing, groups=PageGroups(0, f"some layers attend to all tokens, and {why}"))


def _without_memory(sizing: KvSizing, error: ModelError, has_draft: bool, pipeline: Pipeline) -> KvSizing:
    """Returns the sizing without pages if a draft model leaves no memory for the largest step; else raises."""
    if not has_draft:
        raise error
    if pipeline.world.world_size > 1:  # the other ranks are in the step
        raise DraftLost(f"with the draft model {error}") from error
    return replace(sizing, lack=str(error))


def agree_on_windows(kv: KvLayout, collective: Collective) -> tuple[set[int | None], bool]:
    """Returns the largest sliding window of each rank, None if any layer has none, and whether they are blocks; collective.

    Blocks of several sizes, or blocks on one pipeline stage and sliding windows on another, count as none.
    """
    largest = max((size for size in kv.windows if size is not None), default=0)
    gathered = collective.all_gather_integers([largest, None in kv.windows, kv.has_blocks])
    kinds = {(size, bool(has_blocks)) for size, _, has_blocks in gathered if size}
    has_blocks = any(is_block for _, is_block in kinds)
    if has_blocks and len(kinds) > 1:
        return {None}, False
    return {size for size, _ in kinds} | {None for _, has_full, _ in gathered if has_full}, has_blocks


def _longest_context(spec: RankSpec, max_position: int, sizing: KvSizing) -> int:
    """Returns the most tokens that attention of one request reads in a step."""
    capacity = sizing.max_request_tokens(spec.engine.page_size)
    if sizing.groups.has_parts:  # the memory is not divided yet: parts may take almost none
        capacity = capacity * sizing.page_bytes // max(1, sizing.page_bytes - sizing.part_bytes)
    longest = min(spec.engine.max_model_len or max_position, capacity)
    if sizing.groups.window:
        longest = min(longest, sizing.groups.window + spec.engine.max_num_batched_tokens + spec.engine.page_size)
    return longest


def _profile_draft(
    spec: RankSpec, draft: Model | None, dtype: torch.dtype, profiler: MemoryProfiler, longest: int
) -> PeakMemory | None:
    """Needs of the draft model's largest step; no value if it does not fit."""
    if draft is None:
        return PeakMemory(0, 0)
    try:
        return profile_largest_step(
            spec,
            draft,
            pipeline=Pipeline(SoloCollective()),
            dtype=dtype,
            device=profiler.device,
            profiler=profiler,
            longest=longest,
        )
    except ModelError:
        return None


def _num_pages(spec: RankSpec, usable: int, taken: int, size: int, device: torch.device, system: System, has_draft: bool) -> int:
    """Returns the pages that fit. Raises ModelError without a draft model."""
    try:
        return _pool_bytes(spec, usable, taken, device, system) // size
    except ModelError:
        if not has_draft:
            raise
        return 0


def _pool_bytes(spec: RankSpec, usable: int, taken: int, device: torch.device, system: System) -> int:
    """`kv_cache_memory_bytes`, else the remaining memory, on CPU at most the default pool."""
    if spec.engine.kv_cache_memory_bytes is not None:
        return spec.engine.kv_cache_memory_bytes
    if device.type == "cpu":
        limit = cpu_pool_bytes(memory_limit(system), spec.local_world_size)
        return pool_bytes(usable, taken, limit, "raise the pod's memory limit")
    return pool_bytes(usable, taken, usable, "raise gpu_memory_utilization")


def _usable_bytes(spec: RankSpec, device: torch.device, system: System) -> int:
    """The share of the pod's limit; on a GPU, `gpu_memory_utilization` minus other processes.

    Raises ModelError if host memory for pages exceeds the pod's limit.
    """
    _check_host_memory(spec, system)
    if device.type == "cpu":
        return memory_limit(system) // spec.local_world_size - (spec.engine.host_cache_memory or 0)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * spec.engine.gpu_memory_utilization) - others


def _agree(num_pages: int, page_bytes: int, collective: Collective) -> tuple[int, int]:
    """The smallest page count, because ranks share page numbers, and the sum of page bytes."""
    counts, sizes = zip(*collective.all_gather_integers([num_pages, page_bytes]), strict=True)
    return min(counts), sum(sizes)


def _check_host_memory(spec: RankSpec, system: System) -> None:
    """Raises ModelError if the pod has less memory than its ranks may fill with evicted pages."""
    limit, total = memory_limit(system), (spec.engine.host_cache_memory or 0) * spec.local_world_size
    if total >= limit:
        raise ModelError(
            f"host_cache_memory takes {total >> 20} MiB for {spec.local_world_size} ranks and the pod has {limit >> 20} MiB: "
            "lower it, or raise the pod's memory limit"
        )


def agree_on_host_pages(
    spec: RankSpec, page_bytes: int, collective: Collective, state_bytes: int = 0, most: int | None = None
) -> tuple[int, int | None]:
    """Returns how many pages host memory holds, and at least holds if its size is adaptive; equal on all ranks; collective.

    `state_bytes`: of host memory that snapshots of states take; `most`: pages that this rank keeps at most, by default as many
    as fit. Raises ModelError if it holds none.
    """
    engine = spec.engine
    num_bytes = engine.host_cache_memory
    if num_bytes is None:
        if engine.host_cache_adaptive:
            raise ModelError("host_cache_adaptive needs host_cache_memory, the limit")
        return 0, None
    fitting = (num_bytes - state_bytes) // page_bytes
    num_pages = _agree(fitting if most is None else min(most, fitting), page_bytes, collective)[0]
    if not num_pages:
        raise ModelError(f"host_cache_memory of {num_bytes} bytes holds no page of {page_bytes} bytes: raise it")
    if not engine.host_cache_adaptive:
        return num_pages, None
    min_bytes = num_bytes // 8 if engine.host_cache_min_memory is None else engine.host_cache_min_memory
    if min_bytes > num_bytes:
        raise ModelError(f"host_cache_min_memory of {min_bytes} bytes exceeds host_cache_memory of {num_bytes} bytes")
    return num_pages, min(num_pages, max(1, _agree(min_bytes // page_bytes, page_bytes, collective)[0]))
