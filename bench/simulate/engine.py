"""A group as its cost function: what a step computes follows the engine's rules, how long it takes the step-time function.

    decodes first, one token each · then prompts within the budget, first come first served, but one that is longer than the
    budget leaves half of it to others · a newcomer needs pages for all its tokens and one for each request that runs · a decode
    that finds no page costs the latest request its pages, which is computed anew; such a step starts nobody

All decodes advance together, so a step costs the same whatever their number: those that need a page now are counted by the
remainder of their context, and when each ends is known when it begins.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bench.simulate.cache import PAGE, Pages
from bench.simulate.jobs import Job
from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.exhaustion import RunningEstimate, expected_remaining_steps, steps_to_full
from phalanx_runtime.core.scheduling.compose import prompt_share

HISTORY = 1 << 16
NO_LIMITS = Limits(max_model_len=1 << 30, max_num_seqs=1, max_num_batched_tokens=1)
"""No bound of its own on the part of a step that one prompt may take."""
MOST_OUTPUT = 4096
"""What requests allow at most."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a group is: its cost function, pages, requests at once, tokens of a step, bytes of a token in pages."""

    model: StepModel
    total_pages: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    token_bytes: int = 262_144
    copy_bytes_per_s: float = 25e9


@dataclass(slots=True)
class Stepped:
    """What one step brought: requests with their first token here, and those that ended."""

    started: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class Engine:
    """One group. `slow` multiplies every step. The caller calls `begin` and, so much later, `end`."""

    def __init__(self, name: str, shape: Shape, block_tokens: int) -> None:
        self.name = name
        self.shape = shape
        self.slow = 1.0
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
        """How many steps have ended."""
        self._times = np.zeros(HISTORY)
        """When each step ended, as a ring."""
        self._phases = [0] * PAGE
        self._ends: list[tuple[int, int]] = []
        self._context = 0
        """Sum over decodes of base - since_step: with the number of the step it gives their tokens."""
        self._chunks: list[tuple[Job, int]] = []

    @property
    def running(self) -> int:
        """Requests that have pages."""
        return len(self.decodes) + len(self.prefills)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, or a newcomer might start."""
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
        """Tokens of a decode in its pages."""
        return job.base + self.step - job.since_step

    def submit(self, job: Job) -> None:
        """Takes a request in."""
        self.waiting.append(job)

    def begin(self) -> float:
        """Starts a step: how long it takes."""
        self.is_stepping = True
        self.victims = []
        self._take_pages()
        budget = self.shape.max_num_batched_tokens - len(self.decodes)
        self._chunks = []
        whole, others = budget, len(self.prefills) + len(self.waiting) - 1
        for job in self.prefills:
            budget -= self._chunk(job, budget, whole, others)
        while self.waiting and budget > 0 and self.running < self.shape.max_num_seqs and not self.victims:
            job = self.waiting[0]
            hits = self.pages.hit_blocks(job)
            if self.pages.needed(job, hits) + self.running > self.pages.free and self.running:
                break
            self.waiting.popleft()
            self._admit(job, hits)
            budget -= self._chunk(job, budget, whole, others)
        self._lengthen(budget)
        prompt = sum(count for _, count in self._chunks)
        attended = sum(count * (job.computed + count / 2) for job, count in self._chunks)
        context = self._decoded + sum(job.computed for job, _ in self._chunks)  # what no chunk reads costs nothing
        self.last_work = StepWork(prompt, len(self.decodes), context, attended)
        self.last_step_s = self.slow * self.shape.model.predict(self.last_work)
        return self.last_step_s

    def end(self, now: float) -> Stepped:
        """Ends the step that was begun: tokens come at this time."""
        self.is_stepping = False
        done = Stepped()
        self._times[self.step % HISTORY] = now
        self.step += 1
        while self._ends and self._ends[0][0] <= self.step:
            _, number = heapq.heappop(self._ends)
            job = self.decodes.get(number)
            if job is not None and job.since_step + job.output_tokens - job.generated <= self.step:
                self._leave(job)
                job.ended_s = job.last_s
                done.ended.append(job)
        for job, count in self._chunks:
            job.computed += count
            if job.computed >= job.tokens:
                self.prefills.remove(job)
                self._first(job, now, done)
        return done

    def take(self, job: Job) -> None:
        """Takes a running or waiting request away, between steps; its pages are free, its tokens so far its client's."""
        assert not self.is_stepping, "what a step computes is not taken away from it"
        if job.number in self.decodes:
            self._leave(job)
        elif job in self.prefills:
            self.prefills.remove(job)
            self.pages.end(job, job.own_pages)
        else:
            self.waiting.remove(job)
        job.computed = 0

    def receive(self, job: Job) -> None:
        """Goes on with a request whose pages came with it: it decodes from the next step on. The caller has reserved pages."""
        job.held = []
        job.own_pages = -(-(job.tokens - 1) // PAGE)
        self.pages.grow(job.own_pages)
        self._decode(job)

    def steps_to_full(self) -> float | None:
        """After how many steps no page is free, if nothing ends."""
        return self.pages.free * PAGE / len(self.decodes) if self.decodes else None

    def expected_to_full(self, mean_output: float) -> float | None:
        """The same as requests are expected to end: what an engine tells. Never before `steps_to_full`."""
        going = [RunningEstimate(self.rest(job, mean_output), self.context_of(job)) for job in self.decodes.values()]
        return steps_to_full(self.pages.free * PAGE, going)

    def rest(self, job: Job, mean_output: float) -> float:
        """Steps that a decode is expected to go on; nobody knows how many it will."""
        return expected_remaining_steps(self.context_of(job) + 1 - job.prompt_tokens, MOST_OUTPUT, mean_output)

    def who_outlives(self, mean_output: float, steps: float) -> list[Job]:
        """Decodes that would be preempted in so many steps, the first first; not the last that is left."""
        latest = sorted(self.decodes.values(), key=lambda job: -job.number)
        return [job for job in latest[:-1] if self.rest(job, mean_output) > steps]

    def latest(self) -> Job | None:
        """The decode that would be preempted next."""
        return max(self.decodes.values(), key=lambda job: job.number, default=None)

    def _take_pages(self) -> None:
        """A page for each decode that needs one, from the latest requests if there is no other."""
        while (needed := self._phases[self.step % PAGE]) > self.pages.free:
            victim = max((*self.decodes.values(), *self.prefills), key=lambda job: job.number)
            if victim.number in self.decodes:
                self._leave(victim)
            else:
                self.prefills.remove(victim)
                self.pages.end(victim, victim.own_pages)
            victim.preemptions += 1
            victim.computed = 0
            self.preemptions += 1
            self.recomputed += victim.tokens
            self.victims.append(victim)
            self.waiting.appendleft(victim)
        if needed:
            self.pages.grow(needed)

    def _chunk(self, job: Job, budget: int, whole: int, others: int) -> int:
        """Puts the next tokens of a prompt into the step: how many."""
        missing = job.tokens - job.computed
        count = min(budget, missing, prompt_share(NO_LIMITS, whole, missing, others))
        if count > 0:
            self._chunks.append((job, count))
        return max(0, count)

    def _lengthen(self, budget: int) -> None:
        """Gives what is left of the budget to prompts that were cut to their share."""
        for place, (job, count) in enumerate(self._chunks):
            more = min(budget, job.tokens - job.computed - count)
            self._chunks[place] = job, count + more
            budget -= more

    def _admit(self, job: Job, hits: int) -> None:
        self.pages.begin(job, hits)
        job.computed = min(hits * self.pages.block_tokens, job.tokens - 1)
        if not job.generated:
            job.missed = job.prompt_tokens - job.computed
        self.prefills.append(job)

    def _first(self, job: Job, now: float, done: Stepped) -> None:
        """A prompt is computed, and with it a token was drawn."""
        is_new = job.first_s is None
        job.saw(np.array([now]))
        if is_new:
            done.started.append(job)
        if job.generated >= job.output_tokens:
            self.pages.end(job, job.own_pages)
            job.ended_s = now
            done.ended.append(job)
        else:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        """From the next step that begins on, each step computes the last token and draws another."""
        job.base, job.since_step = job.tokens - 1, self.step + self.is_stepping
        self.decodes[job.number] = job
        self._phases[(job.since_step - job.base) % PAGE] += 1
        self._context += job.base - job.since_step
        heapq.heappush(self._ends, (job.since_step + job.output_tokens - job.generated, job.number))

    def _leave(self, job: Job) -> None:
        """Takes a decode out, with the tokens that it drew here, and frees its pages."""
        del self.decodes[job.number]
        self._phases[(job.since_step - job.base) % PAGE] -= 1
        self._context -= job.base - job.since_step
        steps = np.arange(job.since_step, self.step)
        grown = -(-(job.base + len(steps)) // PAGE) - -(-job.base // PAGE)
        self.pages.end(job, job.own_pages + grown)
        job.saw(self._times[steps % HISTORY])
