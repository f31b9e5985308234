"""Builds the load reports of an engine, with step times and tokens by tenant."""

from dataclasses import dataclass

import msgspec

from phalanx_api import wire
from phalanx_api.cache_curve import CacheUse
from phalanx_api.cost import StepModel, StepWork, attention_work, step_work
from phalanx_api.speculation import SpeculationCounts
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.migration.rescue import Pressure, RunningEstimate, Victim, expected_remaining_steps, steps_to_full
from phalanx_runtime.core.pace import EnginePace, MovingAverage
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.queue import Queue
from phalanx_runtime.core.scheduling.running import RunningSet
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder

_EMPTY = StepWork(0, 0, 0)
LOOKUP_PAGES = 2048
"""Pages of waiting prompts looked up per report, about 0.1 ms."""


@dataclass(slots=True)
class _Use:
    step_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


class TenantMeter:
    """Counters of each tenant since the engine's start.

    The time of a step is divided by what the tokens of each request add to it, as the cost model predicts, its fixed time in the
    same proportion. Before the model is fitted, it is divided by the number of tokens.
    """

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


class LoadReporter:
    """Collects measurements of a scheduler."""

    def __init__(self, limits: Limits, queue: Queue, running: RunningSet, sharing: PrefixSharing) -> None:
        self.last_handle = 0
        self.num_refused = 0
        self.recomputed_tokens = 0
        self.wasted_tokens = 0
        """Computed for requests that had ended."""
        self.output = MovingAverage()
        """Output tokens per finished request."""
        self._limits = limits
        self._queue = queue
        self._running = running
        self._sharing = sharing
        self._sequence = 0
        self._step_s, self._prompt_tokens, self._new_pages = MovingAverage(), MovingAverage(), MovingAverage()
        self._pace = EnginePace()
        self.tenants = TenantMeter()
        self._longest_step_s = 0.0
        self._allocated_pages = 0

    @property
    def speedup(self) -> float:
        """Speedup of decodes by speculation."""
        return self._pace.speedup

    def record_step(self, builder: StepBuilder, model: StepModel | None, wall_s: float, computing_s: float) -> None:
        """Records a finished step. computing_s: its time without waits for copies."""
        self._step_s.add(wall_s)
        self._pace.record_step(builder, model, computing_s)
        self.tenants.add_time(builder, model, computing_s)
        self._longest_step_s = max(self._longest_step_s, wall_s)
        self._prompt_tokens.add(builder.work.prefill_tokens)
        before, self._allocated_pages = self._allocated_pages, self._sharing.allocated_pages
        self._new_pages.add(self._allocated_pages - before)

    def is_preemption_near(self) -> bool:
        """Returns whether fewer pages, or parts, are free than requests run."""
        parts, num_running = self._sharing.parts, len(self._running.requests)
        return self._sharing.pool.free_pages < num_running or (parts is not None and parts.free_parts < num_running)

    def pressure(self, pages_per_s: float) -> Pressure | None:
        """Returns the state of a pool that is half full and expected to be exhausted. `pages_per_s`: KV transfer rate."""
        pool = self._sharing.pool
        if 2 * pool.free_pages > pool.num_pages:
            return None
        running = [request for request in self._running.requests if not request.has_ended]
        steps = self._steps_to_full(running)
        if steps is None:
            return None
        victims = [
            Victim(request.params.handle, len(request.pages.held), self._expected_remaining(request))
            for request in reversed(running)
            if request.num_output and not request.is_frozen
        ]
        return Pressure(
            steps_to_full=steps,
            step_s=self._step_s.mean / self._pace.tokens_per_step,
            free_pages=pool.free_pages,
            victims=victims,
            pages_per_s=pages_per_s,
        )

    def make(
        self, now: float, num_preemptions: int, reserved_pages: int, model: StepModel | None, speculation: SpeculationCounts
    ) -> wire.Load:
        """Returns the next report."""
        self._begin(now)
        pool, sharing, waiting = self._sharing.pool, self._sharing, self._queue.totals
        running = [request for request in self._running.requests if not request.has_ended]
        uncomputed = [_uncomputed_prompt(request) for request in running]
        lengths = [len(request.tokens) for request in running]
        attention = sum(attention_work(length, length - n) for length, n in zip(lengths, uncomputed, strict=True) if n)
        longest_s, self._longest_step_s = self._longest_step_s, 0.0
        load = wire.Load(
            waiting=len(self._queue),
            running=len(self._running.requests),
            outstanding_tokens=waiting.outstanding + sum(request.outstanding_tokens for request in running),
            free_pages=pool.free_pages,
            total_pages=pool.num_pages,
            preemptions=num_preemptions,
            prefix_queried_tokens=sharing.queried_tokens,
            prefix_hit_tokens=sharing.hit_tokens,
            pages_reused=pool.counters.reused,
            pages_evicted=pool.counters.evicted,
            step_model=[] if model is None else model.coefficients(),
            sequence=self._sequence,
            last_handle=self.last_handle,
            reserved_pages=reserved_pages,
            waiting_prompt_tokens=waiting.uncomputed,
            running_prompt_tokens=sum(uncomputed),
            waiting_pages=waiting.pages,
            context_tokens=sum(request.num_computed for request in running),
            oldest_wait_s=waiting.longest_wait_s(now),
            step_s=self._step_s.mean,
            longest_step_s=longest_s,
            prompt_tokens_per_step=self._prompt_tokens.mean,
            refusals=self.num_refused,
            recomputed_tokens=self.recomputed_tokens,
            steps_to_full=self._steps_to_full(running),
            prefixes=sharing.hot_prefixes.heaviest(),
            mean_output_tokens=self.output.mean,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            max_num_seqs=self._limits.max_num_seqs,
            speculation=speculation,
            speedup=self.speedup,
            prompt_attention=waiting.attention + attention,
            wasted_tokens=self.wasted_tokens,
            tenants=self.tenants.report(),
            unused_slots=sum(max(0, len(request.pages.ids) * pool.page_size - len(request.tokens)) for request in running),
        )
        return _with_prefix_cache(load, sharing)

    def _expected_remaining(self, request: Request) -> float:
        return expected_remaining_steps(request.num_output, request.remaining_output, self.output.mean)

    def _steps_to_full(self, running: list[Request]) -> float | None:
        """See `migration.rescue`. Unused slots of held pages count as free; frozen requests fill no more."""
        pool, size = self._sharing.pool, self._sharing.pool.page_size
        growing = [request for request in running if not request.is_frozen and not self._keeps_size(request)]
        unused = sum(len(request.pages.ids) * size - len(request.tokens) for request in growing)
        estimates = [
            RunningEstimate(self._expected_remaining(request), max(0, len(request.tokens) - request.pages.found_tokens))
            for request in growing
        ]
        new_slots_per_step = self._new_pages.mean * size / self._pace.tokens_per_step
        return steps_to_full(max(0, pool.free_pages * size + unused), estimates, new_slots_per_step)

    def _keeps_size(self, request: Request) -> bool:
        """Whether a request drops a page for each one that it gets."""
        windowed = self._sharing.windowed
        return windowed is not None and len(request.tokens) >= windowed.window.tokens

    def _begin(self, now: float) -> None:
        """Numbers a report, and brings what depends on the time up to date."""
        self._sequence += 1
        self._look_up_waiting()
        self._sharing.hot_prefixes.decay(now)
        self._sharing.pool.now_s = self._sharing.pool.host.now_s = now

    def _look_up_waiting(self) -> None:
        pool, waiting, num_looked_up = self._sharing.pool, self._queue.totals, 0
        for request in waiting.by_update():
            if num_looked_up >= LOOKUP_PAGES:
                return
            found = self._sharing.find(request)
            num_hit = self._sharing.num_hit(found)
            waiting.update(request, request.num_uncomputed - num_hit * pool.page_size, sum(self._sharing.needs(request, found)))
            num_looked_up += pool.pages_for(len(request.tokens))


