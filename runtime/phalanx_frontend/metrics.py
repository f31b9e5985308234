"""Metrics of the API server. vLLM's names belong to the engine, so that no request counts twice."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from phalanx_api import wire
from phalanx_api.cache_curve import CacheCurve
from phalanx_frontend.health import HealthTotals
from phalanx_frontend.objectives import ObjectiveCounter
from phalanx_frontend.tls import Certificate
from phalanx_frontend.tracing.tracer import RequestTrace

LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
PER_TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_MODEL = ("model_name",)

Clock = Callable[[], float]


def response_counter(registry: CollectorRegistry, prefix: str) -> Counter:
    """Returns the counter of responses by route."""
    return Counter(f"{prefix}_http_responses", "Responses by route and status.", ("route", "status"), registry=registry)


Purpose = Literal["clients", "internal"]
"""Of a certificate: HTTPS of clients, or mutual TLS between pods."""


class CertificateMetrics:
    """Metrics of a process' certificates, with the names of cert-manager's."""

    def __init__(self, registry: CollectorRegistry, certificates: Mapping[Purpose, Certificate]) -> None:
        name, by_purpose = "phalanx_tls_certificate", ("purpose",)
        ends = Gauge(f"{name}_not_after_timestamp_seconds", "End of the served certificate.", by_purpose, registry=registry)
        starts = Gauge(f"{name}_not_before_timestamp_seconds", "Start of the served certificate.", by_purpose, registry=registry)
        failed = Gauge(f"{name}_reload_failed", "1 while the new certificate is unusable.", by_purpose, registry=registry)
        for purpose, certificate in certificates.items():
            ends.labels(purpose).set_function(partial(_end_of, certificate))
            starts.labels(purpose).set_function(partial(_start_of, certificate))
            failed.labels(purpose).set_function(partial(_failure_of, certificate))


def _end_of(certificate: Certificate) -> float:
    return certificate.current.not_after_s


def _start_of(certificate: Certificate) -> float:
    return certificate.current.not_before_s


def _failure_of(certificate: Certificate) -> float:
    return float(bool(certificate.failure))


class RequestTotals:
    """Sums over ended requests."""

    def __init__(self) -> None:
        self._totals = HealthTotals()

    def count(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int, latency_s: float) -> None:
        """Adds one ended request."""
        now = self._totals
        self._totals = replace(
            now,
            requests=now.requests + 1,
            prompt_tokens=now.prompt_tokens + prompt_tokens,
            cached_tokens=now.cached_tokens + cached_tokens,
            generated_tokens=now.generated_tokens + generated_tokens,
            latency_s=now.latency_s + latency_s,
        )

    def record_speculation(self, drafted: int, accepted: int) -> None:
        """Adds draft tokens, and accepted ones."""
        now = self._totals
        self._totals = replace(now, drafted=now.drafted + drafted, accepted=now.accepted + accepted)

    def record_cache(self, curve: CacheCurve) -> None:
        """Replaces the curve of the prefix cache."""
        self._totals = replace(self._totals, cache_curve=curve)

    def totals(self) -> HealthTotals:
        """Returns the sums since the start."""
        return self._totals


class TenantCounters:
    """Counters by tenant. The first `wire.MAX_TENANTS` have their names, all later ones are `wire.OTHER_TENANTS`.

    Without API keys a client chooses its tenant, so names must be few and short. Without a registry nothing is shown.
    """

    def __init__(self, registry: CollectorRegistry | None, prefix: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}_by_tenant", text, ("tenant", *labels), registry=registry)

        self._names: set[str] = set()
        self._responses = counter("responses", "Responses of the API to the keys of a tenant, by status.", "status")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests of a tenant.")
        self._generation_tokens = counter("generation_tokens", "Tokens that ended requests of a tenant got.")

    def responded(self, tenant: str, status: int) -> None:
        """Counts a response of the API. `tenant`: name of the key; empty for an unknown key."""
        self._responses.labels(self._name(tenant), str(status)).inc()

    def used(self, tenant: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Counts the tokens of an ended request."""
        name = self._name(tenant)
        self._prompt_tokens.labels(name).inc(prompt_tokens)
        self._generation_tokens.labels(name).inc(generation_tokens)

    def _name(self, tenant: str) -> str:
        name = tenant[: wire.MAX_TENANT_NAME]
        if name and name not in self._names:
            if len(self._names) >= wire.MAX_TENANTS:
                return wire.OTHER_TENANTS
            self._names.add(name)
        return name


