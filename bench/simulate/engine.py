"""A simulated group: steps follow the engine's scheduling rules and take the time of the step-time function.

Decodes come first, one token each. Then prompts within the token budget, in order of arrival; a prompt longer than the budget
leaves half of it to others. A new request needs pages for all its tokens, and one for each running request. A decode without a
page preempts the latest request, which is recomputed; no request starts in such a step.

All decodes advance together, so a step costs the same for any number of them: decodes that need a page are counted by the
remainder of their context, and the end of each is known when it starts.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bench.simulate.cache import PAGE, Pages
from bench.simulate.jobs import Job
from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.migration.rescue import RunningEstimate, expected_remaining_steps, steps_to_full
from phalanx_runtime.core.scheduling.compose import prompt_share

HISTORY = 1 << 16
NO_LIMITS = Limits(max_model_len=1 << 30, max_num_seqs=1, max_num_batched_tokens=1)
"""No bound on one prompt's share of a step."""
MAX_OUTPUT = 4096
"""`max_tokens` of requests."""


@dataclass(frozen=True, slots=True)
class Shape:
    model: StepModel
    total_pages: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    token_bytes: int = 262_144  # KV cache of a token
    copy_bytes_per_s: float = 25e9


@dataclass(slots=True)
class StepResult:
    """Results of a step: requests with their first token, and those that ended."""

    started: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class Engine:
    """One group. The caller calls `start_step`, and `finish_step` after the time that it returns."""

    def __init__(self, name: str, shape: Shape, block_tokens: int) -> None:
        self.name = name
        self.shape = shape
        self.slow = 1.0  # factor of all step times
        self.pages = Pages(shape.total_pages, block_tokens)
        self.waiting: deque[Job] = deque()
        self.prefills: list[Job] = []
        self.decodes: dict[int, Job] = {}
        self.preemptions = 0
        self.recomputed = 0
        self.last_work = StepWork(0, 0, 0)
        self.last_step_s = 0.0
        self.is_stepping = False
        self.victims: list[Job] = []
        """Requests that the latest step preempted."""
        self.step = 0
        """Number of finished steps."""
        self._times = np.zeros(HISTORY)
        """End times of steps, as a ring buffer."""
        self._phases = [0] * PAGE
        self._ends: list[tuple[int, int]] = []
        self._context = 0
        """Sum of base - since_step over decodes: plus the step number for each it gives their tokens."""
        self._chunks: list[tuple[Job, int]] = []

    @property
    def running(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def has_work(self) -> bool:
        return bool(self.decodes or self.prefills or self.waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens in the pages of running requests."""
        return self._decoded + sum(job.computed for job in self.prefills)

    @property
    def _decoded(self) -> int:
        """Tokens in the pages of decodes."""
        return self._context + len(self.decodes) * self.step

    def context_of(self, job: Job) -> int:
        return job.base + self.step - job.since_step

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def start_step(self) -> float:
        self.is_stepping = True
        self.victims = []
        self._allocate_pages()
        budget = self.shape.max_num_batched_tokens - len(self.decodes)
        self._chunks = []
        initial_budget, num_others = budget, len(self.prefills) + len(self.waiting) - 1
        for job in self.prefills:
            budget -= self._chunk(job, budget, initial_budget, num_others)
        while self.waiting and budget > 0 and self.running < self.shape.max_num_seqs and not self.victims:
            job = self.waiting[0]
            hits = self.pages.hit_blocks(job)
            if self.pages.needed(job, hits) + self.running > self.pages.free and self.running:
                break
            self.waiting.popleft()
            self._admit(job, hits)
            budget -= self._chunk(job, budget, initial_budget, num_others)
        self._extend_chunks(budget)
        prompt = sum(count for _, count in self._chunks)
        attended = sum(count * (job.computed + count / 2) for job, count in self._chunks)
        context = self._decoded + sum(job.computed for job, _ in self._chunks)  # contexts that no chunk reads cost nothing
        self.last_work = StepWork(prompt, len(self.decodes), context, attended)
        self.last_step_s = self.slow * self.shape.model.predict(self.last_work)
        return self.last_step_s

    def finish_step(self, now: float) -> StepResult:
        """Finishes the step; its tokens arrive at this time."""
        self.is_stepping = False
        result = StepResult()
        self._times[self.step % HISTORY] = now
        self.step += 1
        while self._ends and self._ends[0][0] <= self.step:
            _, number = heapq.heappop(self._ends)
            job = self.decodes.get(number)
            if job is not None and job.since_step + job.output_tokens - job.generated <= self.step:
                self._remove_decode(job)
                job.ended_s = job.last_s
                result.ended.append(job)
        for job, count in self._chunks:
            job.computed += count
            if job.computed >= job.tokens:
                self.prefills.remove(job)
                self._complete_prompt(job, now, result)
        return result

    def remove(self, job: Job) -> None:
        assert not self.is_stepping, "requests are removed between steps only"
        if job.number in self.decodes:
            self._remove_decode(job)
        elif job in self.prefills:
            self.prefills.remove(job)
            self.pages.release(job, job.own_pages)
        else:
            self.waiting.remove(job)
        job.computed = 0

    def receive(self, job: Job) -> None:
        """Continues a request that arrived with its pages, which the caller reserved; it decodes from the next step on."""
        job.shared_blocks = []
        job.own_pages = -(-(job.tokens - 1) // PAGE)
        self.pages.grow(job.own_pages)
        self._decode(job)

    def steps_to_full(self) -> float | None:
        """Returns the steps until no page is free if no request ends."""
        return self.pages.free * PAGE / len(self.decodes) if self.decodes else None

    def expected_to_full(self, mean_output: float) -> float | None:
        """Returns the expected steps until no page is free, as engines report it; at least `steps_to_full`."""
        estimates = [
            RunningEstimate(self.remaining_steps(job, mean_output), self.context_of(job)) for job in self.decodes.values()
        ]
        return steps_to_full(self.pages.free * PAGE, estimates)

    def remaining_steps(self, job: Job, mean_output: float) -> float:
        return expected_remaining_steps(self.context_of(job) + 1 - job.prompt_tokens, MAX_OUTPUT, mean_output)

    def preemption_candidates(self, mean_output: float, steps: float) -> list[Job]:
        """Returns the decodes that would be preempted within `steps`, in order; never the last remaining one."""
        latest = sorted(self.decodes.values(), key=lambda job: -job.number)
        return [job for job in latest[:-1] if self.remaining_steps(job, mean_output) > steps]

    def latest(self) -> Job | None:
        return max(self.decodes.values(), key=lambda job: job.number, default=None)

    def _allocate_pages(self) -> None:
        """Allocates a page for each decode that needs one; preempts the latest requests if there are too few."""
        while (needed := self._phases[self.step % PAGE]) > self.pages.free:
            victim = max((*self.decodes.values(), *self.prefills), key=lambda job: job.number)
            if victim.number in self.decodes:
                self._remove_decode(victim)
            else:
                self.prefills.remove(victim)
                self.pages.release(victim, victim.own_pages)
            victim.preemptions += 1
            victim.computed = 0
            self.preemptions += 1
            self.recomputed += victim.tokens
            self.victims.append(victim)
            self.waiting.appendleft(victim)
        if needed:
            self.pages.grow(needed)

    def _chunk(self, job: Job, budget: int, initial_budget: int, num_others: int) -> int:
        """Adds the next tokens of a prompt to the step and returns their number."""
        missing = job.tokens - job.computed
        count = min(budget, missing, prompt_share(NO_LIMITS, initial_budget, missing, num_others))
        if count > 0:
            self._chunks.append((job, count))
        return max(0, count)

    def _extend_chunks(self, budget: int) -> None:
        for index, (job, count) in enumerate(self._chunks):
            added = min(budget, job.tokens - job.computed - count)
            self._chunks[index] = job, count + added
            budget -= added

    def _admit(self, job: Job, hits: int) -> None:
        self.pages.allocate(job, hits)
        job.computed = min(hits * self.pages.block_tokens, job.tokens - 1)
        if not job.generated:
            job.missed = job.prompt_tokens - job.computed
        self.prefills.append(job)

    def _complete_prompt(self, job: Job, now: float, result: StepResult) -> None:
        is_new = job.first_s is None
        job.receive(np.array([now]))
        if is_new:
            result.started.append(job)
        if job.generated >= job.output_tokens:
            self.pages.release(job, job.own_pages)
            job.ended_s = now
            result.ended.append(job)
        else:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        job.base, job.since_step = job.tokens - 1, self.step + self.is_stepping
        self.decodes[job.number] = job
        self._phases[(job.since_step - job.base) % PAGE] += 1
        self._context += job.base - job.since_step
        heapq.heappush(self._ends, (job.since_step + job.output_tokens - job.generated, job.number))

    def _remove_decode(self, job: Job) -> None:
        del self.decodes[job.number]
        self._phases[(job.since_step - job.base) % PAGE] -= 1
        self._context -= job.base - job.since_step
        steps = np.arange(job.since_step, self.step)
        grown = -(-(job.base + len(steps)) // PAGE) - -(-job.base // PAGE)
        self.pages.release(job, job.own_pages + grown)
        job.receive(self._times[steps % HISTORY])
