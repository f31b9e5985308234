"""The requests that wait at the router, in the order in which they get their turn.

    begun streams, first come first served, the first few of each kind · then band by band, the lowest priority number first ·
    within a band the tenant whose counter is smallest · within a tenant first come, first served

    counter += 1 a prompt token, 2 an output token

A tenant that comes back starts from the smallest counter of those that wait, or where the last one served stood: idle time earns
nothing. Source: Sheng et al. 2024, "Fairness in Serving Large Language Models".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from phalanx_api.cost import attended
from phalanx_router.routing.cost import UNKNOWN_OUTPUT, Newcomer
from phalanx_router.routing.view import GroupView, is_stale

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
PER_TENANT = 4
"""Requests of one tenant that are offered in a row: the first may be one that no group takes just now."""
PER_KIND = 8
"""The same of begun streams of one kind: there may be no group for any of them, or the first ones were refused by all."""
MAX_TENANTS = 4096
"""Counters that are kept."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that waits. `ticket` orders requests by arrival. `has_begun`: a client has tokens of it, or a group had it.

    kind: which groups can take it: all of one kind can go to the same ones, those that failed or refused it aside.
    """

    ticket: int
    newcomer: Newcomer
    arrived_at: float
    tenant: str = ""
    priority: int = 0
    has_begun: bool = False
    kind: str = ""


class RequestQueue:
    """All that wait, by ticket. `tokens`: of prompts; `attended`: the sum of their contexts; `output_tokens`: that they may have
    at most; all without begun streams."""

    def __init__(self) -> None:
        self.tokens = 0
        self.attended = 0.0
        self.output_tokens = 0
        self._all: dict[int, Waiting] = {}
        self._begun: dict[str, dict[int, Waiting]] = {}
        self._num_begun = 0
        self._bands: dict[int, dict[str, dict[int, Waiting]]] = {}
        self._counters: dict[str, float] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_newcomers(self) -> int:
        """Those that no group ever had."""
        return len(self._all) - self._num_begun

    @property
    def bands(self) -> list[int]:
        """The priorities of newcomers that wait, the most urgent first."""
        return sorted(self._bands)

    def of_bands(self, priorities: Sequence[int]) -> list[Waiting]:
        """All newcomers of these priorities."""
        lanes = [lane for priority in priorities for lane in self._bands.get(priority, {}).values()]
        return [waiting for lane in lanes for waiting in lane.values()]

    def add(self, waiting: Waiting) -> None:
        """Takes a request in. One that comes back goes where its ticket belongs."""
        self._all[waiting.ticket] = waiting
        if waiting.has_begun:
            _insert(self._begun.setdefault(waiting.kind, {}), waiting)
            self._num_begun += 1
            return
        self.tokens += waiting.newcomer.prompt_tokens
        self.attended += attended(waiting.newcomer.prompt_tokens)
        self.output_tokens += waiting.newcomer.output_tokens
        self._lift(waiting.tenant)
        lane = self._bands.setdefault(waiting.priority, {}).setdefault(waiting.tenant, {})
        _insert(lane, waiting)

    def remove(self, ticket: int) -> bool:
        """Whether the request waited; it does so no more."""
        waiting = self._all.pop(ticket, None)
        if waiting is None:
            return False
        if waiting.has_begun:
            self._num_begun -= 1
            _drop(self._begun, waiting.kind, ticket)
            return True
        self.tokens -= waiting.newcomer.prompt_tokens
        self.attended -= attended(waiting.newcomer.prompt_tokens)
        self.output_tokens -= waiting.newcomer.output_tokens
        band = self._bands[waiting.priority]
        _drop(band, waiting.tenant, ticket)
        if not band:
            del self._bands[waiting.priority]
        return True

    def in_turn(self) -> Iterator[Waiting]:
        """Who may be served now, the first first; of each kind of begun streams, and of each tenant, the first few."""
        yield from sorted(
            (begun for lane in self._begun.values() for begun in islice(lane.values(), PER_KIND)), key=lambda begun: begun.ticket
        )
        for priority in self.bands:
            lanes = self._bands[priority]
            for tenant in sorted(lanes, key=lambda tenant: (self._counters.get(tenant, 0.0), next(iter(lanes[tenant])))):
                yield from islice(lanes[tenant].values(), PER_TENANT)

    def last(self, worse_than: int | None = None) -> Waiting | None:
        """Who is refused first: of the least urgent band the newest of the tenant that had most. With a priority, only if less
        urgent than that."""
        if not self._bands:
            return None
        priority = max(self._bands)
        if worse_than is not None and priority <= worse_than:
            return None
        lanes = self._bands[priority]
        tenant = max(lanes, key=lambda tenant: (self._counters.get(tenant, 0.0), next(reversed(lanes[tenant]))))
        return next(reversed(lanes[tenant].values()))

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Adds what a tenant is given to its counter; less than nothing gives back what it did not use."""
        own = self._counters.get(tenant, self._floor)
        if prompt_tokens > 0:
            self._floor = max(self._floor, min([own, *self._waiting_counters()]))
        self._counters[tenant] = max(0.0, own + PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens)
        if len(self._counters) > MAX_TENANTS:
            self._forget()

    def _waiting_counters(self) -> list[float]:
        return [self._counters.get(tenant, 0.0) for lanes in self._bands.values() for tenant in lanes]

    def _lift(self, tenant: str) -> None:
        """Raises the counter of a tenant that had nothing in the queue to where others stand."""
        if not any(tenant in lanes for lanes in self._bands.values()):
            start = min(self._waiting_counters(), default=self._floor)
            self._floor = max(self._floor, start)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def _forget(self) -> None:
        """Drops half of the counters of tenants that do not wait, the lowest first: they would be lifted anyway."""
        waiting = {tenant for lanes in self._bands.values() for tenant in lanes}
        idle = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in waiting)
        for _, tenant in idle[: (len(idle) + 1) // 2]:
            del self._counters[tenant]


def _insert(lane: dict[int, Waiting], waiting: Waiting) -> None:
    """Keeps a lane in the order of tickets."""
    newest = next(reversed(lane), 0)
    lane[waiting.ticket] = waiting
    if newest > waiting.ticket:
        ordered = sorted(lane.items())
        lane.clear()
        lane.update(ordered)


def _drop(lanes: dict[str, dict[int, Waiting]], name: str, ticket: int) -> None:
    """Takes a request out of its lane; no lane stays empty."""
    del lanes[name][ticket]
    if not lanes[name]:
        del lanes[name]


# Whether a request may wait at the router: the queue is bounded in requests and in tokens, and who is refused hears how long.
#     drain_s = (prompt tokens of the queue * seconds per prompt token + output tokens * seconds per output token) / groups
# A full queue lets a more urgent newcomer in by refusing the newest of the least urgent band. Begun streams are never counted
# here, nor refused.

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many newcomers may wait, and how many tokens their prompts may have together; one may always wait alone."""

    max_requests: int = 1024
    max_tokens: int = 4_000_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """The queue is full, and why; `instead`: whoever waits and goes in the newcomer's place, None when the newcomer does."""

    why: str
    instead: Waiting | None


def refusal(queue: RequestQueue, newcomer: Waiting, bounds: QueueBounds) -> Refusal | None:
    """Who is refused when this newcomer comes, if anyone."""
    tokens = queue.tokens + newcomer.newcomer.prompt_tokens
    if queue.num_newcomers >= bounds.max_requests:
        why = f"{queue.num_newcomers} requests wait already"
    elif queue.num_newcomers and tokens > bounds.max_tokens:
        why = f"requests with {queue.tokens} prompt tokens wait already"
    else:
        return None
    return Refusal(why, queue.last(worse_than=newcomer.priority))


def drain_s(queue: RequestQueue, views: Sequence[GroupView]) -> float | None:
    """How long the groups need for what waits; None when no group reports."""
    known = [view for view in views if view.is_known and not view.draining and not is_stale(view.state)]
    if not known:
        return None
    prompt_s = sum(queue.tokens * view.token_s + queue.attended * view.attend_s for view in known) / len(known)
    token_s = sum(view.itl_s / max(1, view.running) for view in known) / len(known)
    usual = sum(view.mean_output_tokens or UNKNOWN_OUTPUT for view in known) / len(known)
    outputs = min(float(queue.output_tokens), usual * queue.num_newcomers)
    seconds = (prompt_s + outputs * token_s) / len(known)
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))
