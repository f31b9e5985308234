"""The scheduler of rank 0: takes requests, returns step plans, takes results.

Deterministic: times are arguments. Up to `Limits.max_flights` plans are in flight and committed in order. They have disjoint
requests, unless scheduling is asynchronous: then a plan continues the requests of the previous one before their tokens are known
(`LAST_SAMPLED`). When pages run out, the last request of the policy's order is preempted and recomputed later.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from phalanx_api import wire
from phalanx_api.cost import StepFit
from phalanx_runtime.core.admission import Limits, Refusal, check_images, check_length, check_queue
from phalanx_runtime.core.flight_entries import Occupancy
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.migration.page_orders import NO_ROW
from phalanx_runtime.core.migration.rescue import Pressure
from phalanx_runtime.core.request import Request, make_request
from phalanx_runtime.core.scheduling.adapters import AdapterTable
from phalanx_runtime.core.scheduling.compose import Composer
from phalanx_runtime.core.scheduling.delivery import TokenDelivery, take_back
from phalanx_runtime.core.scheduling.policies import Policy
from phalanx_runtime.core.scheduling.prefix_holds import PrefixHolds
from phalanx_runtime.core.scheduling.queue import Queue
from phalanx_runtime.core.scheduling.report import LoadReporter
from phalanx_runtime.core.scheduling.reservations import Reservations
from phalanx_runtime.core.scheduling.running import RunningSet
from phalanx_runtime.core.speculation.config import (
    NO_SPECULATION,
    Fitting,
    SpeculationConfig,
    accept_all,
    speculation_of,
)
from phalanx_runtime.core.speculation.draft_backfill import num_drafted
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.step_builder import StepBuilder
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.core.utilization import computing_s

MAX_AHEAD = 16
"""One page in this many may be free for the next step although it could hold a cached page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """Snapshot of a running request."""

    num_tokens: int
    num_output: int
    num_computed: int
    """Tokens in the pages, in place."""
    pages: Sequence[int]
    """Leading ones may be `NULL_PAGE`."""
    is_settled: bool
    """Frozen, and in no plan in flight."""
    num_preemptions: int
    """The pages are the same while it is equal."""
    num_drafted: int = 0
    """Leading tokens with the draft model's KV, after the plans so far."""
    row: int = NO_ROW
    """Its row, if layers keep a state per request."""


