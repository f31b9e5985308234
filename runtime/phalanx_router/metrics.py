"""What a router counts. Names are the router's own; the door counts requests and tokens as clients see them."""

from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from phalanx_api.summary import Freshness
from phalanx_router.balance_metrics import BalanceMetrics
from phalanx_router.routing.choose import Reason

WAIT_BOUNDS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MOVE_STALL_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
Outcome = Literal["finished", "refused", "failed", "cancelled"]


class RouterMetrics:
    """Counters and gauges of one router, in the registry that `/metrics` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.balance = BalanceMetrics(registry)
        self.num_shed = 0
        self._requests = Counter("phalanx_router_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        self._replays = Counter("phalanx_router_replays", "Streams that went on in another group.", registry=registry)
        self._links_lost = Counter("phalanx_router_links_lost", "Links to leaders that ended.", registry=registry)
        self._moves = Counter("phalanx_router_moves", "Moves by how they ended and why.", ["outcome", "why"], registry=registry)
        self._move_bytes = Counter("phalanx_router_move_bytes", "Bytes of pages that came to targets.", registry=registry)
        self._move_stall = Histogram(
            "phalanx_router_move_stall_seconds",
            "Time between the last token before a move and the first after it.",
            buckets=MOVE_STALL_BOUNDS_S,
            registry=registry,
        )
        self._groups_known = Gauge("phalanx_router_groups_known", "Leaders in the last list.", registry=registry)
        self._prefix_keys = Gauge("phalanx_router_prefix_keys", "Page keys of groups that are known here.", registry=registry)
        self._states = Gauge("phalanx_router_groups", "Groups by how old their reports are.", ["state"], registry=registry)
        self._groups_ready = Gauge("phalanx_router_groups_ready", "Groups that take requests now.", registry=registry)
        self._choices = Counter("phalanx_router_choices", "Groups chosen for requests, by why.", ["why"], registry=registry)
        self._queued = Gauge("phalanx_router_queued_requests", "Requests that wait at the router.", registry=registry)
        self._queued_tokens = Gauge("phalanx_router_queued_tokens", "Prompt tokens of requests that wait.", registry=registry)
        self._held = Gauge("phalanx_router_held_requests", "Requests that wait for the service to wake.", registry=registry)
        self._wait = Histogram(
            "phalanx_router_wait_seconds",
            "Time between the arrival of a request and its first dispatch.",
            buckets=WAIT_BOUNDS_S,
            registry=registry,
        )
        self._requeues = Counter("phalanx_router_requeues", "Requests taken back from a group before a token.", registry=registry)
        self._shed = Counter("phalanx_router_shed", "Requests refused with 429 here.", ["why"], registry=registry)
        self._streams = Gauge("phalanx_router_streams", "Streams open now.", registry=registry)

    def request_ended(self, outcome: Outcome) -> None:
        """Counts a request by its outcome."""
        self._requests.labels(outcome).inc()

    def replayed(self) -> None:
        """Counts a stream that was given to another group."""
        self._replays.inc()

    def move_over(self, outcome: str, why: str, num_bytes: int, stall_s: float | None) -> None:
        """Counts a move by how it ended and why it was made, its bytes, and how long its stream stood still."""
        self._moves.labels(outcome, why).inc()
        self._move_bytes.inc(num_bytes)
        if stall_s is not None:
            self._move_stall.observe(stall_s)

    def chosen(self, reason: Reason) -> None:
        """Counts a choice by its reason."""
        self._choices.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        """Notes how long a newcomer waited for its group."""
        self._wait.observe(seconds)

    def requeued(self) -> None:
        """Counts a request that was taken back from its group."""
        self._requeues.inc()

    def shed(self, code: str) -> None:
        """Counts a request that was refused for want of room."""
        self.num_shed += 1
        self._shed.labels(code).inc()

    def show_queue(self, requests: int, tokens: int) -> None:
        """Shows what waits at the router."""
        self._queued.set(requests)
        self._queued_tokens.set(tokens)

    def show_held(self, requests: int) -> None:
        """Shows how many requests wait for a first group."""
        self._held.set(requests)

    def link_lost(self) -> None:
        """Counts a link that was open and ended."""
        self._links_lost.inc()

    def show_groups(self, known: int, ready: int) -> None:
        """Shows how many groups are known, and how many are ready."""
        self._groups_known.set(known)
        self._groups_ready.set(ready)

    def show_states(self, states: Mapping[Freshness, int]) -> None:
        """Shows how many groups are in each state."""
        for state in get_args(Freshness):
            self._states.labels(state).set(states.get(state, 0))

    def show_prefix_keys(self, keys: int) -> None:
        """Shows how large the prefix index is."""
        self._prefix_keys.set(keys)

    def show_streams(self, streams: int) -> None:
        """Shows how many streams are open."""
        self._streams.set(streams)
