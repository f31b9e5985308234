"""Requests on their way in, as the leader sees them that will have them: pages reserved, filled, and begun or dropped.

    RESERVING   asked of the pool and the ranks
    OPEN        pages come in
    ARRIVED     all are there, checked; nothing computes before the Submit

    Prepare -> RESERVING -> OPEN -> ARRIVED -> Submit: it begins        Cancel, a failure, the lease: pages are given back

A move that is over is remembered for as long as its lease was, so that a Prepare that comes again reserves nothing.
"""

from dataclasses import dataclass, field
from enum import Enum

from phalanx_api import moves, wire
from phalanx_runtime.core.migration.records import Drop, MoveLimits, Reserve, SendFrame, StartMoved, TargetAction


class TargetState(Enum):
    """Where one move is."""

    RESERVING = "reserving"
    OPEN = "open"
    ARRIVED = "arrived"


@dataclass(frozen=True, slots=True)
class PageReservation:
    """What was reserved: `held_tokens` lie in pages here already, `room_tokens` fit with them; ranks listen, under this key."""

    held_tokens: int
    room_tokens: int
    addresses: list[moves.PageAddress]
    key: bytes


@dataclass(slots=True)
class _TargetMove:
    """One move. `whole`: tokens in the pages of each rank that has all of them, by rank."""

    asked: wire.Prepare
    deadline: float
    state: TargetState = TargetState.RESERVING
    reserved: PageReservation | None = None
    whole: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0


class TargetMoves:
    """All moves that come into one leader, whose group has so many ranks that take pages in."""

    def __init__(self, num_ranks: int, limits: MoveLimits | None = None) -> None:
        self._num_ranks = num_ranks
        self._limits = limits or MoveLimits()
        self._moves: dict[str, _TargetMove] = {}
        self._over: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None without moves."""
        return min((held.deadline for held in self._moves.values()), default=None)

    def prepare(self, asked: wire.Prepare, now: float) -> list[TargetAction]:
        """A router asks for room."""
        if asked.move in self._moves or asked.move in self._over:
            return []
        self._sweep(now)
        self._moves[asked.move] = _TargetMove(asked, now + asked.lease_s)
        num_tokens = len(asked.request.prompt) + len(asked.request.delivered)
        most = len(asked.request.prompt) + asked.request.sampling.max_tokens
        wanted = min(num_tokens + self._limits.growth_tokens, max(most, num_tokens))
        return [Reserve(asked, wanted, f"{num_tokens} tokens come")]

    def reserved(self, move: str, reserved: PageReservation, now: float) -> list[TargetAction]:
        """The pages are reserved and the ranks listen."""
        held = self._moves.get(move)
        if held is None:
            return [Drop(move, "the move was over before its pages were reserved")]
        held.state, held.reserved = TargetState.OPEN, reserved
        held.deadline = now + held.asked.lease_s
        told = moves.Prepared(move, reserved.held_tokens, reserved.addresses, reserved.key, reserved.room_tokens)
        return [SendFrame(told, f"{reserved.held_tokens} tokens are here already")]

    def refused(self, move: str, code: str, why: str, now: float) -> list[TargetAction]:
        """Nothing could be reserved."""
        if self._forget(move, now) is None:
            return []
        return [SendFrame(moves.MoveFailed(move, code, why), why)]

    def came(self, move: str, rank: int, num_bytes: int, num_computed: int | None, now: float) -> list[TargetAction]:
        """Pages came in at a rank and their checksums hold; `num_computed` with the last of them."""
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
        """What came was no good, or its sender is gone."""
        held = self._moves.get(move)
        if held is None or held.state is not TargetState.OPEN:
            return []  # once all pages are here their sender is not needed
        return self._fail(move, code, why, now)

    def submit(self, handle: int, request: wire.Request, move: str, now: float) -> tuple[StartMoved | None, list[TargetAction]]:
        """The start of a request whose router committed the move; None when its pages are not here, and it has to be computed.

        The request may have fewer tokens than the pages hold: then some came too late for the journal, and are drawn again.
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
        return StartMoved(move, handle, request, num_computed, f"{num_computed} of {tokens} tokens came"), []

    def cancel(self, move: str, now: float) -> list[TargetAction]:
        """The router gives up the move, or is gone."""
        held = self._forget(move, now)
        if held is None:
            self._over.setdefault(move, now + self._limits.frozen_s)  # its Prepare may come later
            return []
        return [Drop(move, "the router gave the move up")] if held.state is not TargetState.RESERVING else []

    def tick(self, now: float) -> list[TargetAction]:
        """Ends the moves whose lease is over, and forgets what is long over."""
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
