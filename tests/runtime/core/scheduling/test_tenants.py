"""Tenants share the time and the tokens of an engine."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from phalanx_api import wire
from phalanx_frontend.metrics import RequestTotals
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import make_scheduler
from phalanx_runtime.engine.load_feed import LoadFeed
from phalanx_runtime.server.http.metrics import EngineMetrics
from tests.runtime.fake_runner import FakeRunner, make_request

STEP_S = 0.01


def uses_of(requests: list[wire.Request]) -> tuple[dict[str, wire.TenantUse], int]:
    """Runs the requests. Returns what their tenants used, and the number of steps."""
    runner = FakeRunner(200, 4)
    limits = Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=32)
    scheduler, num_steps = make_scheduler(limits, runner.pool), 0
    for handle, request in enumerate(requests):
        assert scheduler.submit(handle, request) is None
    while (plan := scheduler.schedule(float(num_steps))) is not None:
        scheduler.commit(runner.run(plan), wall_s=STEP_S)
        num_steps += 1
    return {use.tenant: use for use in scheduler.load().tenants}, num_steps


def request_of(tenant: str, prompt: int, max_tokens: int, seed: int) -> wire.Request:
    return msgspec.structs.replace(make_request(prompt, max_tokens, seed=seed), tenant=tenant)


def test_tenants_share_all_step_time_and_tokens() -> None:
    uses, num_steps = uses_of([request_of("a", 90, 4, 1), request_of("b", 10, 30, 2), request_of("b", 11, 20, 3)])
    assert {name: (use.prompt_tokens, use.output_tokens) for name, use in uses.items()} == {"a": (90, 4), "b": (21, 50)}
    assert sum(use.step_s for use in uses.values()) == pytest.approx(STEP_S * num_steps)
    assert uses["a"].step_s < uses["b"].step_s, "most steps decode for b alone"


def test_cached_prompts_are_not_computed_again() -> None:
    first, second = request_of("a", 41, 2, 1), request_of("a", 41, 2, 1)
    uses, _ = uses_of([first, second])
    assert 41 < uses["a"].prompt_tokens + 1 < 2 * 41 and uses["a"].output_tokens == 4


def test_tenants_after_the_first_ones_are_counted_together() -> None:
    requests = [request_of(f"t{number}", 5, 2, number) for number in range(wire.MAX_TENANTS + 5)]
    uses, num_steps = uses_of(requests)
    assert len(uses) == wire.MAX_TENANTS + 1
    assert (uses[wire.OTHER_TENANTS].prompt_tokens, uses[wire.OTHER_TENANTS].output_tokens) == (25, 10)
    assert sum(use.step_s for use in uses.values()) == pytest.approx(STEP_S * num_steps)


def test_long_names_are_cut() -> None:
    uses, _ = uses_of([request_of("a" * 100, 5, 2, 1), request_of("a" * 200, 5, 2, 2)])
    assert list(uses) == ["a" * wire.MAX_TENANT_NAME]


def test_metrics_of_tenants_count_all_devices_over_incarnations() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", RequestTotals(), num_ranks=4)
    load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=1, total_pages=1)
    uses = wire.TenantUse("a", 1.0, 10, 3), wire.TenantUse("a", 1.5, 10, 5, 40.0), wire.TenantUse("a", 0.25, 2, 1, 3.0)
    for use in uses:
        metrics.load(msgspec.structs.replace(load, tenants=[use]))
    names = "device_seconds", "prompt_tokens", "output_tokens", "energy_joules"
    samples = [registry.get_sample_value(f"phalanx_tenant_{name}_total", {"model_name": "m", "tenant": "a"}) for name in names]
    assert samples == [4 * 1.75, 12, 6, 43.0]


def test_metrics_name_as_many_tenants_as_one_report() -> None:
    """Each incarnation reports other ones, which clients without keys name."""
    registry, count = CollectorRegistry(), 2 * wire.MAX_TENANTS
    metrics = EngineMetrics(registry, "m", RequestTotals())
    load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=1, total_pages=1)
    for number in range(count):
        metrics.load(msgspec.structs.replace(load, tenants=[wire.TenantUse(f"t{number}", 1.0, 10, 3)]))
    samples = {
        sample.labels["tenant"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "phalanx_tenant_prompt_tokens_total"
    }
    assert len(samples) == wire.MAX_TENANTS + 1 and sum(samples.values()) == 10 * count
    assert samples[wire.OTHER_TENANTS] == 10 * wire.MAX_TENANTS


def test_energy_is_absent_where_devices_do_not_count_it() -> None:
    registry = CollectorRegistry()
    load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=1, total_pages=1)
    EngineMetrics(registry, "m", RequestTotals()).load(msgspec.structs.replace(load, tenants=[wire.TenantUse("a", 1.0, 1, 1)]))
    page = generate_latest(registry).decode()
    assert 'phalanx_tenant_device_seconds_total{model_name="m",tenant="a"}' in page
    assert "phalanx_tenant_energy_joules_total{" not in page


def test_energy_of_an_interval_is_divided_as_its_steps() -> None:
    feed = LoadFeed(EngineMetrics(CollectorRegistry(), "m", RequestTotals()))
    load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=1, total_pages=1)

    def energies(total_j: float | None, **step_s: float) -> dict[str, float | None]:
        uses = [wire.TenantUse(tenant, seconds, 1, 1) for tenant, seconds in step_s.items()]
        feed.update_load(msgspec.structs.replace(load, tenants=uses))
        feed.set_energy(total_j)
        return {use.tenant: use.energy_j for use in feed.load.tenants}

    assert energies(None, a=1.0) == {"a": None}
    assert energies(500.0, a=2.0) == {"a": 0.0}, "counted from the first reading"
    assert energies(600.0, a=3.0, b=3.0) == {"a": 25.0, "b": 75.0}
    assert energies(700.0, a=3.0, b=3.0) == {"a": 25.0, "b": 75.0}, "without steps it is no tenant's"
    assert energies(40.0, a=4.0, b=3.0) == {"a": 25.0, "b": 75.0}, "a pod counts from 0 again"
    assert energies(50.0, a=5.0, b=3.0) == {"a": 35.0, "b": 75.0}
    feed.reset()
    assert energies(80.0, b=0.5) == {"b": 30.0}, "a new engine"
