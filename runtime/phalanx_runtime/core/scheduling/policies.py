"""In which order requests are served: a policy is a sort key and a share rule between lanes.

    order of a request = (rank of its lane, key, who came first)      the smallest goes first, the largest is preempted first

    fcfs      one lane, key 0
    priority  one lane, key = priority + arrival / AGING_S: a request gains one priority for every AGING_S that it waits
    deadline  one lane, key = due time - time of the work that is left (least slack: `now` is the same for all)
    fair      a lane for each tenant, ranked by the tenant's virtual token counter (module `policy_fair`)

A key of a waiting request only grows, unless `learn` says otherwise: the queue looks again before it trusts one.
Pure: the time is an argument.
"""

from dataclasses import dataclass
from typing import Protocol

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.request import Request, SchedulingHints

AGING_S = 30.0
"""A request that waited this long goes before one that came now with a priority higher by one."""
NO_TARGET_S = 30.0
"""Due time of the first token of a request without wishes, so that it is served among those that have some."""
GRACE_S = 60.0
"""A waiting request that cannot be in time any more is due so much later: those that still can go before it for so long."""
LEARN_SHARE = 0.1
"""A measured time that changed by a smaller share leaves due times as they are: each change sorts the whole queue."""
EXPECTED_OUTPUT = 256
"""How many output tokens at most a deadline for the whole answer is thought to need: max_tokens is often just a bound."""


class Policy(Protocol):
    """How requests are ordered. Told of all that its keys and ranks depend on."""

    def arrive(self, request: Request, waiting: list[str]) -> None:
        """A request joins the queue for the first time; `waiting` are the lanes that have requests in the queue."""
        ...

    def lane(self, request: Request) -> str:
        """The lane of a request; never changes."""
        ...

    def rank(self, lane: str) -> float:
        """Where the lane stands among the lanes; smaller goes first."""
        ...

    def key(self, request: Request, now: float) -> float:
        """Where the request stands in its lane; smaller goes first."""
        ...

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """The request starts to compute so many prompt tokens, or was spared them (negative), or drew so many output tokens."""
        ...

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Takes how long steps take now, and by how much tokens come faster than one a step. Whether keys of waiting requests may
        have shrunk, so that all are to be sorted."""
        ...


class _OneLane:
    """What policies have in common that serve all requests in one lane."""

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
        """The same for all: who came first decides."""
        return 0.0


class Priority(_OneLane):
    """The lowest priority number first; waiting counts for it. All age alike, so the order of two requests never changes."""

    def key(self, request: Request, now: float) -> float:
        """Priority and arrival on one scale."""
        return request.wishes.priority + request.wishes.arrived_s / AGING_S


@dataclass(slots=True)
class Deadline(_OneLane):
    """Least slack first. A request whose first token is too late already gives way, once, for GRACE_S: others can be helped.

    `token_s` and `step_s`: how long a prompt token takes, and each token of a decode, as far as measured.
    """

    token_s: float = 0.0
    step_s: float = 0.0

    def key(self, request: Request, now: float) -> float:
        """The latest moment to begin what is left in time. When that is past, remembers when it was: the key grows, once."""
        latest = self._latest(request)
        if latest < now and request.row is None and request.lapsed_s is None and not request.num_output:
            request.lapsed_s = now
        return latest if request.lapsed_s is None else max(latest, request.lapsed_s + GRACE_S)

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Takes the marginal time of a token and that of one in a small step, if one of them changed by more than LEARN_SHARE."""
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
    """When the next token should be there: the first by its target, each later one a TPOT after the one before."""
    first_s = wishes.ttft_s
    if first_s is None:
        first_s = NO_TARGET_S
    return wishes.arrived_s + first_s + num_output * (wishes.tpot_s or 0.0)


# The fair policy: tenants share the engine by virtual token counters.
#     counter += 1 a prompt token to compute, when its request starts; 2 an output token drawn     the tenant with the
# smallest counter goes first
# Bounded unfairness: while two tenants both have requests that wait, their counters differ by at most the cost of the largest
# prompt plus that of all output that running requests may still draw, since only the smaller one is admitted from. A tenant
# that comes, new or back, starts from the smallest counter of those that wait, or if none does from that of who started last:
# idle time earns nothing, being alone costs nothing. Source: Sheng et al. 2024, "Fairness in Serving Large Language Models".

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
MAX_TENANTS = 4096
"""Counters that are kept; more, and those are dropped that would be lifted anyway."""


class Fair:
    """One lane for each tenant, ranked by its counter; within a lane, first come, first served."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._floor = 0.0
        self._last = ""

    def arrive(self, request: Request, waiting: list[str]) -> None:
        """Lifts the counter of a tenant that had nothing in the queue."""
        tenant = request.wishes.tenant
        if tenant in waiting:
            return
        start = min(self.rank(lane) for lane in waiting) if waiting else self.rank(self._last)
        self._floor = max(self._floor, start)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)
        if len(self._counters) > MAX_TENANTS:
            self._forget(keep={tenant, *waiting})

    def lane(self, request: Request) -> str:
        """The tenant."""
        return request.wishes.tenant

    def rank(self, lane: str) -> float:
        """The tenant's counter."""
        return self._counters.get(lane, self._floor)

    def key(self, request: Request, now: float) -> float:
        """The same for all of a tenant."""
        return 0.0

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Adds the cost of these tokens to the tenant's counter."""
        tenant = request.wishes.tenant
        if prompt_tokens > 0:
            self._last = tenant
        self._counters[tenant] = self.rank(tenant) + PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def learn(self, model: StepModel, speedup: float) -> bool:
        """Never: tokens are what is shared, not time."""
        return False

    def _forget(self, keep: set[str]) -> None:
        """Drops counters not above the floor, where a tenant that comes back would start; if there are none, the lowest half."""
        idle = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in keep)
        low = [tenant for counter, tenant in idle if counter <= self._floor]
        for tenant in low or [tenant for _, tenant in idle[: len(idle) // 2]]:
            del self._counters[tenant]
