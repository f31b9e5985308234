"""Requests that wait at the router, in the order of service, and the bounds of that queue.

    started streams in order of arrival, the first few of each kind; then the bands, lowest priority number first;
    within a band the tenant with the smallest counter; within a tenant in order of arrival

    counter += 1 per prompt token, 2 per output token

A returning tenant starts at the smallest counter of the waiting tenants, or at that of the last one served: idle time earns no
credit. Source: Sheng et al. 2024, "Fairness in Serving Large Language Models".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from phalanx_api.cost import attended
from phalanx_router.routing.cost import DEFAULT_OUTPUT_TOKENS, RequestDemand
from phalanx_router.routing.view import GroupView, is_stale

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
PER_TENANT = 4
"""Consecutive requests of one tenant that are tried: possibly no group can take the first one at present."""
PER_KIND = 8
"""The same for started streams of one kind."""
MAX_TENANTS = 4096
"""Number of counters kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """One waiting request."""

    # Increases with arrival.
    ticket: int
    demand: RequestDemand
    arrived_at: float
    tenant: str = ""
    priority: int = 0
    # Whether the client has tokens of it or a group received it.
    has_started: bool = False
    # Requests of one kind have the same candidate groups, except those that failed or refused a request.
    kind: str = ""


class RequestQueue:
    """Waiting requests by ticket.

    Sums without started streams: `tokens` of prompts, `attended` context lengths of those tokens, `output_tokens` at most.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.attended = 0.0
        self.output_tokens = 0
        self._all: dict[int, QueuedRequest] = {}
        self._begun: dict[str, dict[int, QueuedRequest]] = {}
        self._num_begun = 0
        self._bands: dict[int, dict[str, dict[int, QueuedRequest]]] = {}
        self._counters: dict[str, float] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_unstarted(self) -> int:
        """Number of waiting requests that no group has received."""
        return len(self._all) - self._num_begun

    @property
    def bands(self) -> list[int]:
        """Priorities with waiting requests that have not started, most urgent first."""
        return sorted(self._bands)

    def of_bands(self, priorities: Sequence[int]) -> list[QueuedRequest]:
        """Returns the waiting requests of these priorities that have not started."""
        lanes = [lane for priority in priorities for lane in self._bands.get(priority, {}).values()]
        return [waiting for lane in lanes for waiting in lane.values()]

    def add(self, waiting: QueuedRequest) -> None:
        """Adds a request; a returning one takes the position of its ticket."""
        self._all[waiting.ticket] = waiting
        if waiting.has_started:
            _insert(self._begun.setdefault(waiting.kind, {}), waiting)
            self._num_begun += 1
            return
        self.tokens += waiting.demand.prompt_tokens
        self.attended += attended(waiting.demand.prompt_tokens)
        self.output_tokens += waiting.demand.output_tokens
        self._lift(waiting.tenant)
        lane = self._bands.setdefault(waiting.priority, {}).setdefault(waiting.tenant, {})
        _insert(lane, waiting)

    def remove(self, ticket: int) -> bool:
        """Removes a request; returns whether it was waiting."""
        waiting = self._all.pop(ticket, None)
        if waiting is None:
            return False
        if waiting.has_started:
            self._num_begun -= 1
            _drop(self._begun, waiting.kind, ticket)
            return True
        self.tokens -= waiting.demand.prompt_tokens
        self.attended -= attended(waiting.demand.prompt_tokens)
        self.output_tokens -= waiting.demand.output_tokens
        band = self._bands[waiting.priority]
        _drop(band, waiting.tenant, ticket)
        if not band:
            del self._bands[waiting.priority]
        return True

    def in_turn(self) -> Iterator[QueuedRequest]:
        """Yields requests in order of service: the first few of each kind of started streams, then of each tenant."""
        yield from sorted(
            (begun for lane in self._begun.values() for begun in islice(lane.values(), PER_KIND)), key=lambda begun: begun.ticket
        )
        for priority in self.bands:
            lanes = self._bands[priority]
            for tenant in sorted(lanes, key=lambda tenant: (self._counters.get(tenant, 0.0), next(iter(lanes[tenant])))):
                yield from islice(lanes[tenant].values(), PER_TENANT)

    def last(self, worse_than: int | None = None) -> QueuedRequest | None:
        """Returns the request to reject first: the newest of the most served tenant in the least urgent band.

        With `worse_than`, returns a request only if its priority is less urgent.
        """
        if not self._bands:
            return None
        priority = max(self._bands)
        if worse_than is not None and priority <= worse_than:
            return None
        lanes = self._bands[priority]
        tenant = max(lanes, key=lambda tenant: (self._counters.get(tenant, 0.0), next(reversed(lanes[tenant]))))
        return next(reversed(lanes[tenant].values()))

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Adds tokens to a tenant's counter; negative counts return reserved tokens that it did not use."""
        own = self._counters.get(tenant, self._floor)
        if prompt_tokens > 0:
            self._floor = max(self._floor, min([own, *self._waiting_counters()]))
        self._counters[tenant] = max(0.0, own + PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens)
        if len(self._counters) > MAX_TENANTS:
            self._forget()

    def _waiting_counters(self) -> list[float]:
        return [self._counters.get(tenant, 0.0) for lanes in self._bands.values() for tenant in lanes]

    def _lift(self, tenant: str) -> None:
        """Raises the counter of a tenant without waiting requests to the smallest counter of the waiting tenants."""
        if not any(tenant in lanes for lanes in self._bands.values()):
            start = min(self._waiting_counters(), default=self._floor)
            self._floor = max(self._floor, start)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def _forget(self) -> None:
        """Drops the lower half of the counters of tenants that do not wait; `_lift` would raise them anyway."""
        waiting = {tenant for lanes in self._bands.values() for tenant in lanes}
        idle = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in waiting)
        for _, tenant in idle[: (len(idle) + 1) // 2]:
            del self._counters[tenant]


def _insert(lane: dict[int, QueuedRequest], waiting: QueuedRequest) -> None:
    """Inserts in the order of tickets."""
    newest = next(reversed(lane), 0)
    lane[waiting.ticket] = waiting
    if newest > waiting.ticket:
        ordered = sorted(lane.items())
        lane.clear()
        lane.update(ordered)


def _drop(lanes: dict[str, dict[int, QueuedRequest]], name: str, ticket: int) -> None:
    """Removes a request from its lane, and the lane if it becomes empty."""
    del lanes[name][ticket]
    if not lanes[name]:
        del lanes[name]


# Bounds of the queue, in requests and prompt tokens. A rejection carries the predicted time until the queue drains:
#     drain_s = (queued prompt tokens * seconds per prompt token + output tokens * seconds per output token) / groups
# A more urgent request displaces the newest one of the least urgent band. Started streams are not counted and never rejected.

MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bounds on waiting requests that have not started and on their prompt tokens; one request may always wait."""

    max_requests: int = 1024
    max_tokens: int = 4_000_000


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The queue is full, for the reason `why`."""

    why: str
    # The waiting request to reject; `None` to reject the new one.
    instead: QueuedRequest | None


def check_bounds(queue: RequestQueue, request: QueuedRequest, bounds: QueueBounds) -> QueueFull | None:
    """Returns which request to reject if `request` exceeds the bounds."""
    tokens = queue.tokens + request.demand.prompt_tokens
    if queue.num_unstarted >= bounds.max_requests:
        why = f"{queue.num_unstarted} requests wait already"
    elif queue.num_unstarted and tokens > bounds.max_tokens:
        why = f"requests with {queue.tokens} prompt tokens wait already"
    else:
        return None
    return QueueFull(why, queue.last(worse_than=request.priority))


def predict_drain_s(queue: RequestQueue, views: Sequence[GroupView]) -> float | None:
    """Returns the seconds until the groups have worked off the queue, if any group reports."""
    known = [view for view in views if view.is_known and not view.draining and not is_stale(view.state)]
    if not known:
        return None
    prompt_s = sum(queue.tokens * view.token_s + queue.attended * view.attend_s for view in known) / len(known)
    token_s = sum(view.itl_s / max(1, view.running) for view in known) / len(known)
    usual = sum(view.mean_output_tokens or DEFAULT_OUTPUT_TOKENS for view in known) / len(known)
    outputs = min(float(queue.output_tokens), usual * queue.num_unstarted)
    seconds = (prompt_s + outputs * token_s) / len(known)
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
