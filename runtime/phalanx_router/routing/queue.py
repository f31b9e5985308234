"""Queue of requests at the router, in the order of service, and its bounds.

    started streams in order of arrival, the first few of each kind; then bands, lowest priority number first;
    within a band the tenant with the smallest counter; within a tenant in order of arrival

    counter += 1 per prompt token, 2 per output token

A returning tenant starts at the smallest counter of the waiting tenants: idle time earns no credit. Source: Sheng et al. 2024,
"Fairness in Serving Large Language Models".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from phalanx_api.cost import attention_work
from phalanx_router.routing.cost import DEFAULT_OUTPUT_TOKENS, RequestDemand
from phalanx_router.routing.view import GroupView, is_stale

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
PER_TENANT = 4
"""Requests tried in a row, because possibly no group can take the first."""
PER_KIND = 8
MAX_TENANTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """One queued request."""

    ticket: int  # increases with arrival
    demand: RequestDemand
    arrived_at: float
    tenant: str = ""
    priority: int = 0
    has_started: bool = False  # a group received it, or the client has tokens
    kind: str = ""  # equal kinds have equal eligible groups


class RequestQueue:
    """Queued requests by ticket."""

    def __init__(self) -> None:
        # sums over requests that have not started
        self.prompt_tokens = 0
        self.attention = 0.0  # sum of their context lengths
        self.output_tokens = 0  # maximum

        self._by_ticket: dict[int, QueuedRequest] = {}
        self._started: dict[str, dict[int, QueuedRequest]] = {}  # by kind
        self._num_started = 0
        self._bands: dict[int, dict[str, dict[int, QueuedRequest]]] = {}  # not started, by priority and tenant
        self._counters: dict[str, float] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._by_ticket)

    @property
    def num_unstarted(self) -> int:
        """Number of requests that have not started."""
        return len(self._by_ticket) - self._num_started

    @property
    def bands(self) -> list[int]:
        """Priorities of unstarted requests, most urgent first."""
        return sorted(self._bands)

    def in_bands(self, priorities: Sequence[int]) -> list[QueuedRequest]:
        """Unstarted requests of these priorities."""
        lanes = [lane for priority in priorities for lane in self._bands.get(priority, {}).values()]
        return [queued for lane in lanes for queued in lane.values()]

    def add(self, queued: QueuedRequest) -> None:
        """Adds a request at the position of its ticket."""
        self._by_ticket[queued.ticket] = queued
        if queued.has_started:
            _insert(self._started.setdefault(queued.kind, {}), queued)
            self._num_started += 1
            return
        self.prompt_tokens += queued.demand.prompt_tokens
        self.attention += attention_work(queued.demand.prompt_tokens)
        self.output_tokens += queued.demand.output_tokens
        self._lift_counter(queued.tenant)
        lane = self._bands.setdefault(queued.priority, {}).setdefault(queued.tenant, {})
        _insert(lane, queued)

    def remove(self, ticket: int) -> bool:
        """Removes a request; returns whether it was queued."""
        queued = self._by_ticket.pop(ticket, None)
        if queued is None:
            return False
        if queued.has_started:
            self._num_started -= 1
            _drop(self._started, queued.kind, ticket)
            return True
        self.prompt_tokens -= queued.demand.prompt_tokens
        self.attention -= attention_work(queued.demand.prompt_tokens)
        self.output_tokens -= queued.demand.output_tokens
        band = self._bands[queued.priority]
        _drop(band, queued.tenant, ticket)
        if not band:
            del self._bands[queued.priority]
        return True

    def in_order(self) -> Iterator[QueuedRequest]:
        """Yields requests as they are to be served."""
        heads = (queued for lane in self._started.values() for queued in islice(lane.values(), PER_KIND))
        yield from sorted(heads, key=lambda queued: queued.ticket)
        for priority in self.bands:
            lanes = self._bands[priority]
            for tenant in sorted(lanes, key=lambda tenant: (self._counters.get(tenant, 0.0), next(iter(lanes[tenant])))):
                yield from islice(lanes[tenant].values(), PER_TENANT)

    def last(self, worse_than: int | None = None) -> QueuedRequest | None:
        """Request to reject first: the newest of the most served tenant in the last band, if less urgent than `worse_than`."""
        if not self._bands:
            return None
        priority = max(self._bands)
        if worse_than is not None and priority <= worse_than:
            return None
        lanes = self._bands[priority]
        tenant = max(lanes, key=lambda tenant: (self._counters.get(tenant, 0.0), next(reversed(lanes[tenant]))))
        return next(reversed(lanes[tenant].values()))

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Adds tokens to a tenant's counter, or returns reserved ones."""
        own = self._counters.get(tenant, self._floor)
        if prompt_tokens > 0:
            self._floor = max(self._floor, min([own, *self._waiting_counters()]))
        self._counters[tenant] = max(0.0, own + PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens)
        if len(self._counters) > MAX_TENANTS:
            self._drop_counters()

    def _waiting_counters(self) -> list[float]:
        return [self._counters.get(tenant, 0.0) for lanes in self._bands.values() for tenant in lanes]

    def _lift_counter(self, tenant: str) -> None:
        if not any(tenant in lanes for lanes in self._bands.values()):
            start = min(self._waiting_counters(), default=self._floor)
            self._floor = max(self._floor, start)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def _drop_counters(self) -> None:
        waiting = {tenant for lanes in self._bands.values() for tenant in lanes}
        # drops the lower half: `_lift_counter` would raise them anyway
        idle = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in waiting)
        for _, tenant in idle[: (len(idle) + 1) // 2]:
            del self._counters[tenant]


def _insert(lane: dict[int, QueuedRequest], queued: QueuedRequest) -> None:
    newest = next(reversed(lane), 0)
    lane[queued.ticket] = queued
    if newest > queued.ticket:
        ordered = sorted(lane.items())
        lane.clear()
        lane.update(ordered)


def _drop(lanes: dict[str, dict[int, QueuedRequest]], name: str, ticket: int) -> None:
    del lanes[name][ticket]
    if not lanes[name]:
        del lanes[name]


MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bounds on unstarted requests."""

    max_requests: int = 1024
    max_tokens: int = 4_000_000


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The queue is full."""

    why: str
    displaced: QueuedRequest | None  # to reject; otherwise the new one


def check_bounds(queue: RequestQueue, request: QueuedRequest, bounds: QueueBounds) -> QueueFull | None:
    """Request to reject if `request` exceeds the bounds."""
    tokens = queue.prompt_tokens + request.demand.prompt_tokens
    if queue.num_unstarted >= bounds.max_requests:
        why = f"{queue.num_unstarted} requests are queued already"
    elif queue.num_unstarted and tokens > bounds.max_tokens:
        why = f"requests with {queue.prompt_tokens} prompt tokens are queued already"
    else:
        return None
    return QueueFull(why, queue.last(worse_than=request.priority))


def predict_drain_s(queue: RequestQueue, views: Sequence[GroupView]) -> float | None:
    """Seconds until the groups have worked off the queue."""
    reporting = [view for view in views if view.has_report and not view.is_draining and not is_stale(view.state)]
    if not reporting:
        return None
    count = len(reporting)
    prompt_s = sum(queue.prompt_tokens * view.token_s + queue.attention * view.attention_s for view in reporting) / count
    token_s = sum(view.itl_s / max(1, view.load.running) for view in reporting) / count
    mean_tokens = sum(view.mean_output_tokens or DEFAULT_OUTPUT_TOKENS for view in reporting) / count
    outputs = min(float(queue.output_tokens), mean_tokens * queue.num_unstarted)
    seconds = (prompt_s + outputs * token_s) / count
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