class ApiMetrics:
    """Metric families of the API server."""

    def __init__(
        self,
        registry: CollectorRegistry,
        responses: Counter,
        prefix: str,
        objectives: ObjectiveCounter,
        *,
        has_tenants: bool = False,
    ) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{prefix}_{name}", text, _MODEL, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", text, (*_MODEL, *labels), registry=registry)

        self.e2e = histogram("request_duration_seconds", "Time from arrival to the end of a request.", LATENCY_S)
        self.first_token = histogram("time_to_first_token_seconds", "Time from arrival to the first token.", FIRST_TOKEN_S)
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Time between two tokens as the API server receives them.", PER_TOKEN_S
        )
        self.per_output_token = histogram(
            "time_per_output_token_seconds", "Mean time per token of a request after its first token.", PER_TOKEN_S
        )
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.request_generation = histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self.request_max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in a prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.finished = counter("requests_finished", "Ended requests by finish reason.", "finished_reason")
        self.in_progress = Gauge(f"{prefix}_requests_in_progress", "Requests between arrival and end.", _MODEL, registry=registry)
        self.responses = responses
        self.objectives = objectives
        self.tenants = TenantCounters(registry if has_tenants else None, prefix)
        self.request_totals = RequestTotals()
        self._of_models: list[MetricWrapperBase] = [self.e2e, self.first_token, self.inter_token, self.per_output_token]
        self._of_models += [self.request_prompt, self.request_generation, self.request_max_tokens, self.in_progress]
        self._of_models += [self.prompt_tokens, self.cached_tokens, self.generation_tokens, self.finished]
        self.open_meters: dict[str, int] = {}  # by each model with series

    def retain_models(self, names: Collection[str]) -> None:
        """Removes the series of other models without requests: adapters come and go, and each may have another name."""
        for name in [name for name, count in self.open_meters.items() if not count and name not in names]:
            del self.open_meters[name]
            for family in self._of_models:
                family.remove_by_labels({"model_name": name})

    def meter(
        self,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
        arrived_s: float,
        clock: Clock,
        *,
        tenant: str,
        trace: RequestTrace | None = None,
    ) -> "RequestMeter":
        """Returns the meter of an accepted request. A trace that is exported becomes the exemplar of its latencies."""
        return RequestMeter(
            self, model, num_prompt_tokens, max_tokens, arrived_s=arrived_s, clock=clock, tenant=tenant, trace=trace
        )


class RequestMeter:
    """Times and counts of one request."""

    def __init__(
        self,
        metrics: ApiMetrics,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        arrived_s: float,
        clock: Clock,
        tenant: str,
        trace: RequestTrace | None,
    ) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._trace = trace
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._arrived_s = arrived_s
        self._clock = clock
        self._inter_token: Histogram
        self._generated: Counter
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._num_tokens = 0
        self._is_stored = False

    def start(self) -> None:
        """Counts the request as in progress."""
        metrics, model = self._metrics, self._model
        metrics.open_meters[model] = metrics.open_meters.get(model, 0) + 1
        self._inter_token, self._generated = metrics.inter_token.labels(model), metrics.generation_tokens.labels(model)
        metrics.in_progress.labels(model).inc()
        metrics.prompt_tokens.labels(model).inc(self._num_prompt_tokens)
        metrics.request_prompt.labels(model).observe(self._num_prompt_tokens)
        metrics.request_max_tokens.labels(model).observe(self._max_tokens)

    def tokens(self, count: int, *, is_stored: bool = False) -> None:
        """Records tokens that arrived together. `is_stored`: those of a stored response, between which no time passes."""
        self._is_stored = is_stored
        now_s, trace = self._clock(), self._trace
        exemplar = None if trace is None else trace.exemplar
        if self._first_s is None:
            self._first_s = now_s
            if trace is not None:
                trace.first_token(now_s - self._arrived_s)
            self._metrics.first_token.labels(self._model).observe(now_s - self._arrived_s, exemplar)
            self._metrics.objectives.first_token(now_s - self._arrived_s)
            gaps = 0  # the first tokens arrived together, so there was no time between them
        else:
            gaps = 0 if is_stored else count
        # They share the time since the previous tokens.
        gap_s = (now_s - self._last_s) / count
        for _ in range(gaps):
            self._inter_token.observe(gap_s, exemplar)
        self._metrics.objectives.gaps(gap_s, gaps)
        self._generated.inc(count)
        self._last_s = now_s
        self._num_tokens += count

    def end(self, reason: str, cached_tokens: int) -> None:
        """Records the end. `reason`: stop, length, abort or error."""
        metrics, model, now_s = self._metrics, self._model, self._clock()
        metrics.open_meters[model] -= 1
        metrics.request_totals.count(self._num_prompt_tokens, cached_tokens, self._num_tokens, now_s - self._arrived_s)
        metrics.in_progress.labels(model).dec()
        metrics.finished.labels(model, reason).inc()
        if reason == "abort" and self._first_s is None and self._max_tokens:
            metrics.objectives.left_without_token(now_s - self._arrived_s)
        metrics.e2e.labels(model).observe(now_s - self._arrived_s)
        metrics.tenants.used(self._tenant, self._num_prompt_tokens, self._num_tokens)
        metrics.cached_tokens.labels(model).inc(cached_tokens)
        metrics.request_generation.labels(model).observe(self._num_tokens)
        if self._first_s is not None and self._num_tokens > 1 and not self._is_stored:
            metrics.per_output_token.labels(model).observe((self._last_s - self._first_s) / (self._num_tokens - 1))
