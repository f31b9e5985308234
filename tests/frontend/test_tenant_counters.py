"""Counters by tenant: tokens, responses by status, and a bound of their number."""

import httpx
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.metrics import TenantCounters
from tests.frontend.fakes import FakeBackend

BODY = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}


async def test_tokens_and_statuses_are_counted_by_tenant() -> None:
    registry = CollectorRegistry()
    app = create_app(
        FakeBackend(), keys=ApiKeys([ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2")]), registry=registry, has_tenant_metrics=True
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:
        sent: list[tuple[str, dict[str, object]]] = [
            ("sk-1", {}), ("sk-1", {"n": 2}), ("sk-2", {}), ("sk-2", {"model": "other"}), ("sk-3", {})
        ]  # fmt: skip
        for key, fields in sent:
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=BODY | fields, headers=headers)
            assert answer.status_code == {"sk-3": 401}.get(key, 404 if "model" in fields else 200)
        embedded = await client.post("/v1/embeddings", json={"input": "x"}, headers={"authorization": "Bearer sk-2"})
        assert embedded.status_code == 200

    def value(name: str, tenant: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"phalanx_{name}_by_tenant_total", {"tenant": tenant, **labels})

    assert [value("generation_tokens", tenant) for tenant in ("alice", "bob", "")] == [9, 3, None]
    assert (value("prompt_tokens", "alice") or 0) / 3 == (value("prompt_tokens", "bob") or 0) / 2 > 0
    statuses = [("alice", "200"), ("bob", "200"), ("bob", "404"), ("", "401")]
    assert [value("responses", tenant, status=status) for tenant, status in statuses] == [2, 2, 1, 1]


async def test_tenants_are_shown_only_on_demand() -> None:
    registry = CollectorRegistry()
    app = create_app(FakeBackend(), keys=ApiKeys([ApiKey("alice", "sk-1")]), registry=registry)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer sk-1"})
        assert answer.status_code == 200
        assert "alice" not in (await client.get("/metrics")).text


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    registry = CollectorRegistry()
    counters = TenantCounters(registry, "phalanx")
    for number in range(wire.MAX_TENANTS + 10):
        for _ in range(2):
            counters.used(f"tenant-{number}" + "x" * 100, 2, 3)
            counters.responded(f"tenant-{number}" + "x" * 100, 200)
    families = {family.name: family.samples for family in registry.collect()}
    for samples in families.values():
        tenants = {sample.labels["tenant"] for sample in samples}
        assert len(tenants) == wire.MAX_TENANTS + 1 and max(map(len, tenants)) == wire.MAX_TENANT_NAME
    name = "phalanx_prompt_tokens_by_tenant_total"
    assert registry.get_sample_value(name, {"tenant": wire.OTHER_TENANTS}) == 10 * 2 * 2
