"""The real scheduler in virtual time, with the copies of its host tier and a disk.

A step takes the time of a step-time function; copies take a time per page, one after another, in a thread beside the steps as
in `rank.tiers.host_pages`: a step waits for the copies of earlier plans, and for its own if it uses their pages. Copies and
steps do not slow each other down. The scheduler learns its step times and loads from these, as it does from measured ones.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.kv_cache.conversations import Conversations
from bench.kv_cache.virtual_disk import VirtualDisk
from phalanx_api import wire
from phalanx_api.cost import StepModel, step_work
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import DEFAULT_CONFIG, SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import HostCopy, PoolShape, StepPlan, StepResult

MAX_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Times of an engine."""

    model: StepModel
    load_page_s: float
    store_page_s: float
    step_tokens: int = 1024


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run did. Tokens are those of prompts."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    """Skipped by requests that were not preempted before, in either tier."""
    host_tokens: int = 0
    """Those of them that were loaded."""
    computed_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    stored: int = 0
    loaded: int = 0
    declined: int = 0
    fetched: int = 0
    """Pages read from disk to host memory."""
    waits: int = 0
    """Steps that waited for copies."""
    wait_s: float = 0.0
    preemptions: int = 0

    @property
    def device_rate(self) -> float:
        """Share of prompt tokens found on the device."""
        return (self.hit_tokens - self.host_tokens) / self.queried_tokens

    @property
    def host_rate(self) -> float:
        """Share of prompt tokens loaded from host memory."""
        return self.host_tokens / self.queried_tokens


class CopyThread:
    """The thread of a rank that copies between pages and slots."""

    def __init__(self, load_page_s: float, store_page_s: float) -> None:
        self._page_s = {True: load_page_s, False: store_page_s}
        self._free_s = 0.0
        self._loads: deque[tuple[float, int, float]] = deque()
        """(end, pages, seconds)"""

    def start(self, copies: Sequence[HostCopy], must_wait: bool, now: float) -> float:
        """Starts the copies of a plan after those of earlier ones. Returns when the pass starts."""
        started = max(now, self._free_s)
        loads = sum(is_load for is_load, _, _ in copies)
        load_s = loads * self._page_s[True]
        self._free_s = started + load_s + (len(copies) - loads) * self._page_s[False]
        if loads:
            self._loads.append((self._free_s, loads, load_s))
        return self._free_s if must_wait else started

    def move(self, num_pages: int) -> None:
        """Moves pages between slots after all copies so far."""
        self._free_s += num_pages * self._page_s[False]

    def take_loads(self, now: float) -> tuple[int, float]:
        """Returns pages and seconds of the loads that ended since the last call."""
        pages, seconds = 0, 0.0
        while self._loads and self._loads[0][0] <= now:
            _, more, took_s = self._loads.popleft()
            pages, seconds = pages + more, seconds + took_s
        return pages, seconds


def _nothing() -> None:
    pass


class VirtualRun:
    """One run of all requests over a pool."""

    def __init__(
        self,
        machine: Machine,
        pool: PoolShape,
        max_model_len: int,
        disk: VirtualDisk | None = None,
        config: SchedulerConfig = DEFAULT_CONFIG,
    ) -> None:
        """disk: with the pages of an earlier run, if it has some."""
        self.machine = machine
        self.disk = disk
        self.outcome = Outcome()
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=machine.step_tokens,
            max_waiting=1 << 30,
        )
        self.scheduler: Scheduler = make_scheduler(limits, pool, config)
        if disk is not None:
            disk.restart()
            self.scheduler.sharing.disk.changed(0, disk.keys, [])
        self._now = 0.0
        self._copies = CopyThread(machine.load_page_s, machine.store_page_s)
        self._num_prompt: dict[int, int] = {}
        """Prompt tokens of each row's request."""

    def run(self, conversations: Conversations, on_arrival: Callable[[], None] = _nothing) -> Outcome:
        """Runs until all requests end. on_arrival: called before each request arrives."""
        arrivals, number, first_s = conversations.arrivals, 0, dict[int, float]()
        while True:
            while number < len(arrivals) and arrivals[number].at_s <= self._now:
                on_arrival()
                self._submit(number, conversations.prompt(number), arrivals[number].output_tokens)
                number += 1
            self._release_fetched()
            plan = self.scheduler.schedule(self._now)
            if plan is not None:
                for handle in self._step(plan):
                    first_s.setdefault(handle, self._now)
                continue
            arrival_s = arrivals[number].at_s if number < len(arrivals) else None
            deadline_s = self.scheduler.sharing.disk.deadline
            disk_s = self.disk.next_s if self.disk is not None and deadline_s is not None else None
            events = [at for at in (arrival_s, disk_s, deadline_s) if at is not None]
            if not events:
                break
            self._now = max(self._now, min(events))
        assert self.scheduler.is_idle() and not self.scheduler.check()
        self.outcome.ttft_s = [first_s[i] - arrival.at_s for i, arrival in enumerate(arrivals)]
        return self._finish()

    def _submit(self, number: int, prompt: list[int], output: int) -> None:
        sampling = wire.Sampling(max_tokens=output, seed=number)
        request = wire.Request(id=f"r{number}", epoch=0, prompt=prompt, delivered=[], sampling=sampling)
        tier = self.scheduler.sharing.disk
        is_held = self.disk is not None and bool(tier.keys)
        refusal = self.scheduler.submit(number, request, self._now, is_held)
        assert refusal is None, refusal
        if self.disk is None or not is_held:
            return
        prefix = self.scheduler.sharing.find_on_disk(self.scheduler.requests[number])
        order = tier.start(number, prefix, model=self.scheduler.fit.model(), now=self._now)
        if order is not None:
            self.disk.read(order, self._now)
        if not tier.is_waiting(number):
            self.scheduler.release(number, self._now)

    def _release_fetched(self) -> None:
        if self.disk is not None:
            for handle in self.disk.run(self.scheduler.sharing.disk, self._now):
                self.scheduler.release(handle, self._now)

    def _step(self, plan: StepPlan) -> list[int]:
        """Executes a plan. Returns the requests that got a token."""
        self._count(plan)
        rows = list(zip(plan.starts, plan.counts, strict=True))
        decodes = [start + 1 for start, count in rows if count == 1 and start]
        chunks = [(start, count) for start, count in rows if count > 1 or not start]
        started = self._copies.start(plan.host_copies, plan.awaits_host_copies, self._now)
        self._copies.move(len(plan.host_resize.moves) if plan.host_resize else 0)
        ended = started + self.machine.model.predict(step_work(decodes, chunks))
        if self.disk is not None:
            self.disk.put(plan.host_keys, started, self.machine.store_page_s)
        self.outcome.waits += started > self._now
        waited_s = started - self._now
        self.outcome.wait_s += waited_s
        wall_s, self._now = ended - self._now, ended
        pages, load_s = self._copies.take_loads(ended)
        result = StepResult(step=plan.step, tokens=[1] * len(plan.draws), loaded_pages=pages, load_s=load_s, copy_wait_s=waited_s)
        return self.scheduler.commit(result, wall_s).handles

    def _count(self, plan: StepPlan) -> None:
        """Counts prompt tokens that are computed, and those that are loaded for requests in their first start."""
        self._num_prompt |= {new.row: new.num_prompt for new in plan.admitted}
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self.outcome.computed_tokens += max(0, min(start + count, self._num_prompt[row]) - start)
        loaded = {page for is_load, page, _ in plan.host_copies if is_load}
        for request in self.scheduler.requests.values() if loaded else ():
            own = loaded.intersection(request.pages.ids)
            loaded -= own
            if not request.scheduling.num_preemptions:
                self.outcome.host_tokens += len(own) * self.scheduler.pool.page_size

    def _finish(self) -> Outcome:
        outcome, counters, sharing = self.outcome, self.scheduler.pool.host.counters, self.scheduler.sharing
        outcome.queried_tokens, outcome.hit_tokens = sharing.queried_tokens, sharing.hit_tokens
        outcome.stored, outcome.loaded, outcome.declined = counters.stored, counters.loaded, counters.declined
        outcome.fetched = sharing.disk.counters.fetched
        outcome.preemptions, outcome.end_s = self.scheduler.num_preemptions, self._now
        return outcome
