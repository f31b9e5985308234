"""The fair policy: tenants share the engine by virtual token counters.

    counter += 1 a prompt token to compute, when its request starts; 2 an output token drawn
    the tenant with the smallest counter goes first

Bounded unfairness: while two tenants both have requests that wait, their counters differ by at most the cost of the largest
prompt plus that of all output that running requests may still draw, since only the smaller one is admitted from. A tenant that
comes, new or back, starts from the smallest counter of those that wait, or if none does from that of who started last: idle time
earns nothing, being alone costs nothing.
Source: Sheng et al. 2024, "Fairness in Serving Large Language Models".
"""

from phalanx_api.cost import StepModel
from phalanx_runtime.core.request import Request

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
