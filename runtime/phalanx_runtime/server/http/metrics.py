"""What the engine measures, in the process that serves /metrics: all its requests, whichever door or link brought them.

The names are vLLM's, which gateways and dashboards read, and only the runtime has them: over the pods of a service every
request is counted once. What the door's own clients see is measured at the door.
"""

import math
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from phalanx_api import wire
from phalanx_api.speculation import SpeculationCounts
from phalanx_frontend.metrics import FIRST_TOKEN_S, LATENCY_S, PER_TOKEN_S, TOKENS, Tally
from phalanx_runtime.engine.client import NO_LOAD
from phalanx_runtime.engine.meter import Ended

# What /metrics shows of speculation: under vLLM's names what it shows too, and beside them what it costs and saves.

NOTHING = SpeculationCounts()


class SpeculationMetrics:
    """Counters that follow the engine's, which count from 0 with each engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, ["model_name", *labels], registry=registry)

        self._model_name = model_name
        self._counts = NOTHING
        self._plain = {
            "paths": counter("vllm:spec_decode_num_drafts", "Requests for which tokens were proposed, in each step."),
            "saved": counter("phalanx_speculation_saved_tokens", "Tokens told beyond one for each request and step."),
            "branched": counter(
                "phalanx_speculation_branched_tokens", "Accepted tokens that were not the first ones for a place."
            ),
            "draft_s": counter("phalanx_speculation_draft_seconds", "Time of the ranks in drafts."),
            "verify_s": counter("phalanx_speculation_verify_seconds", "Time of steps beyond what they take without proposals."),
        }
        self._proposed = counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Of those the ones that were drawn too.")
        self._proposed_at = counter(
            "phalanx_speculation_proposed_tokens", "Tokens proposed, by their place in a path.", "position"
        )
        self._accepted_at = counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Those that were drawn too.", "position")
        self._depth = Gauge(
            "phalanx_speculation_depth", "Tokens proposed for a request, of late.", ["model_name"], registry=registry
        ).labels(model_name)
        self._lost = Gauge(
            "phalanx_speculation_lost", "1 when the ranks can draft no more.", ["model_name"], registry=registry
        ).labels(model_name)
        for plain in (*self._plain.values(), self._proposed, self._accepted):
            plain.labels(model_name)

    def follow(self, counts: SpeculationCounts) -> tuple[int, int]:
        """Adds what was counted since the last report, and gives back how many tokens were proposed since, and accepted."""
        before = self._counts if counts.paths >= self._counts.paths else NOTHING
        self._counts = counts
        name = self._model_name
        for field, family in self._plain.items():
            family.labels(name).inc(max(0, getattr(counts, field) - getattr(before, field)))
        proposed = _added(self._proposed_at, name, before.proposed, counts.proposed)
        self._proposed.labels(name).inc(proposed)
        accepted = _added(self._accepted_at, name, before.accepted, counts.accepted)
        self._accepted.labels(name).inc(accepted)
        paths = counts.paths - before.paths
        self._depth.set(proposed / paths if paths else 0.0)
        self._lost.set(bool(counts.lost))
        return proposed, accepted


def _added(family: Counter, name: str, before: list[int], now: list[int]) -> int:
    """Counts each position's part, and gives back their sum."""
    added = 0
    for position, count in enumerate(now):
        more = max(0, count - (before[position] if position < len(before) else 0))
        family.labels(name, str(position)).inc(more)
        added += more
    return added


_QUEUE_S = (0.001, 0.005, *LATENCY_S)
_SHOWN = {
    "outstanding_tokens": ("outstanding_tokens", "Tokens not computed yet, and output tokens still allowed."),
    "waiting_prompt_tokens": ("waiting_prompt_tokens", "Prompt tokens to compute of requests that wait, less what is cached."),
    "running_prompt_tokens": ("running_prompt_tokens", "Prompt tokens to compute of requests that run."),
    "context_tokens": ("context_tokens", "Tokens in the pages of running requests."),
    "cached_pages": ("cached_pages", "Free pages that the prefix cache finds."),
    "reserved_pages": ("reserved_pages", "Pages held for requests that are being moved here."),
    "oldest_wait_s": ("oldest_wait_seconds", "How long the request has waited that has waited longest."),
    "step_s": ("step_seconds", "Time of a step, over about the last twenty."),
    "prompt_tokens_per_step": ("prompt_tokens_per_step", "Prompt tokens in a step, over about the last twenty."),
}
"""Fields of a load report as gauges."""


