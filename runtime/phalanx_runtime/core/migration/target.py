"""State machine of requests that arrive at a leader: pages are reserved, filled, and used or freed.

RESERVING   the pool and the ranks prepare
OPEN        pages arrive
ARRIVED     all pages have arrived and are verified

Prepare -> RESERVING -> OPEN -> ARRIVED -> Submit: it starts        Cancel, a failure, the lease: pages are freed
"""

from dataclasses import dataclass, field
from enum import Enum

from phalanx_api import moves, wire
from phalanx_runtime.core.migration.records import (
    DEFAULT_LIMITS,
    Drop,
    MoveLimits,
    Reserve,
    SendFrame,
    StartMoved,
    TargetAction,
)


class TargetState(Enum):
    """State of one move."""

    RESERVING = "reserving"
    OPEN = "open"
    ARRIVED = "arrived"


@dataclass(frozen=True, slots=True)
class PageReservation:
    """Reserved pages, as in `moves.Prepared`."""

    cached_tokens: int
    capacity_tokens: int
    addresses: list[moves.PageAddress]
    key: bytes


@dataclass(slots=True, kw_only=True)
class _TargetMove:
    order: wire.Prepare
    deadline: float
    state: TargetState = TargetState.RESERVING
    reservation: PageReservation | None = None
    computed_by_rank: dict[int, int] = field(default_factory=dict)
    """Tokens at each rank that has all pages."""
    num_bytes: int = 0

    @property
    def num_computed(self) -> int:
        """Tokens in the pages, cached ones included."""
        assert self.reservation is not None, "pages arrive only after they were reserved"
        return max(self.reservation.cached_tokens, self.num_received)

    @property
    def num_received(self) -> int:
        """Tokens at every rank that has all pages."""
        return max(self.computed_by_rank.values())


class TargetMoves:
    """All moves to one leader. `num_ranks`: ranks of the group that receive pages."""

    def __init__(self, num_ranks: int, limits: MoveLimits = DEFAULT_LIMITS) -> None:
        self._num_ranks = num_ranks
        self._limits = limits
        self._moves: dict[str, _TargetMove] = {}
        self._finished: dict[str, float] = {}
        """Finished moves, remembered for a lease, so that a repeated Prepare reserves nothing."""

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def deadline(self) -> float | None:
        """Time of the next `tick`, if there are moves."""
        return min((incoming.deadline for incoming in self._moves.values()), default=None)

    def prepare(self, order: wire.Prepare, now: float) -> list[TargetAction]:
        """Starts a move: requests the reservation."""
        if order.move in self._moves or order.move in self._finished:
            return []
        self._forget_finished(now)
        self._moves[order.move] = _TargetMove(order=order, deadline=now + order.lease_s)
        request = order.request
        num_tokens = len(request.prompt) + len(request.delivered)
        max_tokens = max(len(request.prompt) + request.sampling.max_tokens, num_tokens)
        num_reserved = min(num_tokens + self._limits.growth_tokens, max_tokens)
        return [Reserve(order, num_reserved, f"a request with {num_tokens} tokens arrives")]

    def reserved(self, move: str, reservation: PageReservation, now: float) -> list[TargetAction]:
        """Records that pages are reserved and ranks listen."""
        incoming = self._moves.get(move)
        if incoming is None:
            return [Drop(move, "the move ended before its pages were reserved")]
        incoming.state, incoming.reservation = TargetState.OPEN, reservation
        incoming.deadline = now + incoming.order.lease_s
        frame = moves.Prepared(
            move=move,
            cached_tokens=reservation.cached_tokens,
            addresses=reservation.addresses,
            key=reservation.key,
            capacity_tokens=reservation.capacity_tokens,
        )
        return [SendFrame(frame, f"{reservation.cached_tokens} tokens are cached")]

    def refused(self, move: str, code: str, why: str, now: float) -> list[TargetAction]:
        """Records that the reservation failed."""
        if self._remove(move, now) is None:
            return []
        return [SendFrame(moves.MoveFailed(move, code, why), why)]

    def received(self, move: str, rank: int, num_bytes: int, num_computed: int | None, now: float) -> list[TargetAction]:
        """Records verified pages of a rank; `num_computed` is set with the last ones."""
        incoming = self._moves.get(move)
        if incoming is None or incoming.state is not TargetState.OPEN:
            return []
        incoming.deadline = now + incoming.order.lease_s
        incoming.num_bytes += num_bytes
        if num_computed is None:
            return []
        incoming.computed_by_rank[rank] = num_computed
        if len(incoming.computed_by_rank) < self._num_ranks:
            return []
        lengths = sorted(set(incoming.computed_by_rank.values()))
        if len(lengths) > 1:
            return self._fail(move, "checksum", f"ranks received {lengths} tokens", now)
        incoming.state = TargetState.ARRIVED
        frame = moves.Arrived(move, incoming.num_computed, incoming.num_bytes)
        return [SendFrame(frame, f"{num_computed} tokens have arrived")]

    def failed(self, move: str, code: str, why: str, now: float) -> list[TargetAction]:
        """Records that receiving failed or the sender disconnected; ignored once all pages have arrived."""
        incoming = self._moves.get(move)
        if incoming is None or incoming.state is not TargetState.OPEN:
            return []
        return self._fail(move, code, why, now)

    def submit(self, handle: int, request: wire.Request, move: str, now: float) -> tuple[StartMoved | None, list[TargetAction]]:
        """Returns the start of a request with a committed move, unless pages are missing. Tokens beyond its own are ignored."""
        incoming = self._remove(move, now)
        if incoming is None:
            return None, []
        if incoming.state is not TargetState.ARRIVED:
            is_open = incoming.state is TargetState.OPEN
            return None, [Drop(move, "the request starts before its pages have arrived")] if is_open else []
        num_tokens = len(request.prompt) + len(request.delivered)
        num_computed = max(0, min(incoming.num_computed, num_tokens - 1))
        why = f"{num_computed} of {num_tokens} tokens have arrived"
        started = StartMoved(
            move=move,
            handle=handle,
            request=request,
            num_computed=num_computed,
            num_sent=incoming.num_computed,
            num_received=incoming.num_received,
            why=why,
        )
        return started, []

    def cancel(self, move: str, now: float) -> list[TargetAction]:
        """Ends the move, even before its Prepare."""
        incoming = self._remove(move, now)
        if incoming is None:
            self._finished.setdefault(move, now + self._limits.frozen_s)
            return []
        return [Drop(move, "the router cancelled the move")] if incoming.state is not TargetState.RESERVING else []

    def tick(self, now: float) -> list[TargetAction]:
        """Ends moves with expired leases."""
        self._forget_finished(now)
        late = [move for move, incoming in self._moves.items() if incoming.deadline <= now]
        return [action for move in late for action in self._fail(move, "lease", "the lease expired", now)]

    def _forget_finished(self, now: float) -> None:
        self._finished = {move: until for move, until in self._finished.items() if until > now}

    def _fail(self, move: str, code: str, why: str, now: float) -> list[TargetAction]:
        incoming = self._remove(move, now)
        assert incoming is not None, "the caller checked that the move exists"
        frames: list[TargetAction] = [SendFrame(moves.MoveFailed(move, code, why), why)]
        return frames if incoming.state is TargetState.RESERVING else [Drop(move, why), *frames]

    def _remove(self, move: str, now: float) -> _TargetMove | None:
        incoming = self._moves.pop(move, None)
        if incoming is not None:
            self._finished[move] = now + incoming.order.lease_s
        return incoming
