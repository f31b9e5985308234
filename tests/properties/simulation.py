"""The real scheduler in simulated time: steps take the time of a cost model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from phalanx_api import wire
from phalanx_api.cost import StepModel, step_work
from phalanx_api.engine_config import SchedulingPolicy
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_policy
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import StepPlan, StepResult

TRUTH = StepModel(fixed_s=0.004, token_s=0.0005, knee_tokens=8, context_s=1e-7, attention_s=1e-8)
LIMITS = Limits(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256, max_waiting=5000)


@dataclass(frozen=True)
class Job:
    """A request that arrives at a time. Targets in seconds."""

    at_s: float
    prompt: int
    output: int
    priority: int = 0
    tenant: str = ""
    ttft_s: float | None = None
    deadline_s: float | None = None

    def request(self, number: int) -> wire.Request:
        tokens = [(number * 31 + i) % 997 for i in range(self.prompt)]
        sampling = wire.Sampling(max_tokens=self.output, seed=number)
        ttft_ms, deadline_ms = (None if s is None else 1e3 * s for s in (self.ttft_s, self.deadline_s))
        return wire.Request(
            id=f"r{number}",
            epoch=0,
            prompt=tokens,
            delivered=[],
            sampling=sampling,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt="",
            ttft_target_ms=ttft_ms,
            tpot_target_ms=None,
            deadline_ms=deadline_ms,
        )


@dataclass
class Simulation:
    """One run. `first_s` and `end_s`: times of first and last tokens. `steps`: (seconds, prompt tokens, decodes)."""

    policy_name: SchedulingPolicy = "fcfs"
    limits: Limits = LIMITS
    num_pages: int = 2000
    noise: float = 0.0
    first_s: dict[int, float] = field(default_factory=dict)
    end_s: dict[int, float] = field(default_factory=dict)
    steps: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = make_policy(self.policy_name)
        sharing = PrefixSharing(PagePool(self.num_pages, 16), SchedulerConfig().model)
        self.scheduler = Scheduler(self.limits, sharing, self.policy)
        self.now = 0.0
        self.chance = random.Random(1)

    def run(self, jobs: Sequence[Job], until: int | None = None) -> Self:
        """Runs until all requests end, or until request `until` ends."""
        todo = sorted(enumerate(jobs), key=lambda item: item[1].at_s)
        while True:
            while todo and todo[0][1].at_s <= self.now:
                number, job = todo.pop(0)
                assert self.scheduler.submit(number, job.request(number), self.now) is None
            self.watch()
            plan = self.scheduler.schedule(self.now)
            if plan is not None:
                self._step(plan)
            elif todo:
                self.now = todo[0][1].at_s
            else:
                return self
            if until in self.end_s:
                return self

    def watch(self) -> None:
        """Called before every step, for checks."""

    def _step(self, plan: StepPlan) -> None:
        pairs = list(zip(plan.starts, plan.counts, strict=True))
        decodes = [start + 1 for start, count in pairs if count == 1 and start]
        chunks = [(start, count) for start, count in pairs if count > 1 or not start]
        wall_s = TRUTH.predict(step_work(decodes, chunks)) * (1 + self.noise * self.chance.uniform(-1, 1))
        self.steps.append((wall_s, sum(count for _, count in chunks), len(decodes)))
        self.now += wall_s
        frame = self.scheduler.commit(StepResult(step=plan.step, tokens=[1] * len(plan.draws)), wall_s)
        for handle in frame.handles:
            self.first_s.setdefault(handle, self.now)
        self.end_s |= {end.handle: self.now for end in frame.finished}
