"""The guard against attraction: a group that just gave requests away does not look free at once.

For 2 s what left is added to the group again when a newcomer's cost is reckoned, less and less. Without it a group that was
relieved draws new prompts, becomes hot again, and gives more away (balancing.md 3.4).
"""

from collections import deque
from dataclasses import dataclass, replace

from phalanx_router.balancing.projection import pages_of
from phalanx_router.routing.view import GroupView

FADES_S = 2.0


@dataclass(frozen=True, slots=True)
class _Gone:
    context: int
    at: float


class AttractionGuard:
    """What left each group (by key) lately."""

    def __init__(self) -> None:
        self._gone: dict[str, list[_Gone]] = {}

    def left(self, key: str, context: int, now: float) -> None:
        """Notes a request that has left this group."""
        self._gone.setdefault(key, []).append(_Gone(context, now))

    def burdened(self, view: GroupView, now: float) -> GroupView:
        """The group as it should look to newcomers."""
        gone = self._gone.get(view.key)
        if gone is None:
            return view
        gone = self._gone[view.key] = [entry for entry in gone if now - entry.at < FADES_S]
        if not gone:
            del self._gone[view.key]
            return view
        shares = [1 - max(0.0, now - entry.at) / FADES_S for entry in gone]
        context = round(sum(share * entry.context for share, entry in zip(shares, gone, strict=True)))
        return replace(
            view,
            running=view.running + round(sum(shares)),
            context_tokens=view.context_tokens + context,
            used_pages=view.used_pages + pages_of(context, view),
        )


# The alarm for requests that go back and forth: a return to a group that was left less than 10 s ago.
# More than 1 % of the last minute's moves (and more than one of them) turn balancing moves off for a minute.

RETURN_S = 10.0
WINDOW_S = 60.0
OFF_S = 60.0
SHARE = 0.01
AT_LEAST = 2


class PingPong:
    """Counts moves and returns, by streams and keys of groups."""

    def __init__(self) -> None:
        self.total = 0
        self._moves: deque[tuple[float, bool]] = deque()
        self._left: deque[tuple[float, str, str]] = deque()
        self._by_stream: dict[str, list[str]] = {}
        self._off_until: float | None = None

    def moved(self, stream: str, source: str, target: str, now: float) -> bool:
        """Notes a move that happened; whether it is a return."""
        is_return = target in self.left(stream, now)
        self._left.append((now, stream, source))
        self._by_stream.setdefault(stream, []).append(source)
        self._moves.append((now, is_return))
        self.total += is_return
        self._judge(now)
        return is_return

    def left(self, stream: str, now: float) -> frozenset[str]:
        """The groups that this stream left less than 10 s ago."""
        while self._left and now - self._left[0][0] >= RETURN_S:
            _, who, _ = self._left.popleft()
            groups = self._by_stream[who]
            del groups[0]
            if not groups:
                del self._by_stream[who]
        return frozenset(self._by_stream.get(stream, ()))

    def _judge(self, now: float) -> None:
        while self._moves and now - self._moves[0][0] >= WINDOW_S:
            self._moves.popleft()
        returns = sum(is_return for _, is_return in self._moves)
        if returns >= AT_LEAST and returns > SHARE * len(self._moves):
            self._off_until = now + OFF_S
            self._moves.clear()

    def is_off(self, now: float) -> bool:
        """Whether balancing moves are off."""
        return self._off_until is not None and now < self._off_until
