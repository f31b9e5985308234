"""Limits on moves: concurrent moves and transfer bytes per group, moved tokens of the fleet.

Bytes and tokens are token buckets with a burst of 1 s and 4 s. A bucket that is not empty admits one move of any size and goes
into debt: in T seconds at most rate * (T + burst) plus one move pass. Rescue and evacuation get `URGENT` times the bytes and do
not count as tokens.
"""

from collections import Counter
from collections.abc import Iterable

from phalanx_api.summary import Budgets
from phalanx_router.balancing.records import OPTIONAL_RUNGS, PlannedMove, RefusalCode, Rung

TOKENS_BURST_S, BYTES_BURST_S = 4.0, 1.0
URGENT = 2.5


class Bucket:
    """A token bucket with a variable rate and a capacity of `burst_s` seconds; it starts full."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._level: float | None = None
        self._at = 0.0

    def fill(self, rate: float, now: float) -> None:
        """Refills at `rate` per second since the last call."""
        full = rate * self._burst_s
        self._level = full if self._level is None else min(full, self._level + rate * max(0.0, now - self._at))
        self._at = now

    @property
    def is_open(self) -> bool:
        """Whether the level is positive."""
        return self._level is not None and self._level > 0

    def take(self, amount: float) -> None:
        """Subtracts `amount`; the level may become negative."""
        self._level = (self._level or 0.0) - amount


class MoveBudget:
    """Grants and counts the moves of one router. Groups are given by the keys of their views."""

    def __init__(self) -> None:
        self._budgets = Budgets()
        self._tokens = Bucket(TOKENS_BURST_S)
        self._bytes: dict[tuple[str, bool], Bucket] = {}
        self._leaving: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()

    def begin(self, budgets: Budgets, live_tokens: int, groups: Iterable[str], now: float) -> None:
        """Starts a tick: refills the buckets from the current grant and drops groups that no longer exist."""
        self._budgets = budgets
        self._tokens.fill(budgets.tokens_share_per_s * live_tokens, now)
        named = [(key, is_urgent) for key in groups for is_urgent in (False, True)]
        self._bytes = {name: self._bytes.get(name) or Bucket(BYTES_BURST_S) for name in named}
        for (_, is_urgent), bucket in self._bytes.items():
            bucket.fill(self.bytes_per_s(is_urgent) or 0.0, now)

    def bytes_per_s(self, is_urgent: bool) -> float | None:
        """Returns the cap of a group's transfers; `None` is unlimited."""
        bound = self._budgets.bytes_per_s
        return bound * URGENT if bound is not None and is_urgent else bound

    def out_slots(self, source: str) -> int:
        """Returns the number of further moves that may start out of this group."""
        return max(0, self._budgets.moves_per_group - self._leaving[source])

    def in_slots(self, target: str) -> int:
        """Returns the number of further moves that may start into this group."""
        return max(0, self._budgets.moves_per_group - self._coming[target])

    def forbids(self, source: str, target: str, rung: Rung) -> RefusalCode | None:
        """Returns the limit that forbids one more move, or `None`."""
        if not (self.out_slots(source) and self.in_slots(target)):
            return "slots"
        if rung in OPTIONAL_RUNGS and not self._tokens.is_open:
            return "tokens"
        if self._budgets.bytes_per_s is not None and not all(self._is_open(key, rung) for key in (source, target)):
            return "bytes"
        return None

    def _is_open(self, key: str, rung: Rung) -> bool:
        bucket = self._bytes.get((key, rung not in OPTIONAL_RUNGS))
        return bucket is not None and bucket.is_open

    def spend(self, proposal: PlannedMove, num_bytes: float) -> None:
        """Counts a move that starts."""
        self._leaving[proposal.source] += 1
        self._coming[proposal.target] += 1
        if proposal.rung in OPTIONAL_RUNGS:
            self._tokens.take(proposal.context)
        for key in (proposal.source, proposal.target):
            if proposal.way != "recompute" and (bucket := self._bytes.get((key, proposal.rung not in OPTIONAL_RUNGS))):
                bucket.take(num_bytes)

    def end(self, proposal: PlannedMove) -> None:
        """Counts a move that ended, with any outcome."""
        self._leaving -= Counter([proposal.source])  # counts that reach 0 are dropped
        self._coming -= Counter([proposal.target])
