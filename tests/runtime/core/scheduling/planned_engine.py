"""A scheduler whose plans a fake runner computes at once, with little host memory."""

from typing import Any

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import StepPlan
from tests.runtime.fake_runner import FakeRunner

SIZE = 4


class Engine:
    """A scheduler with plans that are computed at once."""

    def __init__(self, num_pages: int, num_host_pages: int, plans_in_flight: int = 1, **parts: Any) -> None:
        self.runner = FakeRunner(num_pages, SIZE, num_host_pages=num_host_pages, depth=plans_in_flight, **parts)
        length = 96 if parts else 64
        limits = Limits(max_model_len=length, max_num_seqs=4, max_num_batched_tokens=64, plans_in_flight=plans_in_flight)
        self.scheduler: Scheduler = make_scheduler(limits, self.runner.pool, SchedulerConfig(eviction_policy="lru"))
        self.tokens: dict[int, list[int]] = {}

    def submit(self, request: wire.Request) -> int:
        handle = len(self.tokens)
        assert self.scheduler.submit(handle, request) is None
        self.tokens[handle] = []
        return handle

    def run(self, *requests: wire.Request) -> list[list[int]]:
        """Returns the output tokens of requests that arrive together."""
        handles = [self.submit(request) for request in requests]
        while (plan := self.scheduler.schedule()) is not None:
            self.commit(plan)
        return [self.tokens[handle] for handle in handles]

    def commit(self, plan: StepPlan) -> None:
        """Computes the oldest plan, in a millisecond per token and two more."""
        frame = self.scheduler.commit(self.runner.run(plan), wall_s=0.002 + 0.001 * len(plan.tokens))
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            self.tokens[handle].append(token)
        assert self.scheduler.check() == []


def prompt(first: int, count: int) -> list[int]:
    return list(range(first, first + count))
