"""Guards against oscillation: attraction guard and ping-pong alarm."""

from collections import deque
from dataclasses import dataclass

from phalanx_router.routing.view import GroupView

FADE_S = 2.0


@dataclass(frozen=True, slots=True)
class _DepartedStream:
    context: int
    left_at: float


def _fading(streams: list[_DepartedStream], now: float) -> list[_DepartedStream]:
    return [stream for stream in streams if now - stream.left_at < FADE_S]


class AttractionGuard:
    """Adds a linearly falling share of the load of departed requests to their group, for `FADE_S`.

    Otherwise a relieved group attracts new prompts and becomes hot again.
    """

    def __init__(self) -> None:
        self._departed: dict[str, list[_DepartedStream]] = {}
        self._pruned_at = 0.0

    def __len__(self) -> int:
        """Number of groups with recorded departures."""
        return len(self._departed)

    def record_departure(self, key: str, context: int, now: float) -> None:
        """Records that a request left this group."""
        if now - self._pruned_at >= FADE_S:  # no caller reads the view of a deleted group
            self._departed = {key: recent for key, streams in self._departed.items() if (recent := _fading(streams, now))}
            self._pruned_at = now
        self._departed.setdefault(key, []).append(_DepartedStream(context, now))

    def with_departed_load(self, view: GroupView, now: float) -> GroupView:
        """The group with the load that routing assumes."""
        departed = self._departed.get(view.key)
        if departed is None:
            return view
        departed = self._departed[view.key] = _fading(departed, now)
        if not departed:
            del self._departed[view.key]
            return view
        shares = [1 - max(0.0, now - stream.left_at) / FADE_S for stream in departed]
        context = round(sum(share * stream.context for share, stream in zip(shares, departed, strict=True)))
        return view.plus(round(sum(shares)), context, view.pages_of(context))


RETURN_S = 10.0
WINDOW_S = 60.0
PAUSE_S = 60.0
MAX_RETURN_SHARE = 0.01
MIN_RETURNS = 2


class PingPongGuard:
    """Counts returns: moves to a group that the stream left less than `RETURN_S` ago.

    Balancing moves pause when more than `MAX_RETURN_SHARE` of the moves of `WINDOW_S`, and at least `MIN_RETURNS`, are returns.
    """

    def __init__(self) -> None:
        self.num_returns = 0
        self._moves: deque[tuple[float, bool]] = deque()  # time, whether a return
        self._departures: deque[tuple[float, str, str]] = deque()  # time, stream, source
        self._sources: dict[str, list[str]] = {}  # by stream, oldest first
        self._paused_until: float | None = None

    def record_move(self, stream: str, source: str, target: str, now: float) -> bool:
        """Records a completed move; returns whether it is a return."""
        is_return = target in self.recent_sources(stream, now)
        self._departures.append((now, stream, source))
        self._sources.setdefault(stream, []).append(source)
        self._moves.append((now, is_return))
        self.num_returns += is_return
        self._check(now)
        return is_return

    def recent_sources(self, stream: str, now: float) -> frozenset[str]:
        """Keys of the groups that this stream left recently."""
        while self._departures and now - self._departures[0][0] >= RETURN_S:
            _, expired, _ = self._departures.popleft()
            sources = self._sources[expired]
            del sources[0]
            if not sources:
                del self._sources[expired]
        return frozenset(self._sources.get(stream, ()))

    def _check(self, now: float) -> None:
        while self._moves and now - self._moves[0][0] >= WINDOW_S:
            self._moves.popleft()
        returns = sum(is_return for _, is_return in self._moves)
        if returns >= MIN_RETURNS and returns > MAX_RETURN_SHARE * len(self._moves):
            self._paused_until = now + PAUSE_S
            self._moves.clear()

    def is_paused(self, now: float) -> bool:
        """Whether balancing moves are paused."""
        return self._paused_until is not None and now < self._paused_until