def _with_prefix_cache(load: wire.Load, sharing: PrefixSharing) -> wire.Load:
    pool, host, disk, windowed, parts = sharing.pool, sharing.pool.host, sharing.disk, sharing.windowed, sharing.parts
    return msgspec.structs.replace(
        load,
        cached_pages=pool.cached_pages,
        cache_curve=msgspec.structs.replace(sharing.miss_ratio.report(pool.num_pages), tiers=host.hits.report()),
        evicted_page_s=pool.counters.evicted_page_s,
        host_total_pages=host.num_slots,
        host_cached_pages=len(host),
        host_stored_pages=host.counters.stored,
        host_loaded_pages=host.counters.loaded,
        host_evicted_pages=host.counters.evicted,
        host_declined_pages=host.counters.declined,
        host_load_page_s=host.page_s or 0.0,
        host_wait_s=host.counters.waited_s,
        disk_cached_pages=len(disk.keys),
        disk_fetched_pages=disk.counters.fetched,
        disk_failed_pages=disk.counters.failed,
        disk_declined_pages=disk.counters.declined,
        disk_read_page_s=disk.page_s or 0.0,
        host_resizes=host.counters.resized,
        host_moved_pages=host.counters.moved,
        host_evicted_page_s=host.counters.evicted_page_s,
        disk_compacted_bytes=disk.counters.compacted_bytes,
        disk_reclaimed_bytes=disk.counters.reclaimed_bytes,
        cache_use=_cache_use(load, sharing),
        max_request_pages=0 if windowed is None else windowed.max_pages,
        dropped_pages=sum(group.num_dropped for group in (windowed, parts) if group is not None),
        total_parts=0 if parts is None else parts.num_parts,
        free_parts=0 if parts is None else parts.free_parts,
        parts_evicted=0 if parts is None else parts.num_evicted,
        host_sent_pages=host.counters.sent,
        host_total_parts=pool.host_parts.num_slots,
        host_stored_parts=pool.host_parts.counters.stored,
        host_loaded_parts=pool.host_parts.counters.loaded,
        disk_cached_parts=len(disk.part_keys),
        disk_fetched_parts=disk.counters.fetched_parts,
        disk_unwritten_pages=disk.counters.unwritten,
    )


def _cache_use(load: wire.Load, sharing: PrefixSharing) -> CacheUse:
    pool, host, disk = sharing.pool.counters, sharing.pool.host.counters, sharing.disk.counters
    held = sharing.pool.page_size * (load.total_pages - load.free_pages)
    return CacheUse(
        reuse_pages=sharing.reuse_pages(),
        residency_s=pool.evicted_page_s / pool.evicted if pool.evicted else 0.0,
        host_residency_s=host.evicted_page_s / host.evicted if host.evicted else 0.0,
        unused_share=min(1.0, load.unused_slots / held) if held else 0.0,
        compacted_bytes=disk.compacted_bytes,
        reclaimed_bytes=disk.reclaimed_bytes,
    )


def _uncomputed_prompt(request: Request) -> int:
    """Tokens before the next one is sampled; 0 for a decode."""
    num_tokens = len(request.tokens)
    if request.num_uncomputed <= 1 and request.num_computed >= request.params.num_prompt:
        return 0
    return num_tokens - max(request.num_computed, min(request.pages.found_tokens, num_tokens - 1))
