"""What the door measures, in the caller's registry: each family under our name and, for gateways and dashboards, under vLLM's.

A family is counted once; the second name is made when somebody reads it.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from phalanx_frontend.vitals import Totals

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_PER_TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_MODEL = ("model_name",)

Clock = Callable[[], float]


class Alias(Collector):
    """A family again, under another name."""

    def __init__(self, source: MetricWrapperBase, old: str, new: str) -> None:
        self._source = source
        self._old = old
        self._new = new

    def collect(self) -> Iterator[Metric]:
        """The family's samples as they are now, renamed."""
        for family in self._source.collect():
            renamed = Metric(self._new, family.documentation, family.type)
            renamed.samples = [self._renamed(sample) for sample in family.samples]
            yield renamed

    def _renamed(self, sample: Sample) -> Sample:
        return sample._replace(name=self._new + sample.name.removeprefix(self._old))


def response_counter(registry: CollectorRegistry) -> Counter:
    """Counts responses of the door by route and status; unknown paths share one route."""
    return Counter("phalanx_http_responses", "Responses by route and status.", ("route", "status"), registry=registry)


class Tally:
    """Sums over requests that ended, for those who want no histogram."""

    def __init__(self) -> None:
        self._totals = Totals()

    def count(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int, latency_s: float) -> None:
        """One request ended."""
        now = self._totals
        self._totals = Totals(
            now.requests + 1,
            now.prompt_tokens + prompt_tokens,
            now.cached_tokens + cached_tokens,
            now.generated_tokens + generated_tokens,
            now.latency_s + latency_s,
        )

    def totals(self) -> Totals:
        """The sums so far."""
        return self._totals


class DoorMetrics:
    """The families, and a meter for each request."""

    def __init__(self, registry: CollectorRegistry, responses: Counter) -> None:
        self._registry = registry
        self.e2e = self._histogram(
            "request_duration_seconds", "e2e_request_latency_seconds", "From arrival to the end.", _LATENCY_S
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "inter_token_latency_seconds", "Between two tokens, at the door.", _PER_TOKEN_S
        )
        self.per_output_token = self._histogram(
            "time_per_output_token_seconds",
            "request_time_per_output_token_seconds",
            "A request's time after its first token, over the tokens after it.",
            _PER_TOKEN_S,
        )
        self.request_prompt = self._histogram("request_prompt_tokens", "request_prompt_tokens", "Prompt of a request.", _TOKENS)
        self.request_generation = self._histogram(
            "request_generation_tokens", "request_generation_tokens", "Output of a request.", _TOKENS
        )
        self.request_max_tokens = self._histogram(
            "request_params_max_tokens", "request_params_max_tokens", "max_tokens of a request.", _TOKENS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "prompt_tokens", "Prompt tokens of answered requests.", _MODEL)
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "prompt_tokens_cached", "Those found in a prefix cache.", _MODEL
        )
        self.generation_tokens = self._counter("generation_tokens", "generation_tokens", "Tokens generated.", _MODEL)
        self.finished = self._counter(
            "requests_finished", "request_success", "Requests by how they ended.", (*_MODEL, "finished_reason")
        )
        self.in_progress = Gauge("phalanx_requests_in_progress", "Requests between arrival and end.", _MODEL, registry=registry)
        self.responses = responses
        self.tally = Tally()

    def meter(self, model: str, num_prompt_tokens: int, max_tokens: int, arrived_s: float, clock: Clock) -> "RequestMeter":
        """A meter for one request that was accepted."""
        self.in_progress.labels(model).inc()
        self.prompt_tokens.labels(model).inc(num_prompt_tokens)
        self.request_prompt.labels(model).observe(num_prompt_tokens)
        self.request_max_tokens.labels(model).observe(max_tokens)
        return RequestMeter(self, model, num_prompt_tokens, arrived_s, clock)

    def _histogram(self, name: str, alias: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"phalanx_{name}", text, _MODEL, buckets=buckets, registry=self._registry)
        self._registry.register(Alias(family, f"phalanx_{name}", f"vllm:{alias}"))
        return family

    def _counter(self, name: str, alias: str, text: str, labels: tuple[str, ...]) -> Counter:
        family = Counter(f"phalanx_{name}", text, labels, registry=self._registry)
        self._registry.register(Alias(family, f"phalanx_{name}", f"vllm:{alias}"))
        return family


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
