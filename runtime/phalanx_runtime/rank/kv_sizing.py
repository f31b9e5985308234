"""How many pages a rank has room for: what its device leaves beside weights and the largest step, agreed among all ranks."""

from dataclasses import dataclass

import torch

from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.errors import DraftLost, ModelError
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.drafting.loading import Drafting
from phalanx_runtime.rank.memory.kv_cache import cpu_pool_bytes, page_bytes, pool_bytes
from phalanx_runtime.rank.memory.memory_profiler import MemoryProfiler
from phalanx_runtime.rank.process.cgroup import System, memory_limit
from phalanx_runtime.rank.profile_run import PeakMemory, profile_largest_step
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec

USUAL_TOKENS = 4096
"""What the pool has to hold beside a draft where no length is asked for, if the model can do as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizing:
    """Pages that all ranks hold, with their bytes on this rank and on all of them; and what else this rank holds and needs.

    A page holds the layers of the target and of a draft model. `lack`: what there is too little of, where they are too few.
    """

    num_pages: int
    page_bytes: int
    group_page_bytes: int
    held_bytes: int
    needs: PeakMemory
    usable_bytes: int
    lack: str = "there are too few pages: raise kv_cache_memory_bytes"

    def holds(self, spec: RankSpec, max_position: int) -> bool:
        """Whether there is room for one request of the length asked for, or of a usual one."""
        return self.num_pages * spec.engine.page_size >= (spec.engine.max_model_len or min(max_position, USUAL_TOKENS))


def measure_kv_sizing(
    spec: RankSpec,
    model: Model,
    max_position: int,
    pipeline: Pipeline,
    dtype: torch.dtype,
    system: System,
    gauge: MemoryProfiler,
    drafting: Drafting,
) -> KvSizing:
    """The room beside what is loaded. All ranks call it together; a draft that leaves none makes no error, and no pages.

    Raises ModelError, PeerLost, and DraftLost where this is found only when other ranks wait.
    """
    device, held, has_draft = gauge.device, gauge.held(), drafting.model is not None
    size = page_bytes(model.kv, spec.engine.page_size, dtype) + drafting.page_bytes(spec.engine.page_size, dtype)
    needs, usable = PeakMemory(0, 0), _usable_bytes(spec, device, system)
    first = _num_pages(spec, usable, taken=held, size=size, device=device, system=system, has_draft=has_draft)
    num_pages, group_page_bytes = _agree(first, size, pipeline.world, device)
    if not num_pages:  # on any rank: all of them rehearse, or none
        return KvSizing(
            num_pages=0, page_bytes=size, group_page_bytes=group_page_bytes, held_bytes=held, needs=needs, usable_bytes=usable
        )
    longest = min(spec.engine.max_model_len or max_position, num_pages * spec.engine.page_size)
    try:
        needs = profile_largest_step(spec, model, pipeline=pipeline, dtype=dtype, device=device, gauge=gauge, longest=longest)
    except ModelError as error:
        if not has_draft:
            raise
        if pipeline.world.world_size > 1:  # the others are in the step
            raise DraftLost(f"beside the draft model {error}") from error
        return KvSizing(
            num_pages=0,
            page_bytes=size,
            group_page_bytes=group_page_bytes,
            held_bytes=held,
            needs=needs,
            usable_bytes=usable,
            lack=str(error),
        )
    drafts = _rehearse_draft(spec, drafting.model, dtype, gauge, longest)
    needs = needs.most(drafts or needs)
    usable = _usable_bytes(spec, device, system)  # after: what libraries keep on a GPU since their first use is not to be had
    taken = held + needs.activations + needs.logits_sampler
    num_pages = (
        _num_pages(spec, usable, taken=taken, size=size, device=device, system=system, has_draft=has_draft)
        if drafts is not None
        else 0
    )
    num_pages, group_page_bytes = _agree(num_pages, size, pipeline.world, device)
    return KvSizing(
        num_pages=num_pages, page_bytes=size, group_page_bytes=group_page_bytes, held_bytes=held, needs=needs, usable_bytes=usable
    )


def _rehearse_draft(
    spec: RankSpec, draft: Model | None, dtype: torch.dtype, gauge: MemoryProfiler, longest: int
) -> PeakMemory | None:
    """What the largest step of the draft needs; nothing where there is none; None when its device has no memory for it."""
    if draft is None:
        return PeakMemory(0, 0)
    try:
        return profile_largest_step(
            spec, draft, pipeline=Pipeline(SoloCollective()), dtype=dtype, device=gauge.device, gauge=gauge, longest=longest
        )
    except ModelError:
        return None


def _num_pages(spec: RankSpec, usable: int, taken: int, size: int, device: torch.device, system: System, has_draft: bool) -> int:
    """Pages of this size beside what is taken; none where a draft is to blame. Raises ModelError."""
    try:
        return _pool_bytes(spec, usable, taken, device, system) // size
    except ModelError:
        if not has_draft:
            raise
        return 0


def _pool_bytes(spec: RankSpec, usable: int, taken: int, device: torch.device, system: System) -> int:
    """Bytes of this rank's pool: what was asked for, else what is left of its memory, on CPU within the bounds of a pod."""
    if spec.engine.kv_cache_memory_bytes is not None:
        return spec.engine.kv_cache_memory_bytes
    if device.type == "cpu":
        most = cpu_pool_bytes(memory_limit(system), spec.local_world_size)
        return pool_bytes(usable, taken, most, "raise the pod's memory limit")
    return pool_bytes(usable, taken, usable, "raise gpu_memory_utilization")


def _usable_bytes(spec: RankSpec, device: torch.device, system: System) -> int:
    """What this rank may use of its device: its part of the pod's limit, or the share of the GPU that others leave."""
    if device.type == "cpu":
        return memory_limit(system) // spec.local_world_size
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * spec.engine.gpu_memory_utilization) - others


def _agree(num_pages: int, page_bytes: int, collective: Collective, device: torch.device) -> tuple[int, int]:
    """The smallest count of any rank, because page numbers mean the same everywhere; and the bytes of a page on all ranks."""
    told = collective.all_gather(torch.tensor([[num_pages, page_bytes]], device=device), 0)
    return int(told[:, 0].min()), int(told[:, 1].sum())
