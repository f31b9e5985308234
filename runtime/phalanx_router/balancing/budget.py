"""Limits on moves: concurrent moves and transfer bytes per group, moved tokens of the fleet.

A token bucket that is not empty admits one move of any size and goes into debt: in T seconds at most rate * (T + burst) plus
one move pass. Rescue and evacuation get `URGENT` times the bytes and cost no tokens.
"""

from collections import Counter
from collections.abc import Iterable

from phalanx_api.summary import Budgets
from phalanx_router.balancing.records import OPTIONAL_RUNGS, PlannedMove, RefusalCode, Rung

TOKENS_BURST_S, BYTES_BURST_S = 4.0, 1.0
URGENT = 2.5


class TokenBucket:
    """Token bucket with a capacity of `burst_s` seconds."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._level: float | None = None
        self._filled_at = 0.0

    def fill(self, rate: float, now: float) -> None:
        """Refills at `rate` per second."""
        capacity = rate * self._burst_s
        elapsed_s = max(0.0, now - self._filled_at)
        self._level = capacity if self._level is None else min(capacity, self._level + rate * elapsed_s)
        self._filled_at = now

    @property
    def is_open(self) -> bool:
        """Whether the level is positive."""
        return self._level is not None and self._level > 0

    def take(self, amount: float) -> None:
        """Subtracts `amount`; the level may become negative."""
        self._level = (self._level or 0.0) - amount


class MoveBudget:
    """Grants and counts moves, by group key."""

    def __init__(self) -> None:
        self._budgets = Budgets()
        self._tokens = TokenBucket(TOKENS_BURST_S)
        self._bytes: dict[tuple[str, bool], TokenBucket] = {}  # by group key and urgency
        self._outgoing: Counter[str] = Counter()
        self._incoming: Counter[str] = Counter()

    def refill(self, budgets: Budgets, live_tokens: int, groups: Iterable[str], now: float) -> None:
        """Refills the buckets and drops removed groups."""
        self._budgets = budgets
        self._tokens.fill(budgets.tokens_share_per_s * live_tokens, now)
        names = [(key, is_urgent) for key in groups for is_urgent in (False, True)]
        self._bytes = {name: self._bytes.get(name) or TokenBucket(BYTES_BURST_S) for name in names}
        for (_, is_urgent), bucket in self._bytes.items():
            bucket.fill(self.bytes_per_s(is_urgent) or 0.0, now)

    def bytes_per_s(self, is_urgent: bool) -> float | None:
        """Cap of a group's transfers, if limited."""
        cap = self._budgets.bytes_per_s
        return cap * URGENT if cap is not None and is_urgent else cap

    def out_slots(self, source: str) -> int:
        """Further moves that may start out of this group."""
        return max(0, self._budgets.moves_per_group - self._outgoing[source])

    def in_slots(self, target: str) -> int:
        """Further moves that may start into this group."""
        return max(0, self._budgets.moves_per_group - self._incoming[target])

    def exceeded_limit(self, source: str, target: str, rung: Rung) -> RefusalCode | None:
        """Limit that forbids one more move."""
        if not (self.out_slots(source) and self.in_slots(target)):
            return "slots"
        if rung in OPTIONAL_RUNGS and not self._tokens.is_open:
            return "tokens"
        if self._budgets.bytes_per_s is not None and not all(self._is_open(key, rung) for key in (source, target)):
            return "bytes"
        return None

    def start_pull(self, holder: str, target: str, num_bytes: float, *, is_foreign: bool = False) -> RefusalCode | None:
        """Counts a pull that starts, or returns the limit that forbids it: those of optional moves but for the tokens.

        `is_foreign`: the holder is a group of another service, whose bandwidth is not limited here.
        """
        if not (self.out_slots(holder) and self.in_slots(target)):
            return "slots"
        limited = [target] if is_foreign else [holder, target]
        buckets = [self._bytes.get((key, False)) for key in limited] if self._budgets.bytes_per_s is not None else []
        if not all(bucket is not None and bucket.is_open for bucket in buckets):
            return "bytes"
        self._outgoing[holder] += 1
        self._incoming[target] += 1
        for bucket in buckets:
            if bucket is not None:
                bucket.take(num_bytes)
        return None

    def end_pull(self, holder: str, target: str) -> None:
        """Counts a pull that ended."""
        self._outgoing -= Counter([holder])
        self._incoming -= Counter([target])

    def _is_open(self, key: str, rung: Rung) -> bool:
        bucket = self._bytes.get((key, rung not in OPTIONAL_RUNGS))
        return bucket is not None and bucket.is_open

    def record_start(self, planned: PlannedMove, num_bytes: float) -> None:
        """Counts a move that starts."""
        self._outgoing[planned.source] += 1
        self._incoming[planned.target] += 1
        if planned.rung in OPTIONAL_RUNGS:
            self._tokens.take(planned.context)
        for key in (planned.source, planned.target):
            if planned.transfer != "recompute" and (bucket := self._bytes.get((key, planned.rung not in OPTIONAL_RUNGS))):
                bucket.take(num_bytes)

    def record_end(self, planned: PlannedMove) -> None:
        """Counts a move that ended."""
        self._outgoing -= Counter([planned.source])  # counts that reach 0 are dropped
        self._incoming -= Counter([planned.target])
