"""Engine metrics: exact counts under vLLM's names, over incarnations."""

import msgspec
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_api.cache_curve import HOST_SIZE_NAMES, SIZE_NAMES, CacheCurve, CacheUse, TierCurve
from phalanx_api.speculation import SpeculationCounts
from phalanx_frontend.health import HealthTotals
from phalanx_frontend.metrics import RequestTotals
from phalanx_runtime.engine.load_feed import NO_LOAD
from phalanx_runtime.engine.open_requests import EndedRequest
from phalanx_runtime.server.http.metrics import EngineMetrics


def make() -> tuple[EngineMetrics, CollectorRegistry, RequestTotals]:
    registry, totals = CollectorRegistry(), RequestTotals()
    return EngineMetrics(registry, "m", totals), registry, totals


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", **labels})


def test_engine_counters_are_summed_over_incarnations() -> None:
    metrics, registry, _ = make()
    metrics.load(
        wire.Load(
            waiting=1,
            running=2,
            outstanding_tokens=30,
            free_pages=4,
            total_pages=8,
            preemptions=2,
            prefix_queried_tokens=100,
            prefix_hit_tokens=40,
            pages_reused=5,
            pages_evicted=1,
            leaks=0,
        )
    )
    metrics.load(
        wire.Load(
            waiting=1,
            running=2,
            outstanding_tokens=30,
            free_pages=4,
            total_pages=8,
            preemptions=3,
            prefix_queried_tokens=100,
            prefix_hit_tokens=40,
            pages_reused=5,
            pages_evicted=1,
            leaks=0,
        )
    )
    metrics.load(NO_LOAD)  # the incarnation ended
    metrics.load(
        wire.Load(
            waiting=0, running=0, outstanding_tokens=0, free_pages=8, total_pages=8, preemptions=1, prefix_queried_tokens=10
        )
    )
    assert value(registry, "vllm:num_preemptions_total") == 4
    assert value(registry, "vllm:prefix_cache_queries_total") == 110
    assert value(registry, "vllm:prefix_cache_hits_total") == 40
    assert value(registry, "phalanx_pages_reused_total") == 5
    assert value(registry, "phalanx_pages_evicted_total") == 1
    assert value(registry, "phalanx_page_leaks_total") == 0
    for prefix in ("vllm:", "phalanx_"):
        assert value(registry, f"{prefix}kv_cache_usage_perc") == 0


def test_router_reports_are_shown_as_metrics() -> None:
    metrics, registry, _ = make()
    before = wire.Load(
        waiting=2,
        running=1,
        outstanding_tokens=30,
        free_pages=4,
        total_pages=8,
        waiting_prompt_tokens=20,
        oldest_wait_s=0.5,
        step_s=0.02,
        steps_to_full=7.5,
        refusals=3,
    )
    metrics.load(before)
    assert value(registry, "phalanx_waiting_prompt_tokens") == 20
    assert value(registry, "phalanx_oldest_wait_seconds") == 0.5
    assert value(registry, "phalanx_step_seconds") == 0.02
    assert value(registry, "phalanx_steps_to_full") == 7.5
    assert value(registry, "phalanx_requests_refused_total") == 3
    metrics.load(wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=8, total_pages=8, refusals=4))
    assert value(registry, "phalanx_steps_to_full") == float("inf")
    assert value(registry, "phalanx_requests_refused_total") == 4


def test_cache_curve_is_shown_until_the_incarnation_ends() -> None:
    metrics, registry, totals = make()
    curve = CacheCurve(120, [0.25, 0.5, 0.625, 0.75], TierCurve(9, [0.5, 0.6, 0.7, 0.8], 0.6, 0.9))
    metrics.load(
        msgspec.structs.replace(
            NO_LOAD,
            cache_curve=curve,
            cache_use=CacheUse(reuse_pages=9.0, unused_share=0.25),
            unused_slots=7,
            pages_evicted=2,
            evicted_page_s=30.0,
        )
    )
    assert value(registry, "phalanx_cache_curve_lookups") == 120
    assert [value(registry, "phalanx_cache_curve_hit_rate", size=size) for size in SIZE_NAMES] == curve.hit_rates
    assert value(registry, "phalanx_cache_reuse_pages") == 9 and value(registry, "phalanx_unused_slot_ratio") == 0.25
    host_rates = [value(registry, "phalanx_cache_curve_host_hit_rate", size=size) for size in HOST_SIZE_NAMES]
    assert host_rates == curve.tiers.hit_rates
    assert [value(registry, "phalanx_cache_tier_hit_rate", tier=tier) for tier in ("host", "disk")] == [0.6, 0.9]
    assert (value(registry, "phalanx_unused_slots"), value(registry, "phalanx_evicted_page_seconds_total")) == (7, 30)
    assert totals.totals().cache_curve == curve
    metrics.load(NO_LOAD)
    assert value(registry, "phalanx_cache_curve_hit_rate", size="now") is None
    assert value(registry, "phalanx_cache_tier_hit_rate", tier="host") is None
    assert totals.totals().cache_curve == CacheCurve()


def test_a_request_is_in_every_histogram_once() -> None:
    metrics, registry, totals = make()
    metrics.queued(0.5)
    metrics.first_token(10, 0.7)
    metrics.next_token(0.1)
    metrics.next_token(0.3)
    metrics.step(3)
    metrics.ended(
        EndedRequest(
            reason="stop", prompt_tokens=10, cached_tokens=4, generated_tokens=3, max_tokens=16, latency_s=1.1, decode_s=0.4
        )
    )
    metrics.ended(
        EndedRequest(
            reason="abort", prompt_tokens=5, cached_tokens=0, generated_tokens=0, max_tokens=16, latency_s=0.2, decode_s=0.0
        )
    )
    for name, count, total in [
        ("request_queue_time_seconds", 1, 0.5),
        ("time_to_first_token_seconds", 1, 0.7),
        ("inter_token_latency_seconds", 2, 0.4),
        ("request_time_per_output_token_seconds", 1, 0.2),
        ("request_decode_time_seconds", 1, 0.4),
        ("e2e_request_latency_seconds", 2, 1.3),
        ("request_generation_tokens", 2, 3),
    ]:
        assert value(registry, f"vllm:{name}_count") == count
        assert abs((value(registry, f"vllm:{name}_sum") or 0) - total) < 1e-9
    assert value(registry, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(registry, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(registry, "vllm:prompt_tokens_total") == 10
    assert value(registry, "vllm:prompt_tokens_cached_total") == 4
    assert value(registry, "vllm:generation_tokens_total") == 3
    assert totals.totals() == HealthTotals(
        requests=2, prompt_tokens=15, cached_tokens=4, generated_tokens=3, latency_s=totals.totals().latency_s
    )


def test_the_acceptance_rate_counts_over_engines() -> None:
    metrics, _, totals = make()
    for counts in (
        SpeculationCounts(paths=4, drafted=[4, 4], accepted=[3, 1]),
        SpeculationCounts(paths=6, drafted=[6, 6], accepted=[5, 2]),
        SpeculationCounts(paths=1, drafted=[1], accepted=[1]),
    ):
        metrics.load(msgspec.structs.replace(NO_LOAD, speculation=counts))
    assert (totals.totals().drafted, totals.totals().accepted) == (13, 8)
