"""Guards against oscillation: the attraction guard and the ping-pong alarm.

Attraction guard: for `FADE_S` after a request leaves a group, routing adds a linearly falling share of its load to that group.
Without it a relieved group attracts new prompts, becomes hot again and moves more requests away (balancing.md 3.4).
"""

from collections import deque
from dataclasses import dataclass, replace

from phalanx_router.balancing.projection import pages_of
from phalanx_router.routing.view import GroupView

FADE_S = 2.0


@dataclass(frozen=True, slots=True)
class _DepartedStream:
    context: int
    at: float


class AttractionGuard:
    """Requests that left each group (by key) within `FADE_S`."""

    def __init__(self) -> None:
        self._departed: dict[str, list[_DepartedStream]] = {}

    def left(self, key: str, context: int, now: float) -> None:
        """Records that a request left this group."""
        self._departed.setdefault(key, []).append(_DepartedStream(context, now))

    def with_departed_load(self, view: GroupView, now: float) -> GroupView:
        """Returns the group with the load that routing should assume."""
        departed = self._departed.get(view.key)
        if departed is None:
            return view
        departed = self._departed[view.key] = [entry for entry in departed if now - entry.at < FADE_S]
        if not departed:
            del self._departed[view.key]
            return view
        shares = [1 - max(0.0, now - entry.at) / FADE_S for entry in departed]
        context = round(sum(share * entry.context for share, entry in zip(shares, departed, strict=True)))
        return replace(
            view,
            running=view.running + round(sum(shares)),
            context_tokens=view.context_tokens + context,
            used_pages=view.used_pages + pages_of(context, view),
        )


# Ping-pong alarm: a return is a move to a group that the stream left less than `RETURN_S` ago. If more than `MAX_RETURN_SHARE` of
# the moves of the last `WINDOW_S`, and at least `MIN_RETURNS`, are returns, balancing moves are off for `OFF_S`.

RETURN_S = 10.0
WINDOW_S = 60.0
OFF_S = 60.0
MAX_RETURN_SHARE = 0.01
MIN_RETURNS = 2


class PingPongGuard:
    """Counts moves and returns, by stream and group key."""

    def __init__(self) -> None:
        self.total = 0
        self._moves: deque[tuple[float, bool]] = deque()
        self._left: deque[tuple[float, str, str]] = deque()
        self._by_stream: dict[str, list[str]] = {}
        self._off_until: float | None = None

    def moved(self, stream: str, source: str, target: str, now: float) -> bool:
        """Records a completed move; returns whether it is a return."""
        is_return = target in self.left(stream, now)
        self._left.append((now, stream, source))
        self._by_stream.setdefault(stream, []).append(source)
        self._moves.append((now, is_return))
        self.total += is_return
        self._judge(now)
        return is_return

    def left(self, stream: str, now: float) -> frozenset[str]:
        """Returns the keys of the groups that this stream left less than `RETURN_S` ago."""
        while self._left and now - self._left[0][0] >= RETURN_S:
            _, left_by, _ = self._left.popleft()
            groups = self._by_stream[left_by]
            del groups[0]
            if not groups:
                del self._by_stream[left_by]
        return frozenset(self._by_stream.get(stream, ()))

    def _judge(self, now: float) -> None:
        while self._moves and now - self._moves[0][0] >= WINDOW_S:
            self._moves.popleft()
        returns = sum(is_return for _, is_return in self._moves)
        if returns >= MIN_RETURNS and returns > MAX_RETURN_SHARE * len(self._moves):
            self._off_until = now + OFF_S
            self._moves.clear()

    def is_off(self, now: float) -> bool:
        """Whether balancing moves are off."""
        return self._off_until is not None and now < self._off_until
