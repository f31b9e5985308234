"""State machine of one pull: a request waits until its group has cached pages of another one, the holder.

    PREPARING -> COPYING -> OVER        Prepared, then Arrived: the request starts on the pages

Any other event ends the pull: Thaw to the holder, Cancel to the target, and the request is computed. The target starts it only on
pages that every rank has verified.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from phalanx_api import moves, wire
from phalanx_router.moves.records import ToSource, ToTarget

PullOutcome = Literal["pulled", "refused", "timeout", "holder", "target", "stream"]
"""Pages arrived; the target refused; a timeout; holder or target failed or was lost; the stream ended."""


class PullState(Enum):
    """State of a pull."""

    PREPARING = "preparing"
    COPYING = "copying"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """A pull to execute."""

    move: str  # id
    holder: str  # group key
    target: str  # group key
    keys: list[bytes]  # of pages, from the first on
    page_size: int
    timeout_s: float
    bytes_per_s: float | None = None  # transfer cap
    prepare_s: float  # until Prepared
    lease_s: float = 10.0  # of the target's pages without a frame


@dataclass(frozen=True, slots=True, kw_only=True)
class PullEnded:
    """The pull has ended; the request starts now. Only a `pulled` one starts with the move."""

    outcome: PullOutcome
    code: str
    why: str
    num_cached: int = 0  # tokens that the target has
    num_tokens: int = 0  # pulled
    num_bytes: int = 0
    prepare_s: float = 0.0
    copy_s: float = 0.0
    """Until the pages arrived or the copy was given up."""


PullAction = ToSource | ToTarget | PullEnded


class Pull:
    """One pull."""

    def __init__(self, order: PullOrder) -> None:
        self.order = order
        self.state = PullState.PREPARING
        self._started_at = 0.0
        self._prepared_at = 0.0
        self._num_known = 0

    @property
    def deadline(self) -> float | None:
        """Time of the next `tick`."""
        if self.state is PullState.OVER:
            return None
        latest = self._started_at + self.order.timeout_s
        return latest if self.state is PullState.COPYING else min(latest, self._started_at + self.order.prepare_s)

    def start(self, request: wire.Request, now: float) -> list[PullAction]:
        """First actions."""
        self._started_at = now
        order, num_tokens = self.order, len(self.order.keys) * self.order.page_size
        return [ToTarget(wire.Prepare(order.move, request, order.lease_s, num_computed=num_tokens), "pull")]

    def receive(
        self, key: str, frame: moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed, now: float
    ) -> list[PullAction]:
        """Handles a frame of the leader on link `key`."""
        is_target = key == self.order.target
        match frame:
            case moves.Prepared() if is_target and self.state is PullState.PREPARING:
                return self._prepared(frame, now)
            case moves.Arrived() if is_target and self.state is PullState.COPYING:
                return self._arrived(frame, now)
            case moves.MoveFailed() if is_target:
                return self._end("refused" if self.state is PullState.PREPARING else "target", frame.code, frame.why)
            case moves.MoveFailed() if key == self.order.holder:
                return self._end("holder", frame.code, frame.why)
            case _:
                return []

    def lost(self, key: str, why: str) -> list[PullAction]:
        """Handles the loss of a group."""
        if key == self.order.target:
            return self._end("target", "target_lost", why)
        return self._end("holder", "source_lost", why) if key == self.order.holder else []

    def cancel(self, why: str) -> list[PullAction]:
        """Handles a stream that ended."""
        return self._end("stream", "ended", why)

    def tick(self, now: float) -> list[PullAction]:
        """Handles an expired deadline."""
        if self.deadline is None or now < self.deadline:
            return []
        copy_s = now - self._prepared_at if self.state is PullState.COPYING else 0.0
        return self._end("timeout", self.state.value, f"no answer in state {self.state.value}", copy_s)

    def _prepared(self, frame: moves.Prepared, now: float) -> list[PullAction]:
        self._prepared_at, self._num_known = now, frame.cached_tokens
        if frame.cached_tokens >= len(self.order.keys) * self.order.page_size:
            return self._end("refused", "cached", f"the target has {frame.cached_tokens} tokens by now")
        self.state = PullState.COPYING
        order = moves.SendPrefix(move=self.order.move, prepared=frame, keys=self.order.keys, bytes_per_s=self.order.bytes_per_s)
        return [ToSource(order, f"the target has {frame.cached_tokens} tokens cached")]

    def _arrived(self, frame: moves.Arrived, now: float) -> list[PullAction]:
        self.state = PullState.OVER
        why = f"{frame.num_computed} tokens are at the target"
        ended = PullEnded(
            outcome="pulled",
            code="",
            why=why,
            num_cached=frame.num_computed,
            num_tokens=max(0, frame.num_computed - self._num_known),
            num_bytes=frame.num_bytes,
            prepare_s=self._prepared_at - self._started_at,
            copy_s=now - self._prepared_at,
        )
        return [ToSource(moves.Release(self.order.move), why), ended]

    def _end(self, outcome: PullOutcome, code: str, why: str, copy_s: float = 0.0) -> list[PullAction]:
        if self.state is PullState.OVER:
            return []
        undo: list[PullAction] = [ToTarget(moves.Cancel(self.order.move), why)]
        if self.state is PullState.COPYING:
            undo.append(ToSource(moves.Thaw(self.order.move), why))
        self.state = PullState.OVER
        return [*undo, PullEnded(outcome=outcome, code=code, why=why, num_cached=self._num_known, copy_s=copy_s)]
