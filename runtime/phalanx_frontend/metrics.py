"""What the door measures, in the caller's registry, under the caller's prefix: requests as this door's clients see them.

vLLM's names are the engine's alone (`phalanx_runtime.server.http.metrics`), so that no sum over a service counts a request twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from phalanx_frontend.health import Totals

LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
PER_TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_MODEL = ("model_name",)

Clock = Callable[[], float]


def response_counter(registry: CollectorRegistry, prefix: str) -> Counter:
    """Counts responses of the door by route and status; unknown paths share one route."""
    return Counter(f"{prefix}_http_responses", "Responses by route and status.", ("route", "status"), registry=registry)


class Tally:
    """Sums over requests that ended, for those who want no histogram."""

    def __init__(self) -> None:
        self._totals = Totals()

    def count(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int, latency_s: float) -> None:
        """One request ended."""
        now = self._totals
        self._totals = replace(
            now,
            requests=now.requests + 1,
            prompt_tokens=now.prompt_tokens + prompt_tokens,
            cached_tokens=now.cached_tokens + cached_tokens,
            generated_tokens=now.generated_tokens + generated_tokens,
            latency_s=now.latency_s + latency_s,
        )

    def speculated(self, proposed: int, accepted: int) -> None:
        """So many tokens more were proposed, and so many of these were drawn too."""
        now = self._totals
        self._totals = replace(now, proposed=now.proposed + proposed, accepted=now.accepted + accepted)

    def totals(self) -> Totals:
        """The sums so far."""
        return self._totals


class DoorMetrics:
    """The families, and a meter for each request."""

    def __init__(self, registry: CollectorRegistry, responses: Counter, prefix: str) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{prefix}_{name}", text, _MODEL, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", text, (*_MODEL, *labels), registry=registry)

        self.e2e = histogram("request_duration_seconds", "From arrival to the end.", LATENCY_S)
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S)
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens, at the door.", PER_TOKEN_S)
        self.per_output_token = histogram(
            "time_per_output_token_seconds", "A request's time after its first token, over the tokens after it.", PER_TOKEN_S
        )
        self.request_prompt = histogram("request_prompt_tokens", "Prompt of a request.", TOKENS)
        self.request_generation = histogram("request_generation_tokens", "Output of a request.", TOKENS)
        self.request_max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = counter("prompt_tokens_cached", "Those found in a prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.finished = counter("requests_finished", "Requests by how they ended.", "finished_reason")
        self.in_progress = Gauge(f"{prefix}_requests_in_progress", "Requests between arrival and end.", _MODEL, registry=registry)
        self.responses = responses
        self.tally = Tally()

    def meter(self, model: str, num_prompt_tokens: int, max_tokens: int, arrived_s: float, clock: Clock) -> "RequestMeter":
        """A meter for one request that was accepted."""
        self.in_progress.labels(model).inc()
        self.prompt_tokens.labels(model).inc(num_prompt_tokens)
        self.request_prompt.labels(model).observe(num_prompt_tokens)
        self.request_max_tokens.labels(model).observe(max_tokens)
        return RequestMeter(self, model, num_prompt_tokens, arrived_s, clock)


class RequestMeter:
    """Times and counts of one request. `end` is called once, whatever happened."""

    def __init__(self, metrics: DoorMetrics, model: str, num_prompt_tokens: int, arrived_s: float, clock: Clock) -> None:
        self._metrics = metrics
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived_s = arrived_s
        self._clock = clock
        self._inter_token = metrics.inter_token.labels(model)
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        """So many tokens came, together."""
        now_s = self._clock()
        if self._first_s is None:
            self._first_s = now_s
            self._metrics.first_token.labels(self._model).observe(now_s - self._arrived_s)
            gaps = count - 1
        else:
            gaps = count
        # Tokens that came together share the time since those before them.
        for _ in range(gaps):
            self._inter_token.observe((now_s - self._last_s) / count)
        self._last_s = now_s
        self._num_tokens += count

    def end(self, reason: str, cached_tokens: int) -> None:
        """The request is over: stop, length, abort (the client left) or error."""
        metrics, model, now_s = self._metrics, self._model, self._clock()
        metrics.tally.count(self._num_prompt_tokens, cached_tokens, self._num_tokens, now_s - self._arrived_s)
        metrics.in_progress.labels(model).dec()
        metrics.finished.labels(model, reason).inc()
        metrics.e2e.labels(model).observe(now_s - self._arrived_s)
        metrics.generation_tokens.labels(model).inc(self._num_tokens)
        metrics.cached_tokens.labels(model).inc(cached_tokens)
        metrics.request_generation.labels(model).observe(self._num_tokens)
        if self._first_s is not None and self._num_tokens > 1:
            metrics.per_output_token.labels(model).observe((self._last_s - self._first_s) / (self._num_tokens - 1))
