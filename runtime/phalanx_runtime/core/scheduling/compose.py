"""What the next step computes: decodes first, then prompts in the order of the policy, running ones and newcomers alike.

    decodes   every running request that misses one token and is in no plan in flight; its page may cost the last one its pages
    proposals behind decodes, where they pay and nobody loses pages for them (module `speculator`)
    prompts   at most a share each while others have prompt tokens; what is left over goes to those that were cut

    alone     a request under which groups died has every other step for itself, with no plan in flight beside it

A newcomer that does not fit now stops admission: nobody overtakes it but running requests. How many tokens: module `budget`.
"""

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.admission import Admit, Limits, fits_now
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.policies import Policy
from phalanx_runtime.core.scheduling.queue import Queue
from phalanx_runtime.core.scheduling.running import Place, RunningSet
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.step_builder import StepBuilder

# How many tokens a step computes: decodes first, and prompts get what is left.
#     no target, or nothing decodes, or no times known yet     max_num_batched_tokens - decodes     else
# as many as keep the step within the target, and at least a few
# With several plans in flight a stream waits for all of them between its tokens: each gets its part of the target, one
# without decodes too while others have some.
# The few: what makes the step a quarter longer than the decodes alone, beside what any prompt tokens cost, so that prompts
# progress where the target cannot hold. Nobody waits for a timer: a step starts with what is there.

LEAST_STRETCH = 1.25
LEAST_TOKENS = 8


def prefill_tokens(
    limits: Limits,
    model: StepModel | None,
    decodes: int,
    context_tokens: int,
    elsewhere: int = 0,
    draft_s: float = 0.0,
    proposals: int = 0,
) -> int:
    """How many prompt tokens may join this many decodes, whose contexts sum to `context_tokens`.

    elsewhere: decodes in other plans in flight. draft_s: what drafts of this step take before it. proposals: so many of `decodes`
    are such: they stretch no step beyond the target.
    """
    room = limits.max_num_batched_tokens - decodes
    if limits.itl_target_s is None or model is None or not decodes + elsewhere:
        return room
    alone_s = model.predict(StepWork(0, decodes - proposals, context_tokens))
    limit_s = max(limits.itl_target_s / limits.plans_in_flight - draft_s, LEAST_STRETCH * alone_s + model.prompt_s)
    return min(room, max(LEAST_TOKENS, model.prefill_within(limit_s, decodes, context_tokens)))


