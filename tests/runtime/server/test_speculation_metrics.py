"""Speculation metrics over the reports of successive engines."""

from prometheus_client import CollectorRegistry

from phalanx_api.speculation import SpeculationCounts
from phalanx_runtime.server.http.metrics import SpeculationMetrics


def test_counters_add_up_over_reports_and_engines() -> None:
    registry = CollectorRegistry()
    metrics = SpeculationMetrics(registry, "tiny")

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "tiny", **labels})

    assert shown("vllm:spec_decode_num_drafts_total") == 0, "exported before the first draft token"
    metrics.update(SpeculationCounts(paths=4, drafted=[4, 4, 2], accepted=[3, 1, 0], saved=4, draft_s=0.5, verify_s=0.25))
    metrics.update(SpeculationCounts(paths=6, drafted=[6, 6, 2, 1], accepted=[5, 3, 0, 0], saved=8, draft_s=0.75, verify_s=0.5))
    metrics.update(
        SpeculationCounts(paths=1, drafted=[1], accepted=[1], saved=1, draft_s=0.1, verify_s=0.1, draft_failure="out of memory")
    )
    assert shown("vllm:spec_decode_num_drafts_total") == 7
    assert shown("vllm:spec_decode_num_draft_tokens_total") == 16
    assert shown("vllm:spec_decode_num_accepted_tokens_total") == 9
    assert shown("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") == 6
    assert shown("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 3
    assert shown("phalanx_speculation_proposed_tokens_total", position="3") == 1
    assert shown("phalanx_speculation_saved_tokens_total") == 9
    assert (shown("phalanx_speculation_depth"), shown("phalanx_speculation_lost")) == (1.0, 1.0)
    assert abs((shown("phalanx_speculation_draft_seconds_total") or 0) - 0.85) < 1e-9
    assert abs((shown("phalanx_speculation_verify_seconds_total") or 0) - 0.6) < 1e-9