class EngineMetrics:
    """Implements `engine.client.Meter`. `tally` gets the sums for /v1/metrics."""

    def __init__(self, registry: CollectorRegistry, model_name: str, tally: Tally) -> None:
        def gauges(name: str, what: str) -> list[Gauge]:
            families = [Gauge(f"{prefix}{name}", what, ["model_name"], registry=registry) for prefix in ("phalanx_", "vllm:")]
            return [family.labels(model_name) for family in families]

        def counter(name: str, what: str) -> Counter:
            return Counter(name, what, ["model_name"], registry=registry).labels(model_name)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", what, ["model_name"], buckets=buckets, registry=registry).labels(model_name)

        self._tally = tally
        self._model_name = model_name
        self._running = gauges("num_requests_running", "Requests that hold pages.")
        self._waiting = gauges("num_requests_waiting", "Requests that wait for pages or a row.")
        self._usage = gauges("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.")
        self._shown = {
            field: Gauge(f"phalanx_{name}", what, ["model_name"], registry=registry).labels(model_name)
            for field, (name, what) in _SHOWN.items()
        }
        self._told = {
            "preemptions": counter("vllm:num_preemptions", "Requests that lost their pages and were computed anew."),
            "prefix_queried_tokens": counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
            "prefix_hit_tokens": counter("vllm:prefix_cache_hits", "Prompt tokens found there."),
            "pages_reused": counter("phalanx_pages_reused", "Pages taken out of the prefix cache again."),
            "pages_evicted": counter("phalanx_pages_evicted", "Pages that the prefix cache gave up."),
            "refused_copies": counter("phalanx_refused_copies", "Connections turned away where ranks take pages in."),
            "refusals": counter("phalanx_requests_refused", "Requests that found the queue full."),
            "recomputed_tokens": counter("phalanx_recomputed_tokens", "Tokens computed again after preemptions."),
            "leaks": counter("phalanx_page_leaks", "Pages and rows that were not accounted for when the engine was idle."),
        }
        self._steps_to_full = Gauge(
            "phalanx_steps_to_full",
            "Steps of a token for each request until no page is free, as they should end; infinite when one always will be.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self._load = NO_LOAD
        self._speculation = SpeculationMetrics(registry, model_name)
        self._steps = counter("phalanx_engine_steps", "Steps that brought tokens.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens drawn.")
        self._finished = Counter(
            "vllm:request_success", "Requests by how they ended.", ["model_name", "finished_reason"], registry=registry
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From a request's arrival in the engine to its first step.", _QUEUE_S
        )
        self._first_token = histogram(
            "time_to_first_token_seconds", "From submission to the engine to the first token.", FIRST_TOKEN_S
        )
        self._inter_token = histogram("inter_token_latency_seconds", "Between two tokens of a request.", PER_TOKEN_S)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens after its first.", PER_TOKEN_S
        )
        self._latency = histogram("e2e_request_latency_seconds", "From submission to the engine to the end.", LATENCY_S)
        self._decode = histogram("request_decode_time_seconds", "From a request's first token to its last.", LATENCY_S)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt of a request.", TOKENS)
        self._request_generation = histogram("request_generation_tokens", "Output of a request.", TOKENS)
        self._request_max = histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)

    def load(self, load: wire.Load) -> None:
        """Sets the gauges, and adds to the counters what was counted since the last report. A new engine counts from 0."""
        for name, count in self._told.items():
            before, now = getattr(self._load, name), getattr(load, name)
            count.inc(now - before if now >= before else now)
        self._load = load
        self._tally.speculated(*self._speculation.follow(load.speculation))
        for family in self._running:
            family.set(load.running)
        for family in self._waiting:
            family.set(load.waiting)
        for family in self._usage:
            family.set(1 - load.free_pages / load.total_pages if load.total_pages else 0)
        for field, gauge in self._shown.items():
            gauge.set(getattr(load, field))
        self._steps_to_full.set(math.inf if load.steps_to_full is None else load.steps_to_full)

    def step(self, num_tokens: int) -> None:
        """Counts a step's tokens."""
        self._steps.inc()
        self._generation_tokens.inc(num_tokens)

    def queued(self, wait_s: float) -> None:
        """Times the queue."""
        self._queue.observe(wait_s)

    def first_token(self, prompt_tokens: int, wait_s: float) -> None:
        """Times the first token."""
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token.observe(wait_s)

    def next_token(self, gap_s: float) -> None:
        """Times another token."""
        self._inter_token.observe(gap_s)

    def ended(self, end: Ended) -> None:
        """Counts a request that is over."""
        self._tally.count(end.prompt_tokens, end.cached_tokens, end.generated_tokens, end.latency_s)
        self._finished.labels(self._model_name, end.reason).inc()
        self._cached_tokens.inc(end.cached_tokens)
        self._latency.observe(end.latency_s)
        self._request_prompt.observe(end.prompt_tokens)
        self._request_generation.observe(end.generated_tokens)
        self._request_max.observe(end.max_tokens)
        if end.generated_tokens > 1:
            self._decode.observe(end.decode_s)
            self._per_token.observe(end.decode_s / (end.generated_tokens - 1))
