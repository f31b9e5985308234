"""What an engine tells routers of itself: from its queue, its running requests, its pages and its steps to a `wire.Load`.

    followed += (measured - followed) / 20             the last twenty steps or so; the plain mean of the first ones
    steps_to_full = see `outlive`, of free slots and unused ones of held pages, with the slots that newcomers took, followed;
                    in steps of a token for each request, which go by faster where tokens are proposed (`pace`)
    imminent      = fewer free pages than running requests: one may be preempted before each has filled another page

A report costs O(running), and a look into the cache for as many waiting prompts as `LOOK_PAGES` allows; prompt tokens that the
cache spares are of the last look at each.
"""

from dataclasses import astuple

from phalanx_api import wire
from phalanx_api.cost import StepModel, attended
from phalanx_api.speculation import SpeculationCounts
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.exhaustion import RunningEstimate, expected_remaining_steps, steps_to_full
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.migration.rescue import Pressure, Victim
from phalanx_runtime.core.pace import EnginePace, MovingAverage
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.queue import Queue
from phalanx_runtime.core.scheduling.running import RunningSet
from phalanx_runtime.core.step_builder import StepBuilder

LOOK_PAGES = 2048
"""Pages of waiting prompts that one report looks for in the cache: about a tenth of a millisecond."""
NOTHING_PROPOSED = SpeculationCounts()


class LoadReporter:
    """Hears what happens in a scheduler, and makes its reports."""

    def __init__(self, limits: Limits, queue: Queue, seats: RunningSet, sharing: PrefixSharing) -> None:
        self.last_handle = 0
        self.refusals = 0
        self.recomputed_tokens = 0
        self.output = MovingAverage()
        """Output tokens that requests had."""
        self._limits = limits
        self._queue = queue
        self._seats = seats
        self._sharing = sharing
        self._sequence = 0
        self._step_s, self._prompt_tokens, self._newcomer_pages = MovingAverage(), MovingAverage(), MovingAverage()
        self._pace = EnginePace()
        self._longest_step_s = 0.0
        self._pages_taken = 0

    @property
    def speedup(self) -> float:
        """By how much tokens come faster than one in each step without proposals."""
        return self._pace.speedup

    def stepped(self, making: StepBuilder, model: StepModel | None, wall_s: float) -> None:
        """A step was computed in this time."""
        self._step_s.add(wall_s)
        self._pace.stepped(making, model, wall_s)
        self._longest_step_s = max(self._longest_step_s, wall_s)
        self._prompt_tokens.add(making.work.prefill_tokens)
        taken, self._pages_taken = self._pages_taken, self._sharing.taken_pages
        self._newcomer_pages.add(self._pages_taken - taken)

    def is_imminent(self) -> bool:
        """Whether a preemption may be near."""
        return self._sharing.pool.free_pages < len(self._seats.running)

    def pressure(self, pages_per_s: float) -> Pressure | None:
        """How near the pool is to its end, and who would lose pages first; None while half of it is free, or it will do.

        pages_per_s: how fast pages go to another group.
        """
        pool = self._sharing.pool
        if 2 * pool.free_pages > pool.num_pages:
            return None
        running = [request for request in self._seats.running if not request.gone]
        steps = self._steps_to_full(running)
        if steps is None:
            return None
        victims = [
            Victim(one.handle, len(one.pages), self._rest(one))
            for one in reversed(running)
            if one.num_output and not one.is_frozen
        ]
        return Pressure(
            steps_to_full=steps,
            step_s=self._step_s.mean / self._pace.tokens_per_step,
            free_pages=pool.free_pages,
            victims=victims,
            pages_per_s=pages_per_s,
        )

    def make(
        self,
        now: float,
        preemptions: int,
        reserved_pages: int,
        model: StepModel | None,
        speculation: SpeculationCounts = NOTHING_PROPOSED,
    ) -> wire.Load:
        """The next report."""
        self._advance(now)
        pool, sharing, waiting = self._sharing.pool, self._sharing, self._queue.waiting
        running = [request for request in self._seats.running if not request.gone]
        left = [_left_to_compute(request) for request in running]
        behind = (attended(len(one.tokens), len(one.tokens) - count) for one, count in zip(running, left, strict=True) if count)
        longest_s, self._longest_step_s = self._longest_step_s, 0.0
        return wire.Load(
            waiting=len(self._queue),
            running=len(self._seats.running),
            outstanding_tokens=waiting.outstanding + sum(request.outstanding_tokens for request in running),
            free_pages=pool.free_pages,
            total_pages=pool.num_pages,
            preemptions=preemptions,
            prefix_queried_tokens=sharing.queried_tokens,
            prefix_hit_tokens=sharing.hit_tokens,
            pages_reused=pool.counters.reused,
            pages_evicted=pool.counters.evicted,
            step_model=[] if model is None else list(astuple(model)),
            sequence=self._sequence,
            last_handle=self.last_handle,
            reserved_pages=reserved_pages,
            waiting_prompt_tokens=waiting.missing,
            running_prompt_tokens=sum(left),
            waiting_pages=waiting.pages,
            context_tokens=sum(request.computed for request in running),
            oldest_wait_s=waiting.oldest_s(now),
            step_s=self._step_s.mean,
            longest_step_s=longest_s,
            prompt_tokens_per_step=self._prompt_tokens.mean,
            refusals=self.refusals,
            recomputed_tokens=self.recomputed_tokens,
            steps_to_full=self._steps_to_full(running),
            prefixes=sharing.heavy.heaviest(),
            mean_output_tokens=self.output.mean,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            cached_pages=pool.cached_pages,
            max_num_seqs=self._limits.max_num_seqs,
            speculation=speculation,
            speedup=self.speedup,
            prompt_attended=waiting.attended + sum(behind),
        )

    def _advance(self, now: float) -> None:
        self._look()
        self._sharing.heavy.decay(now)
        self._sequence += 1

    def _rest(self, request: Request) -> float:
        """Tokens that a running request is expected to go on for."""
        return expected_remaining_steps(request.num_output, request.max_len - len(request.tokens), self.output.mean)

    def _steps_to_full(self, running: list[Request]) -> float | None:
        """When no page is free: frozen requests keep theirs, and fill no more."""
        pool, size = self._sharing.pool, self._sharing.pool.page_size
        moving = [request for request in running if not request.is_frozen]
        unused = sum(len(request.pages) * size - len(request.tokens) for request in moving)
        going = [RunningEstimate(self._rest(request), max(0, len(request.tokens) - request.found)) for request in moving]
        newcomer_slots = self._newcomer_pages.mean * size / self._pace.tokens_per_step
        return steps_to_full(max(0, pool.free_pages * size + unused), going, newcomer_slots)

    def _look(self) -> None:
        """Counts requests that wait by what the cache holds of them now, those not looked at for the longest time first."""
        pool, waiting, looked = self._sharing.pool, self._queue.waiting, 0
        for request in waiting.next():
            if looked >= LOOK_PAGES:
                return
            run = self._sharing.find(request)
            pages = pool.pages_for(len(request.tokens))
            held = len(run) - pool.unheld(run)
            waiting.looked(request, request.missing - len(run) * pool.page_size, pages - held)
            looked += pages


def _left_to_compute(request: Request) -> int:
    """Tokens that a running request has to compute before it draws; none when it waits only for its latest token's."""
    if request.missing <= 1 and request.computed >= request.num_prompt:
        return 0
    return len(request.tokens) - max(request.computed, min(request.found, len(request.tokens) - 1))
