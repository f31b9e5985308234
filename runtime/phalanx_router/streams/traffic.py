"""What came to this router and how clients were served, over windows that the operator asks for. Time is an argument.

Sums are kept for each second of the last five minutes, latencies for each ten seconds of the last minute: what a summary holds
costs a few additions per token and is summed up when somebody asks.
"""

from dataclasses import dataclass, field

from phalanx_api.summary import LATENCY_BOUNDS_S, Histogram, Traffic, bucket_of

WINDOWS_S = (6, 60, 300)
LATENCY_WINDOW_S, LATENCY_SLOT_S = 60, 10


@dataclass(slots=True)
class _Second:
    """What happened in one second; `gap`, `gap_squared`: of the times between arrivals."""

    at: int = 0
    arrivals: int = 0
    prompt: float = 0.0
    prompt_squared: float = 0.0
    gaps: int = 0
    gap: float = 0.0
    gap_squared: float = 0.0
    started: int = 0
    missed: float = 0.0
    ended: int = 0
    output: float = 0.0


class _Latencies:
    """A histogram of the last minute, in slots that are forgotten one by one."""

    def __init__(self) -> None:
        self._slots: dict[int, list[int]] = {}

    def add(self, value_s: float, count: int, now: float) -> None:
        number = int(now / LATENCY_SLOT_S)
        slot = self._slots.get(number)
        if slot is None:
            first = number - LATENCY_WINDOW_S // LATENCY_SLOT_S
            self._slots = {n: kept for n, kept in self._slots.items() if n > first}
            slot = self._slots[number] = [0] * (len(LATENCY_BOUNDS_S) + 1)
        slot[bucket_of(value_s)] += count

    def histogram(self, now: float) -> Histogram:
        first = int(now / LATENCY_SLOT_S) - LATENCY_WINDOW_S // LATENCY_SLOT_S
        slots = [slot for number, slot in self._slots.items() if number > first]
        return Histogram([sum(column) for column in zip(*slots, strict=True)])


class TrafficBook:
    """All requests of one router, each through a `Meter` of its own."""

    def __init__(self) -> None:
        self._seconds = [_Second() for _ in range(WINDOWS_S[-1])]
        self._ttft, self._itl = _Latencies(), _Latencies()
        self._last_arrival: float | None = None
        self.last_s: float | None = None
        """When a request last came or ended; None before the first."""

    def begin(self, prompt_tokens: int, now: float) -> "Meter":
        """A request came."""
        second = self._second(now)
        second.arrivals += 1
        second.prompt += prompt_tokens
        second.prompt_squared += prompt_tokens * prompt_tokens
        if self._last_arrival is not None:
            gap_s = now - self._last_arrival
            second.gaps += 1
            second.gap += gap_s
            second.gap_squared += gap_s * gap_s
        self._last_arrival = self.last_s = now
        return Meter(self, prompt_tokens, now)

    def started(self, ttft_s: float, missed_tokens: int, now: float) -> None:
        """Its first tokens came."""
        second = self._second(now)
        second.started += 1
        second.missed += missed_tokens
        self._ttft.add(ttft_s, 1, now)

    def went_on(self, gap_s: float, tokens: int, now: float) -> None:
        """Further tokens came together, so long after those before."""
        self._itl.add(gap_s / tokens, tokens, now)

    def ended(self, output_tokens: int, now: float) -> None:
        """It is over, after so many tokens."""
        second = self._second(now)
        self.last_s = now
        second.ended += 1
        second.output += output_tokens

    def _second(self, now: float) -> _Second:
        at = int(now)
        place = at % len(self._seconds)
        second = self._seconds[place]
        if second.at != at:
            second = self._seconds[place] = _Second(at)
        return second

    def windows(self, now: float) -> list[Traffic]:
        """Each window up to now, in whole seconds: the one that runs is its last."""
        return [self._window(window_s, now) for window_s in WINDOWS_S]

    def _window(self, window_s: int, now: float) -> Traffic:
        seconds = [second for second in self._seconds if int(now) - window_s < second.at <= now]
        arrivals = sum(second.arrivals for second in seconds)
        return Traffic(
            window_s,
            arrivals,
            _mean(sum(second.prompt for second in seconds), arrivals),
            _mean(sum(second.prompt_squared for second in seconds), arrivals),
            _mean(sum(second.missed for second in seconds), sum(second.started for second in seconds)),
            _mean(sum(second.output for second in seconds), sum(second.ended for second in seconds)),
            _scv(seconds),
        )

    def ttft(self, now: float) -> Histogram:
        """Times to the first token in the last minute."""
        return self._ttft.histogram(now)

    def itl(self, now: float) -> Histogram:
        """Times between tokens in the last minute. Tokens that came together share the time since those before."""
        return self._itl.histogram(now)


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0


def _scv(seconds: list[_Second]) -> float:
    """Squared coefficient of variation of the times between arrivals; 1, as of a Poisson process, from fewer than three."""
    count = sum(second.gaps for second in seconds)
    mean = _mean(sum(second.gap for second in seconds), count)
    if count < 3 or mean <= 0:
        return 1.0
    return max(0.0, sum(second.gap_squared for second in seconds) / count / (mean * mean) - 1)


@dataclass(slots=True)
class Meter:
    """One request: tells the book what came when."""

    book: TrafficBook
    prompt_tokens: int
    last: float
    tokens: int = field(default=0)

    def came(self, tokens: int, cached_tokens: int, now: float) -> None:
        """So many tokens came together."""
        if not tokens:
            return
        if self.tokens:
            self.book.went_on(now - self.last, tokens, now)
        else:
            self.book.started(now - self.last, max(0, self.prompt_tokens - cached_tokens), now)
        self.tokens += tokens
        self.last = now

    def end(self, now: float) -> None:
        """It is over, however it ended."""
        self.book.ended(self.tokens, now)
