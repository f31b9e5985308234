"""What the engine measures, in the process that serves /metrics. What clients see is measured at the door.

Gauges have vLLM's names too: gateways read those.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from phalanx_api import wire
from phalanx_frontend.metrics import Tally

_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class EngineMetrics:
    """Implements `engine.client.Meter`. `tally` has the sums for those who want no histogram."""

    def __init__(self, registry: CollectorRegistry, model_name: str, tally: Tally) -> None:
        self._tally = tally

        def gauges(name: str, what: str) -> list[Gauge]:
            families = [Gauge(f"{prefix}{name}", what, ["model_name"], registry=registry) for prefix in ("phalanx_", "vllm:")]
            return [family.labels(model_name) for family in families]

        def counter(name: str, what: str) -> Counter:
            return Counter(f"phalanx_engine_{name}", what, ["model_name"], registry=registry).labels(model_name)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"phalanx_engine_{name}", what, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model_name)

        self._running = gauges("num_requests_running", "Requests that hold pages.")
        self._waiting = gauges("num_requests_waiting", "Requests that wait for pages or a row.")
        self._usage = gauges("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.")
        self._outstanding = Gauge(
            "phalanx_outstanding_tokens",
            "Tokens not computed yet, and output tokens still allowed.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self._steps = counter("steps", "Steps that brought tokens.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generation_tokens = counter("generation_tokens", "Tokens drawn.")
        self._first_token = histogram("time_to_first_token_seconds", "From submission to the engine to the first token.", _WAIT_S)
        self._per_token = histogram(
            "time_per_output_token_seconds", "Mean time of a request's tokens after its first.", _PER_TOKEN_S
        )

    def load(self, load: wire.Load) -> None:
        """Sets the gauges."""
        for family in self._running:
            family.set(load.running)
        for family in self._waiting:
            family.set(load.waiting)
        for family in self._usage:
            family.set(1 - load.free_pages / load.total_pages if load.total_pages else 0)
        self._outstanding.set(load.outstanding_tokens)

    def step(self, num_tokens: int) -> None:
        """Counts a step's tokens."""
        self._steps.inc()
        self._generation_tokens.inc(num_tokens)

    def first_token(self, prompt_tokens: int, wait_s: float) -> None:
        """Times the first token."""
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token.observe(wait_s)

    def finished(self, reason: wire.FinishReason, tokens_after_first: int, decode_s: float) -> None:
        """Times the others."""
        if tokens_after_first:
            self._per_token.observe(decode_s / tokens_after_first)

    def ended(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int, latency_s: float) -> None:
        """Adds to the sums."""
        self._tally.count(prompt_tokens, cached_tokens, generated_tokens, latency_s)
