"""State machine of requests that arrive at a leader: pages are reserved, filled, and used or freed.

    RESERVING   the pool and the ranks prepare
    OPEN        pages arrive
    ARRIVED     all pages have arrived, verified; nothing computes before the Submit

    Prepare -> RESERVING -> OPEN -> ARRIVED -> Submit: it starts        Cancel, a failure, the lease: pages are freed

A finished move is remembered for the length of its lease, so a repeated Prepare reserves nothing.
"""

from dataclasses import dataclass, field
from enum import Enum

from phalanx_api import moves, wire
from phalanx_runtime.core.migration.records import Drop, MoveLimits, Reserve, SendFrame, StartMoved, TargetAction


class TargetState(Enum):
    """State of one move."""

    RESERVING = "reserving"
    OPEN = "open"
    ARRIVED = "arrived"


@dataclass(frozen=True, slots=True)
class PageReservation:
    """Reserved pages: `held_tokens` are cached here already, `room_tokens` fit with them; ranks listen under this key."""

    held_tokens: int
    room_tokens: int
    addresses: list[moves.PageAddress]
    key: bytes


@dataclass(slots=True, kw_only=True)
class _TargetMove:
    """One move. `whole`: by rank, the tokens in the pages of each rank that has all of them."""

    asked: wire.Prepare
    deadline: float
    state: TargetState = TargetState.RESERVING
    reserved: PageReservation | None = None
    whole: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0


class TargetMoves:
    """All moves to one leader. `num_ranks`: ranks of the group that receive pages."""

    def __init__(self, num_ranks: int, limits: MoveLimits | None = None) -> None:
        self._num_ranks = num_ranks
        self._limits = limits or MoveLimits()
        self._moves: dict[str, _TargetMove] = {}
        self._over: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def deadline(self) -> float | None:
        """The latest time of the next `tick`, if there are moves."""
        return min((held.deadline for held in self._moves.values()), default=None)

    def prepare(self, asked: wire.Prepare, now: float) -> list[TargetAction]:
        """Starts a move for a router: requests the reservation."""
        if asked.move in self._moves or asked.move in self._over:
            return []
        self._sweep(now)
        self._moves[asked.move] = _TargetMove(asked=asked, deadline=now + asked.lease_s)
        num_tokens = len(asked.request.prompt) + len(asked.request.delivered)
        most = len(asked.request.prompt) + asked.request.sampling.max_tokens
        wanted = min(num_tokens + self._limits.growth_tokens, max(most, num_tokens))
        return [Reserve(asked, wanted, f"{num_tokens} tokens come")]

    def reserved(self, move: str, reserved: PageReservation, now: float) -> list[TargetAction]:
        """Records that pages are reserved and ranks listen."""
        held = self._moves.get(move)
        if held is None:
            return [Drop(move, "the move was over before its pages were reserved")]
        held.state, held.reserved = TargetState.OPEN, reserved
        held.deadline = now + held.asked.lease_s
        told = moves.Prepared(
            move=move,
            held_tokens=reserved.held_tokens,
            addresses=reserved.addresses,
            key=reserved.key,
            room_tokens=reserved.room_tokens,
        )
        return [SendFrame(told, f"{reserved.held_tokens} tokens are here already")]

    def refused(self, move: str, code: str, why: str, now: float) -> list[TargetAction]:
        """Records that the reservation failed."""
        if self._forget(move, now) is None:
            return []
        return [SendFrame(moves.MoveFailed(move, code, why), why)]

    def came(self, move: str, rank: int, num_bytes: int, num_computed: int | None, now: float) -> list[TargetAction]:
        """Records verified pages of a rank; `num_computed` comes with the last of them."""
        held = self._moves.get(move)
        if held is None or held.state is not TargetState.OPEN:
            return []
        held.deadline = now + held.asked.lease_s
        held.num_bytes += num_bytes
        if num_computed is None:
            return []
        held.whole[rank] = num_computed
        if len(held.whole) < self._num_ranks:
            return []
        if len(set(held.whole.values())) > 1:
            return self._fail(move, "checksum", f"ranks got {sorted(set(held.whole.values()))} tokens", now)
        held.state = TargetState.ARRIVED
        told = moves.Arrived(move, self._num_computed(held), held.num_bytes)
        return [SendFrame(told, f"{num_computed} tokens are here")]

    def failed(self, move: str, code: str, why: str, now: float) -> list[TargetAction]:
        """Records that receiving failed, or that the sender disconnected."""
        held = self._moves.get(move)
        if held is None or held.state is not TargetState.OPEN:
            return []  # once all pages are here their sender is not needed
        return self._fail(move, code, why, now)

    def submit(self, handle: int, request: wire.Request, move: str, now: float) -> tuple[StartMoved | None, list[TargetAction]]:
        """Returns the start of a request whose router committed the move, or no start if its pages are incomplete: it is then
        computed.

        The request may have fewer tokens than the pages hold: the last ones missed the journal and are sampled again.
        """
        held = self._moves.get(move)
        if held is None:
            return None, []
        self._forget(move, now)
        if held.state is not TargetState.ARRIVED:
            is_open = held.state is TargetState.OPEN
            return None, [Drop(move, "it is to start before its pages are here")] if is_open else []
        tokens = len(request.prompt) + len(request.delivered)
        num_computed = max(0, min(self._num_computed(held), tokens - 1))
        return StartMoved(
            move=move, handle=handle, request=request, num_computed=num_computed, why=f"{num_computed} of {tokens} tokens came"
        ), []

    def cancel(self, move: str, now: float) -> list[TargetAction]:
        """Ends the move for the router, or after its loss."""
        held = self._forget(move, now)
        if held is None:
            self._over.setdefault(move, now + self._limits.frozen_s)  # its Prepare may come later
            return []
        return [Drop(move, "the router gave the move up")] if held.state is not TargetState.RESERVING else []

    def tick(self, now: float) -> list[TargetAction]:
        """Ends moves with expired leases, and forgets finished ones."""
        self._sweep(now)
        late = [move for move, held in self._moves.items() if held.deadline <= now]
        return [action for move in late for action in self._fail(move, "lease", "its time was over", now)]

    def _sweep(self, now: float) -> None:
        self._over = {move: until for move, until in self._over.items() if until > now}

    def _fail(self, move: str, code: str, why: str, now: float) -> list[TargetAction]:
        held = self._forget(move, now)
        assert held is not None, "the caller looked"
        said: list[TargetAction] = [SendFrame(moves.MoveFailed(move, code, why), why)]
        return said if held.state is TargetState.RESERVING else [Drop(move, why), *said]

    def _num_computed(self, held: _TargetMove) -> int:
        assert held.reserved is not None, "pages come in only after they were reserved"
        return max(held.reserved.held_tokens, *held.whole.values())

    def _forget(self, move: str, now: float) -> _TargetMove | None:
        held = self._moves.pop(move, None)
        if held is not None:
            self._over[move] = now + held.asked.lease_s
        return held
