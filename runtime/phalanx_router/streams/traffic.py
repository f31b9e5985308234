"""Traffic statistics: arrivals, token counts, latencies.

Sums are stored per second of the last five minutes and latencies per ten seconds of the last minute, so a token costs a few
additions.
"""

from dataclasses import dataclass, field

from phalanx_api.summary import LATENCY_BOUNDS_S, Histogram, Traffic, bucket_index

WINDOWS_S = (6, 60, 300)
LATENCY_WINDOW_S, LATENCY_SLOT_S = 60, 10


@dataclass(slots=True, kw_only=True)
class _SecondSums:
    at: int = 0
    arrivals: int = 0
    prompt: float = 0.0
    prompt_squared: float = 0.0
    gaps: int = 0
    interarrival_s: float = 0.0
    interarrival_squared_s: float = 0.0
    started: int = 0
    missed: float = 0.0
    ended: int = 0
    output: float = 0.0


class _Latencies:
    def __init__(self) -> None:
        self._slots: dict[int, list[int]] = {}

    def add(self, value_s: float, count: int, now: float) -> None:
        number = int(now / LATENCY_SLOT_S)
        slot = self._slots.get(number)
        if slot is None:
            first = number - LATENCY_WINDOW_S // LATENCY_SLOT_S
            self._slots = {n: kept for n, kept in self._slots.items() if n > first}
            slot = self._slots[number] = [0] * (len(LATENCY_BOUNDS_S) + 1)
        slot[bucket_index(value_s)] += count

    def histogram(self, now: float) -> Histogram:
        first = int(now / LATENCY_SLOT_S) - LATENCY_WINDOW_S // LATENCY_SLOT_S
        slots = [slot for number, slot in self._slots.items() if number > first]
        return Histogram([sum(column) for column in zip(*slots, strict=True)])


class TrafficStats:
    """Statistics of all requests of one router."""

    def __init__(self) -> None:
        self._seconds = [_SecondSums() for _ in range(WINDOWS_S[-1])]
        self._last_second = 0
        self._ttft, self._itl, self._wait = _Latencies(), _Latencies(), _Latencies()
        self._last_arrival: float | None = None
        self.last_active_at: float | None = None  # last arrival or end of a request

    def start_request(self, prompt_tokens: int, now: float) -> "RequestMeter":
        """Records an arrival."""
        second = self._second(now)
        second.arrivals += 1
        second.prompt += prompt_tokens
        second.prompt_squared += prompt_tokens * prompt_tokens
        if self._last_arrival is not None:
            gap_s = now - self._last_arrival
            second.gaps += 1
            second.interarrival_s += gap_s
            second.interarrival_squared_s += gap_s * gap_s
        self._last_arrival = self.last_active_at = now
        return RequestMeter(self, prompt_tokens, now)

    def record_first_tokens(self, ttft_s: float, missed_tokens: int, now: float) -> None:
        """Records the first tokens of a request."""
        second = self._second(now)
        second.started += 1
        second.missed += missed_tokens
        self._ttft.add(ttft_s, 1, now)

    def record_wait(self, wait_s: float, now: float) -> None:
        """Records the dispatch of a new request."""
        self._wait.add(wait_s, 1, now)

    def record_gap(self, gap_s: float, tokens: int, now: float) -> None:
        """Records tokens that arrived `gap_s` after the previous ones."""
        self._itl.add(gap_s / tokens, tokens, now)

    def record_end(self, output_tokens: int, now: float) -> None:
        """Records the end of a request."""
        second = self._second(now)
        self.last_active_at = now
        second.ended += 1
        second.output += output_tokens

    def _second(self, now: float) -> _SecondSums:
        at = int(now)
        slot = at % len(self._seconds)
        second = self._seconds[slot]
        if second.at != at:
            second = self._seconds[slot] = _SecondSums(at=at)
            self._last_second = at
        return second

    def windows(self, now: float) -> list[Traffic]:
        """Each window up to now."""
        first = int(now) - WINDOWS_S[-1]
        recent = [second for second in self._seconds if first < second.at <= now] if first < self._last_second else []
        return [self._window(window_s, recent, now) for window_s in WINDOWS_S]

    def _window(self, window_s: int, recent: list[_SecondSums], now: float) -> Traffic:
        seconds = [second for second in recent if int(now) - window_s < second.at]
        arrivals = sum(second.arrivals for second in seconds)
        return Traffic(
            window_s=window_s,
            arrivals=arrivals,
            prompt=_mean(sum(second.prompt for second in seconds), arrivals),
            prompt_squared=_mean(sum(second.prompt_squared for second in seconds), arrivals),
            missed=_mean(sum(second.missed for second in seconds), sum(second.started for second in seconds)),
            output=_mean(sum(second.output for second in seconds), sum(second.ended for second in seconds)),
            scv=_scv(seconds),
            output_tokens=sum(second.output for second in seconds),
        )

    def ttft(self, now: float) -> Histogram:
        """Times to first token of the last minute."""
        return self._ttft.histogram(now)

    def itl(self, now: float) -> Histogram:
        """Inter-token times of the last minute."""
        return self._itl.histogram(now)

    def wait(self, now: float) -> Histogram:
        """Times from arrival to dispatch of the last minute."""
        return self._wait.histogram(now)


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0


def _scv(seconds: list[_SecondSums]) -> float:
    """Squared coefficient of variation of the interarrival times."""
    count = sum(second.gaps for second in seconds)
    mean = _mean(sum(second.interarrival_s for second in seconds), count)
    if count < 3 or mean <= 0:
        return 1.0
    return max(0.0, sum(second.interarrival_squared_s for second in seconds) / count / (mean * mean) - 1)


@dataclass(slots=True)
class RequestMeter:
    """Records the tokens of one request."""

    stats: TrafficStats
    prompt_tokens: int
    last: float
    tokens: int = field(default=0)

    def record(self, tokens: int, cached_tokens: int, now: float) -> None:
        """Records tokens that arrived together."""
        if not tokens:
            return
        if self.tokens:
            self.stats.record_gap(now - self.last, tokens, now)
        else:
            self.stats.record_first_tokens(now - self.last, max(0, self.prompt_tokens - cached_tokens), now)
        self.tokens += tokens
        self.last = now

    def dispatch(self, wait_s: float, now: float) -> None:
        """Records the dispatch of the request, `wait_s` after its arrival."""
        self.stats.record_wait(wait_s, now)

    def end(self, now: float) -> None:
        """Records the end of the request."""
        self.stats.record_end(self.tokens, now)
