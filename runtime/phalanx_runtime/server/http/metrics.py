"""Prometheus metrics of the engine, named as in vLLM where possible.

Routers do not export them: a sum over pods counts each request once.
"""

import math
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from phalanx_api import wire
from phalanx_api.cache_curve import HOST_SIZE_NAMES, SIZE_NAMES, CacheCurve, CacheUse
from phalanx_api.speculation import SpeculationCounts
from phalanx_frontend.metrics import FIRST_TOKEN_S, LATENCY_S, PER_TOKEN_S, TOKENS, RequestTotals
from phalanx_runtime.engine.load_feed import NO_LOAD
from phalanx_runtime.engine.open_requests import EndedRequest

NO_COUNTS = SpeculationCounts()


class SpeculationMetrics:
    """Counters of speculation. Reported totals restart at 0 with each incarnation."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, ["model_name", *labels], registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(name, help_text, ["model_name"], registry=registry).labels(model_name)

        self._model_name = model_name
        self._counts = NO_COUNTS
        self._sums = {
            "paths": counter("vllm:spec_decode_num_drafts", "Requests with draft tokens, summed over steps."),
            "saved": counter("phalanx_speculation_saved_tokens", "Tokens generated beyond one for each request and step."),
            "branched": counter(
                "phalanx_speculation_branched_tokens",
                "Accepted draft tokens that were not the first candidate of their position.",
            ),
            "draft_s": counter("phalanx_speculation_draft_seconds", "Time the ranks spent drafting."),
            "verify_s": counter("phalanx_speculation_verify_seconds", "Step time beyond that of a step without draft tokens."),
        }
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._drafted_at = counter("phalanx_speculation_proposed_tokens", "Draft tokens by position in a path.", "position")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", "position"
        )
        self._depth = gauge("phalanx_speculation_depth", "Draft tokens per request since the last report.")
        self._draft_failed = gauge("phalanx_speculation_lost", "1 once the ranks can no longer draft.")
        for family in (*self._sums.values(), self._drafted, self._accepted):
            family.labels(model_name)  # exports 0 before the first draft token

    def update(self, counts: SpeculationCounts) -> tuple[int, int]:
        """Adds a report; returns its new draft tokens and accepted tokens."""
        before = self._counts if counts.paths >= self._counts.paths else NO_COUNTS
        self._counts = counts
        name = self._model_name
        for field, family in self._sums.items():
            family.labels(name).inc(max(0, getattr(counts, field) - getattr(before, field)))
        drafted = _add_per_position(self._drafted_at, name, before.drafted, counts.drafted)
        self._drafted.labels(name).inc(drafted)
        accepted = _add_per_position(self._accepted_at, name, before.accepted, counts.accepted)
        self._accepted.labels(name).inc(accepted)
        paths = counts.paths - before.paths
        self._depth.set(drafted / paths if paths else 0.0)
        self._draft_failed.set(bool(counts.draft_failure))
        return drafted, accepted


def _add_per_position(family: Counter, model_name: str, before: list[int], now: list[int]) -> int:
    total = 0
    for position, count in enumerate(now):
        added = max(0, count - (before[position] if position < len(before) else 0))
        family.labels(model_name, str(position)).inc(added)
        total += added
    return total


_QUEUE_S = (0.001, 0.005, *LATENCY_S)
_GAUGES = {
    "outstanding_tokens": ("outstanding_tokens", "Tokens to compute, and output tokens still allowed."),
    "waiting_prompt_tokens": ("waiting_prompt_tokens", "Prompt tokens to compute for waiting requests, without cached ones."),
    "running_prompt_tokens": ("running_prompt_tokens", "Prompt tokens to compute for running requests."),
    "context_tokens": ("context_tokens", "Tokens in the pages of running requests."),
    "cached_pages": ("cached_pages", "Free pages that the prefix cache can reuse."),
    "total_parts": ("window_parts", "Parts of pages, which layers with a sliding window use; 0: all layers share pages."),
    "free_parts": ("free_window_parts", "Parts without a running request; the prefix cache may have them."),
    "unused_slots": ("unused_slots", "Slots without a token in the pages of running requests: partly filled pages."),
    "host_total_pages": ("host_pages", "Slots for pages in the host memory of each rank."),
    "host_total_parts": ("host_window_parts", "Slots for parts of pages in the host memory of each rank."),
    "host_cached_pages": ("host_cached_pages", "Pages in host memory."),
    "disk_cached_pages": ("disk_cached_pages", "Pages on the disk of rank 0."),
    "disk_cached_parts": ("disk_window_parts", "Parts of pages, or snapshots of states, on the disk of rank 0."),
    "disk_read_page_s": ("disk_read_page_seconds", "Time until all ranks have read a page from disk, averaged."),
    "host_load_page_s": ("host_load_page_seconds", "Time to load a page from host memory, averaged."),
    "reserved_pages": ("reserved_pages", "Pages reserved for requests that are being moved to this group."),
    "oldest_wait_s": ("oldest_wait_seconds", "Wait of the request that has waited longest."),
    "step_s": ("step_seconds", "Step time, averaged over about 20 steps."),
    "device_busy": ("device_busy_ratio", "Share of the last seconds in which the device of rank 0 computed steps."),
    "bandwidth_utilization": (
        "model_bandwidth_utilization",
        "Weights and KV that steps must read, as a share of the copy rate; 0 if rates or sizes are unknown.",
    ),
    "flop_utilization": (
        "model_flop_utilization",
        "FLOPs that steps must compute, as a share of the matmul rate; 0 if rates or sizes are unknown.",
    ),
    "prompt_tokens_per_step": ("prompt_tokens_per_step", "Prompt tokens per step, averaged over about 20 steps."),
}
"""Gauges by load report field."""
_COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Preemptions: requests that lost their pages and were recomputed."),
    "prefix_queried_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "pages_reused": ("phalanx_pages_reused", "Pages reused from the prefix cache."),
    "pages_evicted": ("phalanx_pages_evicted", "Pages evicted from the prefix cache."),
    "evicted_page_s": (
        "phalanx_evicted_page_seconds",
        "Time from publication to eviction of evicted pages, summed; over phalanx_pages_evicted it is their mean residency.",
    ),
    "dropped_pages": (
        "phalanx_dropped_pages",
        "Pages, or parts of pages, of running requests that no layer reads any more: before sliding windows.",
    ),
    "parts_evicted": ("phalanx_window_parts_evicted", "Parts of pages that the prefix cache lost."),
    "host_stored_parts": ("phalanx_host_stored_window_parts", "Evicted parts of pages that were stored in host memory."),
    "host_loaded_parts": ("phalanx_host_loaded_window_parts", "Parts of pages that prompts loaded from host memory."),
    "disk_fetched_parts": (
        "phalanx_disk_fetched_window_parts",
        "Parts of pages, or snapshots of states, that were read from disk.",
    ),
    "host_stored_pages": ("phalanx_host_stored_pages", "Evicted pages that were stored in host memory."),
    "host_loaded_pages": ("phalanx_host_loaded_pages", "Pages that prompts loaded from host memory."),
    "host_evicted_pages": ("phalanx_host_evicted_pages", "Pages evicted from host memory."),
    "host_declined_pages": ("phalanx_host_declined_pages", "Pages in host memory that were faster to compute than to load."),
    "host_evicted_page_s": (
        "phalanx_host_evicted_page_seconds",
        "Time from storing to eviction of pages in host memory, summed; over phalanx_host_evicted_pages it is their mean "
        "residency.",
    ),
    "host_wait_s": ("phalanx_host_wait_seconds", "Time that steps waited for copies between device and host memory."),
    "host_resizes": ("phalanx_host_resizes", "Steps that changed the number of slots in host memory."),
    "host_sent_pages": ("phalanx_host_sent_pages", "Pages in host memory that other groups pulled."),
    "host_moved_pages": ("phalanx_host_moved_pages", "Pages in host memory that moved because their slots were removed."),
    "disk_fetched_pages": ("phalanx_disk_fetched_pages", "Pages that all ranks read from disk."),
    "disk_failed_pages": ("phalanx_disk_failed_pages", "Pages on disk that a rank lacked or found damaged."),
    "disk_declined_pages": ("phalanx_disk_declined_pages", "Pages on disk that were faster to compute than to read."),
    "disk_unwritten_pages": (
        "phalanx_disk_unwritten_pages",
        "Pages and parts that a rank did not write to disk: too many waited, or a write failed.",
    ),
    "disk_compacted_bytes": ("phalanx_disk_compacted_bytes", "Bytes that compaction wrote to the disks of all ranks."),
    "disk_reclaimed_bytes": ("phalanx_disk_reclaimed_bytes", "Bytes of segments removed from the disks of all ranks."),
    "refused_transfers": ("phalanx_refused_copies", "KV transfer connections that ranks refused."),
    "refusals": ("phalanx_requests_refused", "Requests refused because the queue was full."),
    "recomputed_tokens": ("phalanx_recomputed_tokens", "Tokens recomputed after preemptions."),
    "wasted_tokens": ("phalanx_wasted_tokens", "Tokens computed for requests that had ended."),
    "leaks": ("phalanx_page_leaks", "Pages and batch slots unaccounted for while the engine was idle."),
}
"""Counters by load report field."""


class CacheMetrics:
    """Gauges of the prefix cache's miss-ratio curve, without samples before the first lookup of an incarnation."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._lookups = Gauge(
            "phalanx_cache_curve_lookups", "Recent page lookups behind the estimate.", ["model_name"], registry=registry
        )
        self._hit_rates = Gauge(
            "phalanx_cache_curve_hit_rate",
            "Estimated hit rate of page lookups with half, the present, twice and four times the pages, under LRU eviction.",
            ["model_name", "size"],
            registry=registry,
        )
        self._host_rates = Gauge(
            "phalanx_cache_curve_host_hit_rate",
            "Estimated hit rate with a host tier of half, all, twice and four times its limit, else of the device's pages.",
            ["model_name", "size"],
            registry=registry,
        )
        self._reuse = Gauge(
            "phalanx_cache_reuse_pages",
            "Pages used between two uses of a page: median of repeated lookups.",
            ["model_name"],
            registry=registry,
        )
        self._unused = Gauge(
            "phalanx_unused_slot_ratio",
            "Slots without a token, as a share of all in pages of requests: partly filled pages.",
            ["model_name"],
            registry=registry,
        )
        self._tier_rates = Gauge(
            "phalanx_cache_tier_hit_rate",
            "Hit rate of recent page lookups with the present host tier, and with the disk.",
            ["model_name", "tier"],
            registry=registry,
        )

    def update(self, curve: CacheCurve, use: CacheUse) -> None:
        """Shows a curve and statistics."""
        self._reuse.labels(self._model_name).set(use.reuse_pages)
        self._unused.labels(self._model_name).set(use.unused_share)
        self._lookups.labels(self._model_name).set(curve.lookups)
        if not curve.hit_rates:
            for family in (self._hit_rates, self._host_rates, self._tier_rates):
                family.clear()
        for size, rate in zip(SIZE_NAMES, curve.hit_rates, strict=False):
            self._hit_rates.labels(self._model_name, size).set(rate)
        for size, rate in zip(HOST_SIZE_NAMES, curve.tiers.hit_rates, strict=False):
            self._host_rates.labels(self._model_name, size).set(rate)
        for tier, found in (("host", curve.tiers.host), ("disk", curve.tiers.disk)):
            if found is not None:
                self._tier_rates.labels(self._model_name, tier).set(found)


