"""Scheduling policies: each is a sort key and a share rule between lanes.

    order of a request = (rank of its lane, key, seniority)      the smallest is served first, the largest is preempted first

    fcfs      one lane, key 0
    priority  one lane, key = priority + arrival / AGING_S: AGING_S of waiting equal one priority
    deadline  one lane, key = deadline - time of the remaining work (least slack: `now` is the same for all)
    fair      one lane per tenant, ranked by the tenant's virtual token counter

The key of a waiting request only grows, unless `learn` returns True: the queue checks keys before use. Pure: the time is an
argument.
"""

from dataclasses import dataclass
from typing import Protocol

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.request import Request, SchedulingHints

AGING_S = 30.0
"""A request that has waited this long precedes a new one whose priority number is lower by one."""
NO_TARGET_S = 30.0
"""Deadline of the first token of a request without targets."""
GRACE_S = 60.0
"""Extra time of a waiting request that has missed its deadline: others that can still meet theirs precede it for this long."""
LEARN_SHARE = 0.1
"""Relative change of a measured time below which deadlines stay: each change sorts the whole queue."""
EXPECTED_OUTPUT = 256
"""Most output tokens counted for a deadline of the whole response: max_tokens is often only a bound."""


class Policy(Protocol):
    """Order of requests. The scheduler reports every event that keys and ranks depend on."""

    def arrive(self, request: Request, waiting: list[str]) -> None:
        """Records a request's first arrival in the queue; `waiting`: lanes with queued requests."""
        ...

    def lane(self, request: Request) -> str:
        """Returns the lane of a request, which never changes."""
        ...

    def rank(self, lane: str) -> float:
        """Returns the lane's sort value; the smallest lane is served first."""
        ...

    def key(self, request: Request, now: float) -> float:
        """Returns the request's sort value in its lane; the smallest is served first."""
        ...

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Records that the request starts to compute prompt tokens (negative: it was spared them), or sampled output tokens."""
        ...

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Updates step times and the speedup by speculation. Returns whether keys of waiting requests may have shrunk, so that
        all must be sorted."""
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
    """Lowest priority number first, less the waiting time. All age alike, so the order of two requests never changes."""

    def key(self, request: Request, now: float) -> float:
        """Returns priority and arrival on one scale."""
        return request.wishes.priority + request.wishes.arrived_s / AGING_S


@dataclass(slots=True)
class Deadline(_OneLane):
    """Least slack first. A request whose first token is late is moved back once, by GRACE_S.

    `token_s`, `step_s`: measured times of a prompt token and of a decode token.
    """

    token_s: float = 0.0
    step_s: float = 0.0

    def key(self, request: Request, now: float) -> float:
        """Returns the latest start that meets the deadline. Once that has passed, records it: the key grows, once."""
        latest = self._latest(request)
        if latest < now and request.row is None and request.lapsed_s is None and not request.num_output:
            request.lapsed_s = now
        return latest if request.lapsed_s is None else max(latest, request.lapsed_s + GRACE_S)

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Updates the marginal time of a token and that in a small step, if one changed by more than LEARN_SHARE."""
        token_s, step_s = model.token_s, model.predict(StepWork(0, 8, 8 * 256)) / speedup
        if _is_near(token_s, self.token_s) and _is_near(step_s, self.step_s):
            return False
        self.token_s, self.step_s = token_s, step_s
        return True

    def _latest(self, request: Request) -> float:
        wishes = request.wishes
        left_s = max(request.missing, 1) * self.token_s + self.step_s
        latest = _next_token_due(wishes, request.num_output) - left_s
        if wishes.deadline_s is not None:
            outputs = min(request.max_len - len(request.tokens), EXPECTED_OUTPUT)
            latest = min(latest, wishes.arrived_s + wishes.deadline_s - left_s - outputs * self.step_s)
        return latest


def _is_near(new: float, old: float) -> bool:
    return abs(new - old) <= LEARN_SHARE * old


def _next_token_due(wishes: SchedulingHints, num_output: int) -> float:
    """Returns when the next token is due: the first by its target, each later one a TPOT after the one before."""
    first_s = wishes.ttft_s
    if first_s is None:
        first_s = NO_TARGET_S
    return wishes.arrived_s + first_s + num_output * (wishes.tpot_s or 0.0)


# The fair policy: tenants share the engine by virtual token counters.
#     counter += 1 per prompt token to compute, when its request starts; 2 per output token
#     the tenant with the smallest counter is served first
# Bounded unfairness: while two tenants both have queued requests, their counters differ by at most the cost of the largest prompt
# plus that of
# all output that running requests may still sample, since only the smaller one is admitted. A new or returning tenant starts at
# the smallest
# counter of the waiting tenants, else at that of the last started one: idle time earns nothing, being alone costs nothing.
# Source: Sheng et
# al. 2024, "Fairness in Serving Large Language Models".

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
MAX_TENANTS = 4096
"""Number of kept counters; beyond it those are dropped that would be raised anyway."""


class Fair:
    """One lane per tenant, ranked by its counter; first come, first served within a lane."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._floor = 0.0
        self._last = ""

    def arrive(self, request: Request, waiting: list[str]) -> None:
        """Raises the counter of a tenant without queued requests."""
        tenant = request.wishes.tenant
        if tenant in waiting:
            return
        start = min(self.rank(lane) for lane in waiting) if waiting else self.rank(self._last)
        self._floor = max(self._floor, start)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)
        if len(self._counters) > MAX_TENANTS:
            self._forget(keep={tenant, *waiting})

    def lane(self, request: Request) -> str:
        """Returns the tenant."""
        return request.wishes.tenant

    def rank(self, lane: str) -> float:
        """Returns the tenant's counter."""
        return self._counters.get(lane, self._floor)

    def key(self, request: Request, now: float) -> float:
        """Returns the same key for all requests of a tenant."""
        return 0.0

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Adds the cost of these tokens to the tenant's counter."""
        tenant = request.wishes.tenant
        if prompt_tokens > 0:
            self._last = tenant
        self._counters[tenant] = self.rank(tenant) + PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Returns False: tokens are shared, not time."""
        return False

    def _forget(self, keep: set[str]) -> None:
        """Drops counters that are not above the floor, where a returning tenant would start; without any, the lowest half."""
        idle = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in keep)
        low = [tenant for counter, tenant in idle if counter <= self._floor]
        for tenant in low or [tenant for _, tenant in idle[: len(idle) // 2]]:
            del self._counters[tenant]
