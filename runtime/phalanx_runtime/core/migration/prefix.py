"""State machine of cached prefixes that a leader sends to other groups: neither a request nor a freeze.

SENDING   every rank sends the pages, which stay held
CLOSING   it is over; a rank may still read them

SendPrefix -> SENDING -> every rank has ended: the pages are released        Thaw, Release, a failure, the timeout -> CLOSING
"""

from dataclasses import dataclass

from phalanx_api import moves
from phalanx_runtime.core.migration.records import (
    DEFAULT_LIMITS,
    MoveLimits,
    PrefixAction,
    ReleasePrefix,
    SendFrame,
    StartSend,
    StopCopy,
)


@dataclass(slots=True)
class _PrefixSend:
    reading: set[int]
    """Ranks that may read the pages."""
    deadline: float | None
    """None while closing, because the timeouts of the ranks end that."""


class PrefixSends:
    """All prefixes that leave one leader. `num_ranks`: ranks of the group, each of which sends."""

    def __init__(self, num_ranks: int, page_size: int, limits: MoveLimits = DEFAULT_LIMITS) -> None:
        self._num_ranks = num_ranks
        self._page_size = page_size
        self._limits = limits
        self._sends: dict[str, _PrefixSend] = {}

    def __len__(self) -> int:
        return len(self._sends)

    def __contains__(self, move: str) -> bool:
        return move in self._sends

    @property
    def deadline(self) -> float | None:
        """Time of the next `tick`, if pages are being sent."""
        return min((send.deadline for send in self._sends.values() if send.deadline is not None), default=None)

    def start(self, order: moves.SendPrefix, num_pages: int, now: float) -> list[PrefixAction]:
        """Starts to send. `num_pages`: held pages, from the first on."""
        first, num_addresses = order.prepared.cached_tokens // self._page_size, len(order.prepared.addresses)
        if num_addresses != self._num_ranks:
            why = f"the target has {num_addresses} ranks, this group {self._num_ranks}"
            return [ReleasePrefix(order.move, why), SendFrame(moves.MoveFailed(order.move, "incompatible", why), why)]
        self._sends[order.move] = _PrefixSend(set(range(self._num_ranks)), now + self._limits.stall_s)
        why = f"{num_pages - first} of {len(order.keys)} pages of a prefix"
        return [StartSend(order=order, first=first, num_computed=num_pages * self._page_size, why=why)]

    def sent(self, move: str, now: float) -> list[PrefixAction]:
        """Records that a rank made progress."""
        send = self._sends.get(move)
        if send is not None and send.deadline is not None:
            send.deadline = now + self._limits.stall_s
        return []

    def failed(self, move: str, code: str, why: str) -> list[PrefixAction]:
        """Records that a rank failed to send."""
        actions = self.stop(move, why)
        return [*actions, SendFrame(moves.MoveFailed(move, code, why), why)] if actions else []

    def stop(self, move: str, why: str) -> list[PrefixAction]:
        """Ends the sending; the pages are released once no rank reads them."""
        send = self._sends.get(move)
        if send is None or send.deadline is None:
            return []
        send.deadline = None
        return [StopCopy(move, why)]

    def ended(self, move: str, rank: int) -> list[PrefixAction]:
        """Records that a rank reads no more pages."""
        send = self._sends.get(move)
        if send is None:
            return []
        send.reading.discard(rank)
        if send.reading:
            return []
        del self._sends[move]
        why = "no rank reads the pages any more"
        return [StopCopy(move, why), ReleasePrefix(move, why)]

    def tick(self, now: float) -> list[PrefixAction]:
        """Ends overdue ones."""
        late = [move for move, send in self._sends.items() if send.deadline is not None and send.deadline <= now]
        return [action for move in late for action in self.failed(move, "lease", "the copy makes no progress")]