class TenantMetrics:
    """Counters of tenants. Reported totals restart at 0 with each incarnation, which may name other tenants.

    The first `wire.MAX_TENANTS` of all incarnations have their names, as in one report.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, num_ranks: int) -> None:
        def counter(name: str, help_text: str) -> Counter:
            return Counter(f"phalanx_tenant_{name}", help_text, ["model_name", "tenant"], registry=registry)

        self._model_name, self._num_ranks = model_name, num_ranks
        self._uses: dict[str, wire.TenantUse] = {}
        self._names: set[str] = set()
        self._device_s = counter("device_seconds", "Time of steps on all devices of the group, divided among their requests.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens computed, without those found in a cache.")
        self._output_tokens = counter("output_tokens", "Generated tokens.")
        self._energy_j = counter(
            "energy_joules", "Energy of all devices of the group while it computed, divided as the steps' time."
        )

    def update(self, uses: Sequence[wire.TenantUse]) -> None:
        """Adds what a report has more than the one before."""
        before, self._uses = self._uses, {use.tenant: use for use in uses}
        for use in uses:
            former = before.get(use.tenant)
            if former is None or use.step_s < former.step_s or use.prompt_tokens < former.prompt_tokens:
                former = wire.TenantUse(use.tenant, 0.0, 0, 0)
            labels = self._model_name, self._name(use.tenant)
            self._device_s.labels(*labels).inc(self._num_ranks * (use.step_s - former.step_s))
            self._prompt_tokens.labels(*labels).inc(use.prompt_tokens - former.prompt_tokens)
            self._output_tokens.labels(*labels).inc(max(0, use.output_tokens - former.output_tokens))
            if use.energy_j is not None:
                self._energy_j.labels(*labels).inc(max(0.0, use.energy_j - (former.energy_j or 0.0)))

    def _name(self, tenant: str) -> str:
        if tenant not in self._names and len(self._names) < wire.MAX_TENANTS:
            self._names.add(tenant)
        return tenant if tenant in self._names else wire.OTHER_TENANTS


_WAITING_HELP = "Requests waiting for pages or a batch slot. Behind a router most wait there: phalanx_router_queued_requests."
_QUEUE_HELP = "From a request's arrival in the engine to its first step, without the wait at a router."
_FIRST_TOKEN_HELP = "From submission to the engine to the first token, without the wait at a router."


class EngineMetrics:
    """Implements `EngineMeter`."""

    def __init__(self, registry: CollectorRegistry, model_name: str, totals: RequestTotals, num_ranks: int = 1) -> None:
        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(name, help_text, ["model_name"], registry=registry).labels(model_name)

        def gauges(name: str, help_text: str) -> list[Gauge]:
            return [gauge(f"{prefix}{name}", help_text) for prefix in ("phalanx_", "vllm:")]

        def counter(name: str, help_text: str) -> Counter:
            return Counter(name, help_text, ["model_name"], registry=registry).labels(model_name)

        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", help_text, ["model_name"], buckets=buckets, registry=registry).labels(model_name)

        self._totals, self._model_name = totals, model_name
        self._running = gauges("num_requests_running", "Requests that hold pages.")
        self._waiting = gauges("num_requests_waiting", _WAITING_HELP)
        self._usage = gauges("kv_cache_usage_perc", "Fraction of the KV pages in use, 0 to 1.")
        self._gauges = {field: gauge(f"phalanx_{name}", help_text) for field, (name, help_text) in _GAUGES.items()}
        self._counters = {field: counter(name, help_text) for field, (name, help_text) in _COUNTERS.items()}
        self._steps_to_full = gauge(
            "phalanx_steps_to_full", "Predicted decode steps until the page pool is exhausted; infinite if it never is."
        )
        self._load = NO_LOAD
        self._speculation = SpeculationMetrics(registry, model_name)
        self._cache = CacheMetrics(registry, model_name)
        self._tenants = TenantMetrics(registry, model_name, num_ranks)
        self._steps = counter("phalanx_engine_steps", "Steps that produced tokens.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a token or a vector.")
        self._cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self._finished = Counter(
            "vllm:request_success", "Ended requests by reason.", ["model_name", "finished_reason"], registry=registry
        )
        self._queue = histogram("request_queue_time_seconds", _QUEUE_HELP, _QUEUE_S)
        self._first_token = histogram("time_to_first_token_seconds", _FIRST_TOKEN_HELP, FIRST_TOKEN_S)
        self._inter_token = histogram("inter_token_latency_seconds", "Time between two tokens of a request.", PER_TOKEN_S)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token after the first.", PER_TOKEN_S
        )
        self._latency = histogram(
            "e2e_request_latency_seconds", "From submission to the engine to the end of the request.", LATENCY_S
        )
        self._decode = histogram("request_decode_time_seconds", "From a request's first token to its last.", LATENCY_S)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._request_generation = histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._request_max = histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)

    def load(self, load: wire.Load) -> None:
        """Sets gauges and increments counters."""
        for name, count in self._counters.items():
            before, now = getattr(self._load, name), getattr(load, name)
            count.inc(now - before if now >= before else now)
        self._load = load
        self._totals.record_speculation(*self._speculation.update(load.speculation))
        self._totals.record_cache(load.cache_curve)
        self._cache.update(load.cache_curve, load.cache_use)
        self._tenants.update(load.tenants)
        for family in self._running:
            family.set(load.running)
        for family in self._waiting:
            family.set(load.waiting)
        for family in self._usage:
            family.set(1 - load.free_pages / load.total_pages if load.total_pages else 0)
        for field, gauge in self._gauges.items():
            gauge.set(getattr(load, field))
        self._steps_to_full.set(math.inf if load.steps_to_full is None else load.steps_to_full)

    def step(self, num_tokens: int) -> None:
        """Counts a step's tokens."""
        self._steps.inc()
        self._generation_tokens.inc(num_tokens)

    def queued(self, wait_s: float) -> None:
        """Observes the queue time."""
        self._queue.observe(wait_s)

    def first_token(self, prompt_tokens: int, wait_s: float) -> None:
        """Observes the time to first token."""
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token.observe(wait_s)

    def next_token(self, gap_s: float) -> None:
        """Observes the inter-token latency."""
        self._inter_token.observe(gap_s)

    def embedded(self, prompt_tokens: int) -> None:
        """Counts the tokens of an embedding."""
        self._prompt_tokens.inc(prompt_tokens)

    def ended(self, end: EndedRequest) -> None:
        """Counts an ended request."""
        self._totals.count(end.prompt_tokens, end.cached_tokens, end.generated_tokens, end.latency_s)
        self._finished.labels(self._model_name, end.reason).inc()
        self._cached_tokens.inc(end.cached_tokens)
        self._latency.observe(end.latency_s)
        self._request_prompt.observe(end.prompt_tokens)
        self._request_generation.observe(end.generated_tokens)
        self._request_max.observe(end.max_tokens)
        if end.generated_tokens > 1:
            self._decode.observe(end.decode_s)
            self._per_token.observe(end.decode_s / (end.generated_tokens - 1))