def pages_ahead(pool: PagePool, max_num_batched_tokens: int) -> int:
    """Returns how many pages are free before a step with a host tier: those of a step, at most a part of the pool."""
    return min(pool.pages_for(max_num_batched_tokens), pool.num_pages // MAX_AHEAD) if pool.host.rules.limit else 0


class Scheduler:
    """Requests of one engine, with their rows and pages."""

    def __init__(
        self,
        limits: Limits,
        sharing: PrefixSharing,
        policy: Policy,
        speculation: SpeculationConfig = NO_SPECULATION,
        fitting: Fitting = accept_all,
        max_loras: int = 0,
        has_states: bool = False,
    ) -> None:
        self.sharing = sharing
        self.has_states = has_states
        """Whether layers keep a state per request, which its pages lack."""
        self.adapters = AdapterTable(max_loras)
        self.pool = sharing.pool
        parts, num_host_pages = self.pool.parts, self.pool.host.rules.limit
        window, num_parts = (self.window, 0) if parts is None else (parts.window.tokens, parts.num_parts)
        shape = PoolShape(self.pool.num_pages, self.pool.page_size, num_host_pages, window=window, num_parts=num_parts)
        self.limits = limits.within(shape)
        self.fit = StepFit()
        self._policy = policy
        self._requests: dict[int, Request] = {}
        self._queue = Queue(policy, self.pool.page_size, None if sharing.windowed is None else sharing.windowed.max_pages)
        self._running = RunningSet(limits.max_num_seqs, sharing)
        self.reservations = Reservations(self.limits, self._running, sharing, self.adapters)
        self.prefix_holds = PrefixHolds(self.pool, sharing.windowed)

        self._reporter = LoadReporter(self.limits, self._queue, self._running, sharing)
        self.speculator = Speculator(self.limits, self.pool, speculation, fitting)
        self._composer = Composer(
            self.limits, policy, queue=self._queue, running=self._running, sharing=sharing, speculator=self.speculator
        )
        self._delivery = TokenDelivery(policy, self._reporter.output, sharing, self.speculator)
        self._flights: deque[StepBuilder] = deque()
        self._taken_back: list[Request] = []
        self._step = 0
        self._num_submitted = 0
        self._is_unsorted = False
        self._num_ahead = pages_ahead(self.pool, self.limits.max_num_batched_tokens)

    @property
    def window(self) -> int:
        """Tokens whose pages a request keeps; 0: all, or all of layers with full attention."""
        return 0 if self.sharing.windowed is None else self.sharing.windowed.window.tokens

    @property
    def requests(self) -> Mapping[int, Request]:
        """Waiting and running requests by handle."""
        return self._requests

    @property
    def refused(self) -> Sequence[wire.Refused]:
        """Requests that the last `commit` ended without a token."""
        return self._delivery.refused

    @property
    def planned_step(self) -> int:
        """Number of the latest plan, which may write shared pages of any request."""
        return self._step

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._composer.num_preemptions

    def occupancy(self) -> Occupancy:
        """Returns the numbers of requests and pages."""
        return Occupancy(
            running=len(self._running.requests),
            waiting=len(self._queue),
            free_pages=self.pool.free_pages,
            total_pages=self.pool.num_pages,
        )

    def take_preempted(self) -> list[tuple[int, str]]:
        """Returns handle and id of the requests that were preempted since the previous call."""
        preempted, self._composer.preempted = self._composer.preempted, []
        return preempted

    @property
    def backlog_tokens(self) -> int:
        """Tokens of queued requests, with the mean output of each."""
        return self._queue.totals.tokens + int(len(self._queue) * self._reporter.output.mean)

    def submit(
        self, handle: int, submitted: wire.Request, now: float = 0.0, is_held: bool = False, move: str = ""
    ) -> Refusal | wire.Finished | None:
        """Takes a request, unless it is refused or its delivered tokens end it.

        A held request starts after `release`. With `move` it starts at once if all its pages arrived.
        """
        self._reporter.last_handle = max(self._reporter.last_handle, handle)
        refusal = check_length(len(submitted.prompt), self.limits, submitted.pooling is not None)
        refusal = refusal or check_images(submitted.images, self.limits, len(submitted.prompt))
        if refusal is not None:
            return refusal
        if handle in self._requests:
            return Refusal(400, "handle_in_use", f"handle {handle} belongs to a running request; use a new one")
        speculation = speculation_of(self.speculator.config, submitted)
        if isinstance(speculation, Refusal):
            return speculation
        adapter = self.adapters.slot_of(submitted.adapter)
        if isinstance(adapter, Refusal):
            return adapter
        keys, order = self.sharing.make_keys(submitted), self._num_submitted
        request = make_request(handle, order, submitted, self.limits.max_model_len, keys=keys, now=now, adapter=adapter)
        request.speculation = speculation
        reason = request.finish_reason()
        if reason is not None:
            return wire.Finished(handle, submitted.epoch, reason)
        refusal = check_queue(len(self._queue), self.backlog_tokens, self.limits)
        was_started = submitted.epoch > 0 or submitted.delivered  # a router increments the epoch when a group is lost
        if refusal is not None and not was_started:
            self._reporter.num_refused += 1
            return refusal
        self._num_submitted += 1
        self._requests[handle] = request
        if move and self.reservations.claim(move, request):
            self._policy.arrive(request, self._queue.lanes())
            if not request.num_output:
                self._policy.charge(request, max(0, request.params.num_prompt - request.num_computed), 0)
            request.is_frozen = request.scheduling.awaits_grammar = is_held
        elif is_held:
            self._queue.hold(request)
        else:
            self._enqueue(request, now)
        return None

    def release(self, handle: int, now: float = 0.0) -> None:
        """Lets a held request start. Ignores unknown handles."""
        request = self._queue.release(handle)
        if request is not None:
            self._enqueue(request, now)
        elif handle in self._requests:
            self._requests[handle].scheduling.awaits_grammar = False
            self.thaw(handle)

    def freeze(self, handle: int) -> bool:
        """Plans no step of a request until `thaw`. Returns false if it does not run or is frozen."""
        request = self._requests.get(handle)
        if request is None or request.row is None or request.is_frozen:
            return False
        request.is_frozen = True
        return True

    def pin(self, handle: int, is_pinned: bool) -> None:
        """Lets a request keep all its pages while a move reads them, and drop them afterwards. Ignores unknown handles."""
        request = self._requests.get(handle)
        if request is not None:
            request.pages.is_pinned = is_pinned
            if not request.in_flight:
                self.sharing.drop_unreadable(request, request.num_in_place)

    def thaw(self, handle: int) -> None:
        """Lets a frozen request continue, unless it awaits its grammar. Ignores unknown handles."""
        request = self._requests.get(handle)
        if request is not None:
            request.is_frozen = request.scheduling.awaits_grammar

    def running_request(self, handle: int) -> RunningRequest | None:
        """Returns a snapshot of a request, if it runs."""
        request = self._requests.get(handle)
        if request is None or request.row is None:
            return None
        return RunningRequest(
            num_tokens=len(request.tokens),
            num_output=request.num_output,
            num_computed=request.num_in_place,
            pages=request.pages.ids,
            is_settled=request.is_frozen and not request.in_flight,
            num_preemptions=request.scheduling.num_preemptions,
            num_drafted=num_drafted(self.pool, request),
            row=request.row if self.has_states else NO_ROW,
        )

    def pressure(self, pages_per_s: float) -> Pressure | None:
        """See `LoadReporter.pressure`."""
        return self._reporter.pressure(pages_per_s)

    def abort(self, handle: int) -> None:
        """Ends a request; its pages are freed after its plan. Ignores unknown handles."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        request.has_ended = True
        if request.row is None:
            self._queue.abort(request)
        else:
            self._running.drop_ended()

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Returns the next plan, if anything can be computed. May preempt requests."""
        assert len(self._flights) < self.limits.max_flights, "a plan in flight must be committed first"
        if self._is_unsorted:
            self._queue.sort(now)
            self._is_unsorted = False
        builder = self._composer.compose(self._step + 1, self.fit.model(), now)
        if not builder.chunks:
            assert not self.sharing.writes.has_loads(), "a request that loads pages computes in the same plan"
            return None
        self._step += 1
        self._flights.append(builder)
        self.pool.evict_ahead(self._num_ahead)
        self.sharing.writes.add_pending(builder)
        plan = builder.finish(self._running.take_left_rows())
        for chunk in builder.chunks:
            request = chunk.request
            self._reporter.recomputed_tokens += max(0, min(chunk.end, request.max_computed) - chunk.start)
            request.max_computed = max(request.max_computed, chunk.end)
        return plan

    def take_back(self, lost_rows: Collection[int] = ()) -> None:
        """Takes back the latest plan: no rank computed it. Without `lost_rows` `preempt_newest` must follow once none is left."""
        builder = self._flights.pop()
        take_back(builder, self._running.requests, self.sharing, lost_rows)
        self._taken_back = [chunk.request for chunk in builder.chunks]
        self._running.drop_ended()

    def preempt_newest(self, now: float = 0.0) -> int | None:
        """Preempts the newest request of the plan that was taken back. Returns its handle, if one runs."""
        assert not self._flights, "a request in a plan cannot be preempted"
        for request in [request for request in self._running.requests if self.sharing.lacks_pages(request)]:
            self._composer.preempt(request, now)
        victim = self._composer.preempt_newest(self._taken_back, now)
        self._taken_back = []
        return None if victim is None else victim.params.handle

    def commit(self, result: StepResult, wall_s: float | None = None) -> wire.Tokens:
        """Applies the result of the oldest plan in flight. `wall_s`: step time, if measured."""
        builder = self._flights[0] if self._flights else None
        assert builder is not None and result.step == builder.step, (
            f"result of step {result.step} does not match the plans in flight"
        )
        run_lengths = result.run_lengths or [1] * len(builder.draws)
        assert len(run_lengths) == len(builder.draws), f"{len(run_lengths)} run lengths for {len(builder.draws)} draws"
        assert len(result.tokens) == sum(run_lengths), f"{len(result.tokens)} tokens for runs of {sum(run_lengths)}"
        self._flights.popleft()
        for chunk in builder.chunks:
            chunk.request.in_flight -= 1
            if chunk.request.has_ended:
                self._reporter.wasted_tokens += chunk.count + chunk.draft.depth
        for i, _ in builder.draws:
            builder.chunks[i].request.num_pending -= 1
        self.pool.host.learn(result.loaded_pages, result.load_s)
        self.pool.host_parts.learn(result.loaded_parts, result.part_load_s)
        frame = self._delivery.deliver(builder, result, run_lengths)
        for handle in self._delivery.ended_handles(frame):
            del self._requests[handle]
        for chunk in builder.chunks:
            request = chunk.request
            request.max_computed = max(request.max_computed, request.num_computed)
            self.speculator.settle(chunk)
            if self.sharing.has_window and not request.has_ended:
                self.sharing.drop_unreadable(request, chunk.end if request.in_flight else request.num_in_place)
        self._running.drop_ended()
        self._reporter.tenants.add_tokens(builder)
        self.pool.host.counters.waited_s += result.copy_wait_s
        fitted_s = None if wall_s is None else computing_s(wall_s, result.copy_wait_s, result.busy_s)
        self.speculator.learn(builder, self.fit.model(), fitted_s, result.draft_s, result.draft_failure)
        if wall_s is not None and fitted_s is not None:
            self._learn(builder, wall_s, fitted_s, result.draft_s)
        return frame

    def started_handles(self) -> list[int]:
        """Returns the requests that the latest plan starts or resumes."""
        builder = self._flights[-1]
        rows = {new.row for new in builder.admitted}
        return [chunk.request.params.handle for chunk in builder.chunks if chunk.request.row in rows]

    def oldest_chunks(self) -> list[tuple[int, int]]:
        """Returns handle and tokens of each request in the oldest plan in flight."""
        return [(chunk.request.params.handle, chunk.count) for chunk in self._flights[0].chunks]

    def expected_s(self) -> float | None:
        """Returns the predicted time of the latest plan, once the cost model is fitted."""
        model = self.fit.model()
        return None if model is None else model.predict(self._flights[-1].work)

    def is_idle(self) -> bool:
        """Returns whether no request is present, no row reserved and no prefix held."""
        return not (self._requests or self._running.requests or len(self.reservations) or len(self.prefix_holds))

    def used_adapter_slots(self) -> set[int]:
        """Returns the slots of the adapters that present requests have."""
        return {request.params.adapter for request in self._requests.values()}

    def epoch_of(self, handle: int) -> int:
        """Returns the epoch of a present request."""
        return self._requests[handle].params.epoch

    def is_blocked(self) -> bool:
        """Returns whether nothing can be computed until a submit, release or thaw."""
        return not self._queue.num_ready and all(r.is_frozen and not r.in_flight for r in self._running.requests)

    def load(self, now: float = 0.0) -> wire.Load:
        """Returns the next load report."""
        counts = self.speculator.counts()
        return self._reporter.make(now, self.num_preemptions, self.reservations.num_pages, self.fit.model(), counts)

    def is_preemption_near(self) -> bool:
        """See `LoadReporter.is_preemption_near`."""
        return self._reporter.is_preemption_near()

    def check(self) -> list[str]:
        """Returns errors of pages and rows."""
        with_parts = chain(self.reservations.with_parts(), self.prefix_holds.with_parts())
        return self._running.check(self.reservations.held(), self.prefix_holds.held(), with_parts)

    def _enqueue(self, request: Request, now: float) -> None:
        self._policy.arrive(request, self._queue.lanes())
        self._queue.push(request, now)

    def _learn(self, builder: StepBuilder, wall_s: float, fitted_s: float, draft_s: float) -> None:
        """Updates cost model (without drafts of decodes), load report and policy. fitted_s: without waits for copies."""
        if not builder.image_tiles:  # an image takes a long time, or none if it is encoded already
            self.fit.add(builder.work, fitted_s - self.speculator.decode_draft_s(builder, draft_s))
        model = self.fit.model()
        self._reporter.record_step(builder, model, wall_s, fitted_s)
        if model is not None:
            self._is_unsorted |= self._policy.learn(model, self._reporter.speedup)