def prompt_share(limits: Limits, budget: int, missing: int, others: int) -> int:
    """How many of a step's prompt tokens a request may take that misses so many, while `others` have some to compute too.

    A prompt longer than the step leaves half of it to the others; the caller gives back to it what they do not need.
    """
    if limits.long_prefill_tokens:
        return min(budget, limits.long_prefill_tokens)
    return -(-budget // 2) if others > 0 and missing > budget else budget


def decode_share(limits: Limits, decodes: int) -> int:
    """How many of all decoding requests go into one plan, so that each of the plans in flight gets its part."""
    return -(-decodes // limits.plans_in_flight)


class Composer:
    """Makes plans of requests that run and requests that wait. May preempt requests."""

    def __init__(
        self, limits: Limits, policy: Policy, queue: Queue, seats: RunningSet, sharing: PrefixSharing, speculator: Speculator
    ) -> None:
        self.num_preemptions = 0
        self._limits = limits
        self._policy = policy
        self._queue = queue
        self._seats = seats
        self._sharing = sharing
        self._speculator = speculator
        self._was_alone = False

    def make(self, step: int, model: StepModel | None, now: float) -> StepBuilder:
        """The step; empty when nothing can be computed now."""
        self._seats.sort(lambda request: self._place(request, now))
        lone = self._lone(now)
        if lone is None:
            return self._together(step, model, now)
        if any(request.alone and request.in_flight for request in self._seats.running):
            return StepBuilder(step=step)
        was_alone, self._was_alone = self._was_alone, False
        if was_alone and (others := self._together(step, model, now)).chunks:
            return others
        if any(request.in_flight for request in self._seats.running):
            return StepBuilder(step=step)
        alone = self._by_itself(step, lone, model, now)
        self._was_alone = bool(alone.chunks)
        return alone if alone.chunks or was_alone else self._together(step, model, now)

    def _lone(self, now: float) -> Request | None:
        """The request whose turn it is to be computed alone: one that runs, else the first of the queue."""
        for request in self._seats.running:
            if request.alone and not (request.gone or request.is_frozen):
                return request
        first = self._queue.first(now)
        return first if first is not None and first.alone else None

    def _by_itself(self, step: int, request: Request, model: StepModel | None, now: float) -> StepBuilder:
        """A step of this request and no other; empty when it does not fit."""
        making = self._making(step)
        making.budget = prefill_tokens(self._limits, model, 0, 0, 0)
        making.whole = making.budget
        put_off: list[Request] = []
        if request.row is None:
            self._admit(request, making, put_off)
        elif request.missing > 1:
            self._go_on(request, making)
        elif self._has_slot(request, now):
            self._sharing.note_written(making.add(request, 1), making)
        for late in put_off:
            self._queue.push(late, now)
        self._speculator.follow_prompts(making)
        return making

    def _making(self, step: int) -> StepBuilder:
        return StepBuilder(step=step, draft_room=self._limits.max_num_batched_tokens)

    def _together(self, step: int, model: StepModel | None, now: float) -> StepBuilder:
        """A step of all requests that share steps; empty when none of them can be computed now."""
        making = self._making(step)
        before = self.num_preemptions
        elsewhere = self._add_decodes(making, now)
        if self.num_preemptions == before:
            self._speculator.propose(making, model, len(self._seats.running), self._has_prompts())
        context = sum(chunk.end for chunk in making.chunks)
        draft_s = self._speculator.draft_s(making)
        proposals = sum(chunk.depth for chunk in making.chunks)
        making.budget = prefill_tokens(
            self._limits,
            model,
            decodes=making.num_tokens,
            context_tokens=context,
            elsewhere=elsewhere,
            draft_s=draft_s,
            proposals=proposals,
        )
        self._add_prompts(making, now, may_admit=self.num_preemptions == before)
        self._speculator.follow_prompts(making)
        return making

    def _place(self, request: Request, now: float) -> Place:
        policy = self._policy
        return policy.rank(policy.lane(request)), policy.key(request, now), request.seniority

    def _add_decodes(self, making: StepBuilder, now: float) -> int:
        """Adds running requests that miss one token; gives back how many others do, which are in plans in flight."""
        decodes = [one for one in self._seats.running if one.missing == 1 and not (one.gone or one.is_frozen or one.alone)]
        ready = [request for request in decodes if not request.in_flight]
        for request in ready[: decode_share(self._limits, len(decodes))]:
            if request.row is not None and self._has_slot(request, now):
                self._sharing.note_written(making.add(request, 1), making)
        return len(decodes) - len(ready)

    def _has_slot(self, request: Request, now: float) -> bool:
        """Whether the request has a slot for its token, after it got a page if it needed one. May preempt it or others."""
        pool = self._sharing.pool
        if request.computed < len(request.pages) * pool.page_size:
            return True
        while True:
            page = pool.take(1)
            if page is not None:
                request.pages += page
                return True
            victim = self._seats.preempt_last()
            if victim is None:
                return False
            victim.waits_since_s = now
            self._queue.push(victim, now)
            self.num_preemptions += 1
            if victim is request:
                return False

    def _has_prompts(self) -> bool:
        """Whether prompt tokens wait for a step."""
        return bool(self._queue.num_ready) or any(request.missing > 1 for request in self._seats.running)

    def _add_prompts(self, making: StepBuilder, now: float, may_admit: bool) -> None:
        """Fills the budget with prompt tokens of running requests and newcomers."""
        running = [r for r in self._seats.running if r.missing > 1 and not (r.in_flight or r.gone or r.is_frozen or r.alone)]
        running.reverse()
        making.whole, making.others = making.budget, len(running) + self._queue.num_ready - 1
        put_off: list[Request] = []
        while making.budget > 0:
            newcomer = self._queue.first(now) if may_admit else None
            if newcomer is not None and newcomer.alone:
                newcomer, may_admit = None, False
            if running and (newcomer is None or self._place(running[-1], now) < self._place(newcomer, now)):
                self._go_on(running.pop(), making)
            elif newcomer is None:
                break
            else:
                may_admit = self._admit(newcomer, making, put_off)
        for request in put_off:
            self._queue.push(request, now)
        if not self._limits.long_prefill_tokens:
            self._lengthen(making)

    def _go_on(self, request: Request, making: StepBuilder) -> None:
        """Adds more of a running prompt. What others computed for it in the meantime was charged when it started."""
        before = request.cached_tokens
        is_ready = self._sharing.skip(request, making)
        if request.cached_tokens > before:
            self._policy.charge(request, before - request.cached_tokens, 0)
        if is_ready:
            self._add_prompt(making, request)

    def _admit(self, request: Request, making: StepBuilder, put_off: list[Request]) -> bool:
        """Starts the first request of the queue, or puts it off to the next step. False when it does not fit."""
        pool = self._sharing.pool
        run = self._sharing.find(request)
        if self._sharing.must_wait(request, run, making):
            self._queue.pop(request)
            put_off.append(request)
            return len(put_off) <= self._seats.free
        needed = pool.pages_for(len(request.tokens)) - len(run)
        free = pool.free_pages - pool.unheld(run)
        if not isinstance(fits_now(needed, free, self._seats.free, len(self._seats.running)), Admit):
            return False
        self._queue.pop(request)
        self._seats.add(request)
        is_new = not request.farthest
        self._sharing.take(request, run, making)
        if is_new:
            self._policy.charge(request, max(0, request.num_prompt - request.computed), 0)
        self._add_prompt(making, request)
        return True

    def _add_prompt(self, making: StepBuilder, request: Request) -> None:
        """Puts the next tokens of a request into the step, as many as its share and the budget allow."""
        share = prompt_share(self._limits, making.whole, request.missing, making.others)
        chunk = making.add(request, min(request.missing, share, making.budget))
        making.budget -= chunk.count
        self._sharing.note_written(chunk, making)

    def _lengthen(self, making: StepBuilder) -> None:
        """Gives what is left of the budget to prompts that were cut to their share."""
        for chunk in making.chunks:
            rest = len(chunk.request.tokens) - chunk.end
            if making.budget > 0 and rest and self._sharing.goes_on(chunk):
                before = chunk.end
                chunk.count += min(rest, making.budget)
                making.budget -= chunk.end - before
                self._sharing.note_written(chunk, making)
