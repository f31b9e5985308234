"""Scheduling policies: a sort key per request, and a rank between lanes.

    order = (rank of the lane, key, seniority)      the smallest is served first, the largest is preempted first

    fcfs      one lane, key 0
    priority  one lane, key = priority + arrival / AGING_S
    deadline  one lane, key = deadline - time of the remaining work (least slack)
    fair      one lane per tenant, ranked by its token counter

Keys may grow: the queue checks them before use. If they shrink, `learn` returns true.
"""

from dataclasses import dataclass
from typing import Protocol

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.request import Request, SchedulingHints

AGING_S = 30.0
"""Waiting time that equals one priority."""
NO_TARGET_S = 30.0
"""TTFT target of a request without one."""
GRACE_S = 60.0
"""Extension of a missed deadline."""
LEARN_SHARE = 0.1
"""Relative change of a time that updates deadlines and sorts the queue."""
EXPECTED_OUTPUT = 256
"""Maximum output tokens in a response deadline: max_tokens is often only a bound."""


class Policy(Protocol):
    """Order of requests."""

    def arrive(self, request: Request, waiting: list[str]) -> None:
        """Records a new request. `waiting`: lanes with queued requests."""
        ...

    def lane(self, request: Request) -> str:
        """Returns the request's lane, which never changes."""
        ...

    def rank(self, lane: str) -> float:
        """Returns the lane's sort value."""
        ...

    def key(self, request: Request, now: float) -> float:
        """Returns the request's sort value within its lane."""
        ...

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Records prompt tokens to compute (negative: skipped), or sampled output tokens."""
        ...

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Updates step times. Returns whether keys may have shrunk. `speedup`: by speculation."""
        ...


class _OneLane:
    """Base of policies with a single lane."""

    def arrive(self, request: Request, waiting: list[str]) -> None:
        return

    def lane(self, request: Request) -> str:
        return ""

    def rank(self, lane: str) -> float:
        return 0.0

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        return

    def learn(self, model: StepModel, speedup: float) -> bool:
        return False


class Fcfs(_OneLane):
    """First come, first served."""

    def key(self, request: Request, now: float) -> float:
        """Returns 0: seniority decides."""
        return 0.0


class Priority(_OneLane):
    """Lowest priority number first; waiting AGING_S equals one priority."""

    def key(self, request: Request, now: float) -> float:
        """Returns priority and arrival on one scale."""
        hints = request.params.hints
        return hints.priority + hints.arrived_s / AGING_S


@dataclass(slots=True)
class Deadline(_OneLane):
    """Least slack first. A late first token moves a request back once, by GRACE_S."""

    token_s: float = 0.0
    """Measured time of a prompt token."""
    step_s: float = 0.0
    """Measured time of a decode token."""

    def key(self, request: Request, now: float) -> float:
        """Returns the latest start that meets the deadline. Records a missed deadline."""
        latest, scheduling = self._latest_start(request), request.scheduling
        if latest < now and request.row is None and scheduling.deadline_missed_s is None and not request.num_output:
            scheduling.deadline_missed_s = now
        missed_s = scheduling.deadline_missed_s
        return latest if missed_s is None else max(latest, missed_s + GRACE_S)

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Updates both times if one changed by more than LEARN_SHARE."""
        token_s, step_s = model.token_s, model.predict(StepWork(0, 8, 8 * 256)) / speedup
        if _is_near(token_s, self.token_s) and _is_near(step_s, self.step_s):
            return False
        self.token_s, self.step_s = token_s, step_s
        return True

    def _latest_start(self, request: Request) -> float:
        hints = request.params.hints
        work_s = max(request.num_uncomputed, 1) * self.token_s + self.step_s
        latest = _next_token_due(hints, request.num_output) - work_s
        if hints.deadline_s is not None:
            num_outputs = min(request.remaining_output, EXPECTED_OUTPUT)
            latest = min(latest, hints.arrived_s + hints.deadline_s - work_s - num_outputs * self.step_s)
        return latest


def _is_near(new: float, old: float) -> bool:
    return abs(new - old) <= LEARN_SHARE * old


def _next_token_due(hints: SchedulingHints, num_output: int) -> float:
    ttft_s = NO_TARGET_S if hints.ttft_s is None else hints.ttft_s
    return hints.arrived_s + ttft_s + num_output * (hints.tpot_s or 0.0)


PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
MAX_TENANTS = 4096
"""Number of counters kept."""


class Fair:
    """The tenant with the smallest counter is first: 1 per prompt token to compute, 2 per output token.

    Counters of tenants with queued requests differ at most by the largest prompt and the output of running requests. A new or
    returning tenant starts at the smallest counter of waiting tenants, otherwise at the last started one's.
    Source: Sheng et al. 2024, "Fairness in Serving Large Language Models".
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._floor = 0.0
        self._last = ""
        """Tenant of the last started request."""

    @property
    def num_counters(self) -> int:
        """Number of tenants with a counter."""
        return len(self._counters)

    def arrive(self, request: Request, waiting: list[str]) -> None:
        """Raises the counter of a tenant without queued requests."""
        tenant = request.params.hints.tenant
        if tenant in waiting:
            return
        start = min(self.rank(lane) for lane in waiting) if waiting else self.rank(self._last)
        self._floor = max(self._floor, start)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)
        if len(self._counters) > MAX_TENANTS:
            self._drop_counters(keep={tenant, *waiting})

    def lane(self, request: Request) -> str:
        """Returns the tenant."""
        return request.params.hints.tenant

    def rank(self, lane: str) -> float:
        """Returns the tenant's counter."""
        return self._counters.get(lane, self._floor)

    def key(self, request: Request, now: float) -> float:
        """Returns 0: seniority decides within a tenant."""
        return 0.0

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Increases the tenant's counter."""
        tenant = request.params.hints.tenant
        if prompt_tokens > 0:
            self._last = tenant
        self._counters[tenant] = self.rank(tenant) + PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Returns false: tenants share tokens, not time."""
        return False

    def _drop_counters(self, keep: set[str]) -> None:
        """Drops counters at the floor, where tenants return; without any, the lowest half."""
        idle = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in keep)
        low = [tenant for counter, tenant in idle if counter <= self._floor]
        for tenant in low or [tenant for _, tenant in idle[: len(idle) // 2]]:
            del self._counters[tenant]
