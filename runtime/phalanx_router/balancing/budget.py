"""What may still be moved now: moves at once per group, bytes of a group's transfers, tokens of the whole fleet.

Bytes and tokens are buckets that fill at a rate, up to 1 s of bytes and 4 s of tokens. A bucket that is not empty lets one move
pass whatever its size, and then owes: in any T seconds at most rate * (T + burst) and one move go through.
Rescue and emptying may use `URGENT` times the bytes, and are not counted as tokens.
"""

from collections import Counter
from collections.abc import Iterable

from phalanx_api.summary import Budgets
from phalanx_router.balancing.records import FOR_BALANCE, Proposal, RefusalCode, Rung

TOKENS_BURST_S, BYTES_BURST_S = 4.0, 1.0
URGENT = 2.5


class Bucket:
    """Fills at a rate that may change, up to so many seconds of it; full at first."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._level: float | None = None
        self._at = 0.0

    def fill(self, rate: float, now: float) -> None:
        """Lets time pass at this rate."""
        full = rate * self._burst_s
        self._level = full if self._level is None else min(full, self._level + rate * max(0.0, now - self._at))
        self._at = now

    @property
    def is_open(self) -> bool:
        """Whether something may be taken."""
        return self._level is not None and self._level > 0

    def take(self, amount: float) -> None:
        """Takes, if need be on credit."""
        self._level = (self._level or 0.0) - amount


class MoveBudget:
    """Grants and counts the moves of one router. Groups are named by the keys of their views."""

    def __init__(self) -> None:
        self._budgets = Budgets()
        self._tokens = Bucket(TOKENS_BURST_S)
        self._bytes: dict[tuple[str, bool], Bucket] = {}
        self._leaving: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()

    def begin(self, budgets: Budgets, live_tokens: int, groups: Iterable[str], now: float) -> None:
        """Starts a tick: what may be done in it follows from these. Groups that are gone are forgotten."""
        self._budgets = budgets
        self._tokens.fill(budgets.tokens_share_per_s * live_tokens, now)
        named = [(key, is_urgent) for key in groups for is_urgent in (False, True)]
        self._bytes = {name: self._bytes.get(name) or Bucket(BYTES_BURST_S) for name in named}
        for (_, is_urgent), bucket in self._bytes.items():
            bucket.fill(self.bytes_per_s(is_urgent) or 0.0, now)

    def bytes_per_s(self, is_urgent: bool) -> float | None:
        """Bound of a group's transfers; None is no bound."""
        bound = self._budgets.bytes_per_s
        return bound * URGENT if bound is not None and is_urgent else bound

    def out_slots(self, source: str) -> int:
        """How many more moves out of this group may begin."""
        return max(0, self._budgets.moves_per_group - self._leaving[source])

    def in_slots(self, target: str) -> int:
        """How many more moves into this group may begin."""
        return max(0, self._budgets.moves_per_group - self._coming[target])

    def forbids(self, source: str, target: str, rung: Rung) -> RefusalCode | None:
        """What stands against one more move, if something does."""
        if not (self.out_slots(source) and self.in_slots(target)):
            return "slots"
        if rung in FOR_BALANCE and not self._tokens.is_open:
            return "tokens"
        if self._budgets.bytes_per_s is not None and not all(self._is_open(key, rung) for key in (source, target)):
            return "bytes"
        return None

    def _is_open(self, key: str, rung: Rung) -> bool:
        bucket = self._bytes.get((key, rung not in FOR_BALANCE))
        return bucket is not None and bucket.is_open

    def spend(self, proposal: Proposal, num_bytes: float) -> None:
        """Counts a move that begins."""
        self._leaving[proposal.source] += 1
        self._coming[proposal.target] += 1
        if proposal.rung in FOR_BALANCE:
            self._tokens.take(proposal.context)
        for key in (proposal.source, proposal.target):
            if proposal.way != "recompute" and (bucket := self._bytes.get((key, proposal.rung not in FOR_BALANCE))):
                bucket.take(num_bytes)

    def end(self, proposal: Proposal) -> None:
        """Counts a move that ended, however it did."""
        self._leaving -= Counter([proposal.source])  # counts that reach 0 are dropped
        self._coming -= Counter([proposal.target])
