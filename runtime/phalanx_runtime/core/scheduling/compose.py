"""Composes the next step: decodes, then prompts in the order of the policy.

    decodes        may preempt the last request for a page
    draft tokens   where they pay; they preempt no request (`speculator`)
    prompts        running and new ones, each up to a share while others compete; the remaining budget extends them

A new request that does not fit ends admission. A request that runs alone gets every other step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.admission import Limits, can_start
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.policies import Policy
from phalanx_runtime.core.scheduling.queue import Queue
from phalanx_runtime.core.scheduling.running import RunningSet, SortKey
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.step_builder import StepBuilder

MIN_STRETCH = 1.25
"""Prefill may stretch decodes by this factor beyond the ITL target."""
MIN_PREFILL_TOKENS = 8


def prefill_tokens(
    limits: Limits,
    model: StepModel | None,
    decodes: int,
    context_tokens: int,
    decodes_in_flight: int = 0,
    draft_s: float = 0.0,
    draft_tokens: int = 0,
) -> int:
    """Returns how many prompt tokens fit the token budget and, with decodes, the ITL target, of which each plan in flight gets a
    part.

    `decodes` includes `draft_tokens`, which do not count for `MIN_STRETCH`. `decodes_in_flight`: those of other plans. `draft_s`:
    time of draft passes.
    """
    room = limits.max_num_batched_tokens - decodes
    if limits.itl_target_s is None or model is None or not decodes + decodes_in_flight:
        return room
    plain_s = model.predict(StepWork(0, decodes - draft_tokens, context_tokens))
    limit_s = max(limits.itl_target_s / limits.plans_in_flight - draft_s, MIN_STRETCH * plain_s + model.prompt_s)
    return min(room, max(MIN_PREFILL_TOKENS, model.prefill_within(limit_s, decodes, context_tokens)))


def prompt_share(limits: Limits, budget: int, uncomputed: int, num_others: int) -> int:
    """Returns a request's share of `budget` prefill tokens: half if it needs more and others compete."""
    if limits.is_encoder:
        return uncomputed
    if limits.long_prefill_tokens:
        return min(budget, limits.long_prefill_tokens)
    return -(-budget // 2) if num_others > 0 and uncomputed > budget else budget


def decode_share(limits: Limits, decodes: int) -> int:
    """Returns the decodes of one plan in flight."""
    return -(-decodes // limits.plans_in_flight)


@dataclass(slots=True)
class _PrefillBudget:
    """Prefill tokens of one step."""

    total: int
    left: int
    num_others: int = 0
    """Competing prompts minus one."""


class Composer:
    """Composes steps from running and waiting requests."""

    def __init__(
        self, limits: Limits, policy: Policy, queue: Queue, running: RunningSet, sharing: PrefixSharing, speculator: Speculator
    ) -> None:
        self.num_preemptions = 0
        self.preempted: list[tuple[int, str]] = []
        """Handles and ids of preempted requests, until the scheduler takes them."""
        self._limits = limits
        self._policy = policy
        self._queue = queue
        self._running = running
        self._sharing = sharing
        self._speculator = speculator
        self._was_alone = False
        self._awaits_victim = False
        self._lacks_pages = False
        """A prompt of this step waits for pages, so no other request gets them."""
        self._model: StepModel | None = None

    def compose(self, step: int, model: StepModel | None, now: float) -> StepBuilder:
        """Returns the step; empty if nothing can be computed."""
        self._model = model
        self._running.sort(lambda request: self._sort_key(request, now))
        requests = self._running.requests
        if any(request.params.runs_alone and request.in_flight for request in requests):
            return StepBuilder(step=step)
        lone = self._next_lone(now)
        if lone is None:
            return self._compose_batch(step, model, now)
        was_alone, self._was_alone = self._was_alone, False
        if was_alone and (batch := self._compose_batch(step, model, now)).chunks:
            return batch
        if any(request.in_flight for request in requests):
            return StepBuilder(step=step)
        alone = self._compose_alone(step, lone, model, now)
        self._was_alone = bool(alone.chunks)
        return alone if alone.chunks or was_alone else self._compose_batch(step, model, now)

    def preempt_newest(self, requests: Iterable[Request], now: float) -> Request | None:
        """Preempts the newest of `requests`, which lacked memory in a step, and returns it."""
        victim = self._running.preempt_newest(requests)
        if victim is not None:
            self._push_back(victim, now)
        return victim

    def preempt(self, request: Request, now: float) -> None:
        """Preempts a running request that is in no plan."""
        self._running.preempt(request)
        self._push_back(request, now)

    def _push_back(self, victim: Request, now: float) -> None:
        victim.scheduling.waits_since_s = now
        self._queue.push(victim, now)
        self.num_preemptions += 1
        self.preempted.append((victim.params.handle, victim.params.id))

    def _next_lone(self, now: float) -> Request | None:
        """Returns the next request that runs alone, if any."""
        for request in self._running.requests:
            if request.params.runs_alone and not (request.has_ended or request.is_frozen):
                return request
        first = self._queue.first(now)
        return first if first is not None and first.params.runs_alone else None

    def _compose_alone(self, step: int, request: Request, model: StepModel | None, now: float) -> StepBuilder:
        builder = self._new_step(step)
        total = prefill_tokens(self._limits, model, 0, 0)
        budget = _PrefillBudget(total, total)
        deferred: list[Request] = []
        if request.row is None:
            self._admit(request, builder, budget, deferred)
        elif request.num_uncomputed > 1:
            self._continue_prompt(request, builder, budget, now)
        elif self._ensure_slot(request, now):
            self._sharing.record_written(builder.add(request, 1), builder)
        for late in deferred:
            self._queue.push(late, now)
        self._speculator.follow_prompts(builder)
        return builder

    def _new_step(self, step: int) -> StepBuilder:
        self._awaits_victim = self._lacks_pages = False
        return StepBuilder(step=step, backfill_budget=self._limits.max_num_batched_tokens)

    def _compose_batch(self, step: int, model: StepModel | None, now: float) -> StepBuilder:
        builder = self._new_step(step)
        before = self.num_preemptions
        decodes_in_flight = self._add_decodes(builder, now)
        if self._awaits_victim:
            return builder
        if self.num_preemptions == before:
            self._speculator.propose(builder, model, len(self._running.requests), self._has_prompts())
        total = prefill_tokens(
            self._limits,
            model,
            decodes=builder.num_tokens,
            context_tokens=sum(chunk.end for chunk in builder.chunks),
            decodes_in_flight=decodes_in_flight,
            draft_s=self._speculator.draft_s(builder),
            draft_tokens=sum(chunk.draft.depth for chunk in builder.chunks),
        )
        self._add_prompts(builder, total, now, may_admit=self.num_preemptions == before)
        self._speculator.follow_prompts(builder)
        return builder

    def _sort_key(self, request: Request, now: float) -> SortKey:
        policy = self._policy
        return policy.rank(policy.lane(request)), policy.key(request, now), request.params.seniority

    def _add_decodes(self, builder: StepBuilder, now: float) -> int:
        """Adds decodes. Returns the number in other plans only."""
        decodes = [
            request
            for request in self._running.requests
            if request.num_uncomputed == 1 and not (request.has_ended or request.is_frozen or request.params.runs_alone)
        ]
        ready = [request for request in decodes if self._can_plan(request)]
        for request in ready[: decode_share(self._limits, len(decodes))]:
            if request.row is not None and self._ensure_slot(request, now):
                self._sharing.record_written(builder.add(request, 1), builder)
            if self._awaits_victim:
                break
        return len(decodes) - len(ready)

    def _can_plan(self, request: Request) -> bool:
        return not request.in_flight or (self._limits.runs_ahead and request.can_run_ahead)

    def _ensure_slot(self, request: Request, now: float, may_wait: bool = False) -> bool:
        """Returns whether the request has a slot for its token. May preempt requests, with `may_wait` itself only if no other
        is in a plan, which will free pages.

        A victim in flight is preempted after its plan: `_awaits_victim` keeps it and later requests out of this step.
        """
        pool, pages = self._sharing.pool, request.pages
        if pool.has_slot(pages, request.num_computed):
            return True
        while True:
            if pool.add_slot(pages, request.num_computed):
                return True
            others_compute = any(other.in_flight for other in self._running.requests if other is not request)
            if may_wait and others_compute and self._running.last_idle in (request, None):
                self._lacks_pages = True
                return False
            self._awaits_victim = self._limits.runs_ahead and self._running.is_last_in_flight
            victim = None if self._awaits_victim else self._running.preempt_last()
            if victim is None:
                return False
            self._push_back(victim, now)
            if victim is request:
                return False

    def _has_prompts(self) -> bool:
        return bool(self._queue.num_ready) or any(request.num_uncomputed > 1 for request in self._running.requests)

    def _add_prompts(self, builder: StepBuilder, total: int, now: float, may_admit: bool) -> None:
        prompts = [
            request
            for request in self._running.requests
            if request.num_uncomputed > 1
            and self._can_plan(request)
            and not (request.has_ended or request.is_frozen or request.params.runs_alone)
        ]
        prompts.reverse()
        budget = _PrefillBudget(total, total, len(prompts) + self._queue.num_ready - 1)
        deferred: list[Request] = []
        before = self.num_preemptions
        while budget.left > 0:
            first = self._queue.first(now) if may_admit else None
            if first is not None and first.params.runs_alone:
                first, may_admit = None, False
            if prompts and (first is None or self._sort_key(prompts[-1], now) < self._sort_key(first, now)):
                self._continue_prompt(prompts.pop(), builder, budget, now)
                may_admit = may_admit and self.num_preemptions == before and not self._lacks_pages
                if self._awaits_victim:
                    break
            elif first is None:
                break
            else:
                may_admit = self._admit(first, builder, budget, deferred)
        for request in deferred:
            self._queue.push(request, now)
        if not self._limits.long_prefill_tokens:
            self._extend_prompts(builder, budget)

    def _continue_prompt(self, request: Request, builder: StepBuilder, budget: _PrefillBudget, now: float) -> None:
        """Adds more of a running prompt, and refunds tokens that others computed. May preempt requests if it lacks pages."""
        if request.row is None:
            return  # preempted for another prompt of this step
        before = request.pages.cached_tokens
        is_ready = self._sharing.skip_computed(request, builder)
        if request.pages.cached_tokens > before:
            self._policy.charge(request, before - request.pages.cached_tokens, 0)
        if not is_ready or not self._ensure_slot(request, now, may_wait=True):
            return
        while not self._add_prompt(request, builder, budget) and not self._computes(builder):
            victim = self._running.preempt_last()  # each prompt waits for as many parts as an image needs
            if victim is None:
                return
            self._push_back(victim, now)
            if victim is request:
                return

    def _computes(self, builder: StepBuilder) -> bool:
        """Returns whether this step, or one in flight, computes anything."""
        return bool(builder.chunks) or any(request.in_flight for request in self._running.requests)

    def _admit(self, request: Request, builder: StepBuilder, budget: _PrefillBudget, deferred: list[Request]) -> bool:
        """Starts or defers the first request of the queue. Returns whether admission continues."""
        if self._limits.is_encoder and builder.chunks and request.num_uncomputed > budget.left:
            return False  # a later step computes it whole
        sharing, pool = self._sharing, self._sharing.pool
        found = sharing.find(request)
        num_free_rows = self._running.num_free_rows
        if sharing.must_defer(request, found, builder):
            self._queue.pop(request)
            deferred.append(request)
            return len(deferred) <= num_free_rows
        num_new, num_unheld = sharing.needs(request, found)
        if not can_start(num_new, pool.free_pages - num_unheld, num_free_rows, len(self._running.requests)):
            return False
        num_pages, num_running = pool.pages_for(len(request.tokens)), len(self._running.requests)
        if pool.parts is not None and not pool.parts.can_start(request.pages, found, num_pages, num_running):
            return False
        self._queue.pop(request)
        self._running.add(request)
        is_new = not request.max_computed
        sharing.start(request, found, builder, self._model, num_running)
        if is_new:
            self._policy.charge(request, max(0, request.params.num_prompt - request.num_computed), 0)
        if not (builder.chunks and sharing.writes.is_loading(request)):  # else its pages are loaded beside this step
            self._add_prompt(request, builder, budget)
        return True

    def _add_prompt(self, request: Request, builder: StepBuilder, budget: _PrefillBudget) -> bool:
        """Returns whether tokens of the prompt are added."""
        share = prompt_share(self._limits, budget.total, request.num_uncomputed, budget.num_others)
        count = self._grow(request, request.num_computed, min(request.num_uncomputed, share, budget.left), builder)
        if not count:
            return False
        chunk = builder.add(request, count)
        budget.left -= chunk.count
        self._sharing.record_written(chunk, builder)
        return True

    def _grow(self, request: Request, start: int, count: int, builder: StepBuilder) -> int:
        """Returns how many tokens a request may compute from `start` on: `count`, up to `whole_end` as far as it has pages."""
        last = start + min(request.num_uncomputed, self._limits.max_num_batched_tokens - builder.num_tokens)
        end = whole_end(request, start, start + count, last)
        grown = start + self._sharing.grow(request, start, end - start)
        if grown < end and whole_end(request, start, grown, grown) == start:
            grown = start + self._sharing.grow(request, start, end - start, rewrites=True)
        return whole_end(request, start, grown, grown) - start

    def _extend_prompts(self, builder: StepBuilder, budget: _PrefillBudget) -> None:
        for chunk in builder.chunks:
            uncovered = chunk.request.num_tokens - chunk.end
            if budget.left > 0 and uncovered and self._sharing.can_extend(chunk):
                added = self._grow(chunk.request, chunk.end, min(uncovered, budget.left), builder)
                chunk.count += added
                budget.left -= added
                self._sharing.record_written(chunk, builder)


def whole_end(request: Request, start: int, end: int, last: int) -> int:
    """Returns the end of a chunk from `start`: `end`, unless that is within an image whose tokens attend to each other.

    One step computes all such tokens of an image. The chunk ends before it, or after it if the chunk has no token before it, or
    at `start` if that is beyond `last`. A chunk may start within an image, after tokens that other requests computed with all of
    it.
    """
    for image in request.params.images:
        for first, count in image.spans if image.attends_within else ():
            if first < end < first + count:
                return first if first > start else first + count if first + count <= last else start
    return end
