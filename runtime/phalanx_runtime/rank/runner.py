"""Runs steps: rank 0 sends the plan, every rank computes its part, the sampling rank samples."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import accumulate, product

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_frontend.flight import NO_FLIGHT_RECORDER, FlightRecorder
from phalanx_runtime.core.flight_entries import rank_step
from phalanx_runtime.core.speculation.config import Fitting, accept_all
from phalanx_runtime.core.step_plan import AdapterOrder, PoolShape, StepPlan, StepResult
from phalanx_runtime.engine.ports import GrammarCompiler
from phalanx_runtime.errors import RowStateLost, StepOutOfMemory
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.logits import gather_logits
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.model.states.mixers import discard_step, states_of
from phalanx_runtime.rank.device.limits import StepQueue
from phalanx_runtime.rank.drafting.proposer import NO_PROPOSER, Proposer
from phalanx_runtime.rank.memory.kv_cache import divide_caches
from phalanx_runtime.rank.memory.page_memory import DraftPages, PageAccess, await_steps, no_parts, open_pages
from phalanx_runtime.rank.process.device_errors import first_line
from phalanx_runtime.rank.sampling.grammar_compilation import BothGrammars, GrammarService, RemoteGrammars, ThreadedGrammars
from phalanx_runtime.rank.sampling.logprobs import PromptDetails, rows_per_chunk, token_details
from phalanx_runtime.rank.sampling.sampled_rows import SampledRowMirror
from phalanx_runtime.rank.sampling.sampler import Sampler
from phalanx_runtime.rank.step.adapters import RankAdapters
from phalanx_runtime.rank.step.batch import BatchBuilder, PromptLogprobRange, prompt_logprob_ranges
from phalanx_runtime.rank.step.draft_paths import (
    DraftOutcome,
    LastSampled,
    chosen_shapes,
    encode_paths,
    fill_encoded_paths,
    fill_paths,
    num_drafted,
    paths_of_draws,
    undrafted,
)
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank.step.pooling import Pooler
from phalanx_runtime.rank.tiers.host_pages import NO_HOST_PAGES, HostCopies
from phalanx_runtime.rank.tiers.state_slots import agree_on_states, prepare_states

POLL_S = 0.001  # of `_wait_for`, which waits only if this rank lags behind rank 0

Result = Callable[[], StepResult]  # waits for the result of a step


def _ready(result: StepResult | None) -> Result | None:
    return None if result is None else lambda: result


class ModelRunner:
    """One rank's model, pages and rows. On rank 0 it implements `engine.ports.StepRunner`; others `follow`. Raises PeerLost.

    A rank that is alone raises StepOutOfMemory, and any rank RowStateLost, for a plan that is applied, but not computed.
    """

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        builder: BatchBuilder,
        pool: PoolShape,
        pipeline: Pipeline,
        sampler: Sampler,
        pooler: Pooler,
        proposer: Proposer = NO_PROPOSER,
        device_step: StepQueue | None = None,
        host_pages: HostCopies = NO_HOST_PAGES,
        host_parts: HostCopies = NO_HOST_PAGES,
    ) -> None:
        """`device_step`: queues steps on the device, without stages. `host_pages`, `host_parts`: see `open_host_pages`."""
        self.clock: Callable[[], float] = time.perf_counter
        """Measures draft times; the clock of step times."""
        self.recorder: FlightRecorder = NO_FLIGHT_RECORDER
        self._model, self._caches, self._pool, self._pipeline = model, caches, pool, pipeline
        self._builder, self._sampler, self._pooler, self._proposer = builder, sampler, pooler, proposer
        self._page_caches, self._part_caches = divide_caches(caches, model.kv.windows, pool.num_parts)
        self._all_caches = [*self._page_caches, *proposer.caches]
        self._latest = DraftOutcome()
        self._drafts: deque[DraftOutcome] = deque()  # of plans in flight, as the next two
        self._busy_s: deque[float] = deque()  # time of the host; a device's own time precedes it
        self._results: deque[Result] = deque()  # if rank 0 samples
        self.device_step, self._host_pages, self._host_parts = device_step, host_pages, host_parts
        self._copy_wait_s = 0.0  # in waits for copies since the previous result
        self._layer_of = {id(cache): layer for layer, cache in enumerate(caches)}
        self._last_sampled, self._last_step = LastSampled(), 0
        self.adapters = RankAdapters(model, pipeline)
        self._grammar_service = GrammarService(sampler.grammars, pipeline.send_result)
        has_mirror = proposer.can_draft and pipeline.world.rank == 0 and not pipeline.is_sampling_rank
        self._mirror = SampledRowMirror(sampler.vocab_size, sampler.grammars) if has_mirror else None
        """Rows of the sampling rank, if this rank drafts for it."""

    @property
    def pool(self) -> PoolShape:
        """Shape of the page pool."""
        return self._pool

    @property
    def model(self) -> Model:
        """This rank's part of the model."""
        return self._model

    @property
    def caches(self) -> list[LayerCache]:
        """This rank's pages of the target."""
        return self._caches

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self._builder.dtype

    def page_access(self) -> PageAccess:
        """This rank's pages for KV transfer, from any thread."""
        is_still = not self._pool.has_states  # requests with states compute shared pages again
        return PageAccess(
            page_size=self._pool.page_size,
            open=partial(open_pages, self._page_caches, is_still=is_still),
            open_parts=partial(open_pages, self._part_caches, is_still=is_still) if self._pool.num_parts else no_parts,
            open_draft=self._draft_pages,
            wait_for=self._wait_for,
            host=self._host_pages,
            host_parts=self._host_parts,
            states=states_of(self._model),
        )

    @property
    def draft_failure(self) -> str:
        """Why this rank can no longer draft; else empty."""
        return self._proposer.failure

    def grammars(self) -> GrammarCompiler:
        """Makes the compiler for the ranks that sample and draft."""
        if self._pipeline.is_sampling_rank:
            return ThreadedGrammars(self._sampler.grammars)
        remote = RemoteGrammars(self._pipeline.send_order)
        self._pipeline.on_compiled(remote.complete)
        return remote if self._mirror is None else BothGrammars(remote, ThreadedGrammars(self._sampler.grammars))

    @property
    def fitting(self) -> Fitting:
        """`Sampler.num_fitting` on the sampling rank, otherwise `accept_all`."""
        return self._sampler.num_fitting if self._pipeline.is_sampling_rank else accept_all

    @property
    def depth(self) -> int:
        """Number of plans in flight."""
        return self._pipeline.stage.count

    def start(self, plan: StepPlan) -> None:
        """Sends the plan to all ranks and computes or queues this rank's part."""
        if self.device_step is None:
            plan = self._last_sampled.fill(plan)
        self._pipeline.send_plan(plan)
        started, waited_s = self.clock(), self._copy_wait_s
        result = self._step(plan)
        self._busy_s.append(max(0.0, self.clock() - started - (self._copy_wait_s - waited_s)))
        self._drafts.append(self._latest)
        if result is not None:
            self._last_sampled.record(plan, result)
            self._results.append(result)

    def finish(self) -> StepResult:
        """Returns the result of the oldest plan in flight."""
        result = self._results.popleft()() if self._pipeline.is_sampling_rank else self._pipeline.next_result()
        outcome, busy_s = self._drafts.popleft(), self._busy_s.popleft()
        (loaded_pages, load_s), (loaded_parts, part_load_s) = self._host_pages.take_loads(), self._host_parts.take_loads()
        return msgspec.structs.replace(
            result,
            draft_s=outcome.draft_s,
            draft_failure=self._proposer.failure,
            shapes=outcome.shapes,
            undrafted=outcome.undrafted,
            busy_s=result.busy_s or busy_s,
            loaded_pages=loaded_pages,
            load_s=load_s,
            loaded_parts=loaded_parts,
            part_load_s=part_load_s,
            copy_wait_s=max(result.copy_wait_s, self._take_copy_wait()),
        )

    def follow(self) -> None:
        """Executes orders of rank 0 until `dismiss`."""
        while (order := self._pipeline.next_order()) is not None:
            if isinstance(order, StepPlan):
                with suppress(RowStateLost) if self.depth == 1 else nullcontext():  # rank 0 takes the plan back
                    if (result := self._step(order)) is not None:
                        self._pipeline.send_result(msgspec.structs.replace(result(), copy_wait_s=self._take_copy_wait()))
            elif isinstance(order, AdapterOrder):
                self.adapters.execute(order)
            elif self._pipeline.is_sampling_rank:
                self._grammar_service.execute(order)
        self._grammar_service.close()
        if self._pipeline.is_sampling_rank:
            self._pipeline.send_result(None)

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks."""
        self._pipeline.send_plan(None)

    def _take_copy_wait(self) -> float:
        waited_s, self._copy_wait_s = self._copy_wait_s, 0.0
        return waited_s

    def _draft_pages(self) -> DraftPages | None:
        if not self._proposer.caches or not self._proposer.can_draft:
            return None
        # A draft may backfill full pages while a move reads them.
        return DraftPages(self._proposer.name, partial(open_pages, self._all_caches, is_still=False))

    def _wait_for(self, step: int) -> None:
        """Waits until this rank has computed a step that rank 0 has sent or will send soon, with its copies to host memory."""
        while self._last_step < step:
            time.sleep(POLL_S)
        await_steps(self._caches[0].k.device)
        self._host_pages.wait()
        self._host_parts.wait()

    def _step(self, plan: StepPlan) -> Result | None:
        """Runs and records a step. Returns the result to come, on the sampling rank."""
        started, waited_s = time.monotonic(), self._copy_wait_s
        result = self._run_step(plan)
        self.recorder.record(rank_step(plan, started, time.monotonic(), waited_s=self._copy_wait_s - waited_s))
        return result

    @torch.inference_mode()
    def _run_step(self, plan: StepPlan) -> Result | None:
        if self._pipeline.is_sampling_rank:
            for new in plan.admitted:
                self._sampler.admit(new)
        self._prepare(plan)
        queue = self.device_step
        try:
            return _ready(self._compute(plan)) if queue is None else self._queue(plan, queue)
        except torch.OutOfMemoryError as error:
            if self._pipeline.world.world_size > 1:
                raise  # other ranks wait for this one
            why = first_line(error)
        finally:
            self._last_step = plan.step
        # Not in the handler, whose traceback holds the tensors of the step.
        discard_step(self._model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # free memory may be in blocks of other sizes
        raise StepOutOfMemory(why)

    def _queue(self, plan: StepPlan, queue: StepQueue) -> Result | None:
        """Queues the step; computes it here if the device cannot sample it."""
        queue.update(plan)
        if queue.can_launch(plan):
            self._latest = DraftOutcome()
            if self._proposer.can_draft:  # it follows every plan; `can_launch` excludes those that it drafts for
                self._fill_drafts(plan)
            return queue.launch(plan)
        # Other ranks read these tokens on their devices.
        result = self._compute(self._last_sampled.fill(plan) if self._pipeline.is_sampling_rank else plan)
        queue.record(plan, result)
        return _ready(result)

    def _compute(self, plan: StepPlan) -> StepResult | None:
        pipeline, stage = self._pipeline, self._pipeline.stage
        agree_on_states(self._model, plan, pipeline.peers)
        received: Tensor | None = None
        if stage.is_first:
            plan = self._fill_drafts(plan)
        elif plan.rows:
            plan, received = self._receive(plan)
        hidden = self._model.hidden(self._builder.tensors(plan), self._caches, received) if plan.rows else None
        if not stage.is_last:
            if hidden is not None:
                self._send_to_next(plan, hidden)
            return None
        logits, prompt_details = (None, []) if hidden is None else self._logits(plan, hidden)
        if not pipeline.is_sampling_rank:
            return None
        if logits is None:
            vectors = self._pooler.pool(plan, self._builder.params, hidden).encode()
            return StepResult(step=plan.step, tokens=[], prompt_details=prompt_details, vectors=vectors)
        draws = [(plan.rows[request], index) for request, index in plan.draws]
        sampled = self._sampler.sample(logits, draws, paths_of_draws(plan) if plan.paths else ())
        return StepResult(
            step=plan.step,
            tokens=sampled.tokens,
            details=sampled.details,
            complete=sampled.ended,
            prompt_details=prompt_details,
            failed=sampled.failed,
            already_complete=sampled.over,
            run_lengths=sampled.runs,
            accepted=sampled.taken,
            vectors=self._pooler.pool(plan, self._builder.params, hidden).encode(),
        )

    def _await_pages(self, cache: LayerCache) -> None:
        self._copy_wait_s += self._host_pages.wait_for_layer(self._layer_of[id(cache)])

    def _prepare(self, plan: StepPlan) -> None:
        """Copies pages and strays, updates page tables."""
        # Draft passes, copies on write and captured graphs need whole pages; parts are not awaited by layer.
        uses_whole = plan.copies or plan.relocations or plan.host_resize is not None or self._proposer.can_draft
        uses_whole = uses_whole or bool(self._pool.num_parts)
        by_layer = plan.awaits_host_copies and not uses_whole and any(count > 1 for count in plan.counts)
        self._builder.await_pages = self._await_pages if by_layer else None
        must_wait = plan.awaits_host_copies and not by_layer
        self._copy_wait_s += self._host_parts.start(
            plan.part_host_copies, plan.part_host_keys, must_wait=False, resize=plan.part_host_resize
        )
        self._copy_wait_s += self._host_pages.start(
            plan.host_copies, plan.host_keys, must_wait=must_wait, resize=plan.host_resize
        )
        if must_wait:
            self._copy_wait_s += self._host_parts.start((), (), must_wait=True)
        page_caches = [*self._page_caches, *self._proposer.caches]
        for caches, copies in ((page_caches, plan.copies), (self._part_caches, plan.part_copies)):
            for (source, target), cache in product(copies, caches):
                for tensor in cache.tensors:
                    tensor[target].copy_(tensor[source])
        self._builder.update(plan)
        prepare_states(self._model, plan, self._host_parts.disk)
        for caches, has_parts in ((self._page_caches, False), (self._part_caches, True)):
            if plan.relocations and caches:
                sources, targets = self._builder.stray_slots(plan, has_parts)
                for tensor in (tensor for cache in caches for tensor in cache.tensors):
                    slots = tensor.view(-1, tensor.shape[-1])
                    slots.index_copy_(0, targets, slots.index_select(0, sources))

    def _fill_drafts(self, plan: StepPlan) -> StepPlan:
        start, can_draft = self.clock(), self._proposer.can_draft
        if self._mirror is not None:
            self._mirror.update(plan)
        rows = self._sampler.rows if self._mirror is None else self._mirror.rows
        drafted = self._proposer.propose(plan, self._builder, rows) if plan.rows else []
        draft_s = self.clock() - start if can_draft else 0.0
        if drafted:
            plan = fill_paths(plan, drafted)
            self._latest = DraftOutcome(draft_s, chosen_shapes(plan), undrafted(plan))
        else:
            self._latest = DraftOutcome(draft_s)
        if self._mirror is not None:
            self._mirror.record_drafts(plan)
        return plan

    def _send_to_next(self, plan: StepPlan, hidden: Tensor) -> None:
        if num_drafted(plan):
            self._pipeline.send_to_next(torch.tensor(encode_paths(plan), device=hidden.device))
        self._pipeline.send_to_next(hidden)

    def _receive(self, plan: StepPlan) -> tuple[StepPlan, Tensor]:
        hidden = self._builder.empty_hidden(len(plan.tokens), self._model.width)
        count = num_drafted(plan)
        if count:
            numbers = self._pipeline.receive_from_previous(torch.zeros(2 * count, dtype=torch.int64, device=hidden.device))
            plan = fill_encoded_paths(plan, numbers.tolist())
        return plan, self._pipeline.receive_from_previous(hidden)

    def _logits(self, plan: StepPlan, hidden: Tensor) -> tuple[Tensor | None, PromptDetails]:
        """Logits of all draws and prompt logprobs, on the sampling rank."""
        num_rows = len(plan.draws) + sum(plan.depths)
        logits = self._gather_logits(hidden[:num_rows]) if num_rows else None
        ranges = prompt_logprob_ranges(plan, self._builder.params)
        return logits, self._prompt_details(ranges, hidden[num_rows:]) if ranges else []

    def _gather_logits(self, hidden: Tensor) -> Tensor | None:
        return gather_logits(self._model, self._model.logits(hidden), self._pipeline.peers)

    def _prompt_details(self, ranges: list[PromptLogprobRange], hidden: Tensor) -> PromptDetails:
        """Prompt logprobs, parallel to the first rows of `hidden`, computed in chunks."""
        tokens = [token for part in ranges for token in part.tokens]
        hidden = hidden[: len(tokens)]
        tops = [part.top for part in ranges for _ in part.tokens]
        details: list[wire.TokenDetail] = []
        size = rows_per_chunk(self._model.vocab_size)
        for first in range(0, len(tokens), size):
            chunk = slice(first, first + size)
            logits = self._gather_logits(hidden[chunk])
            if logits is not None:
                details += token_details(logits, tokens[chunk], tops[chunk])
        ends = accumulate(len(part.tokens) for part in ranges)
        return [(part.request, part.start, details[end - len(part.tokens) : end]) for part, end in zip(ranges, ends, strict=True)]
