"""Audit lines, and the absence of keys and prompts in logs, traces, metrics, and what Kubernetes has of them."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.audit import audited
from phalanx_frontend.backend import BackendError
from phalanx_frontend.errors import ApiError
from phalanx_frontend.logs import JsonFormatter
from phalanx_frontend.tracing.tracer import SamplingRules, Tracer
from phalanx_operator.kube.client import Json
from tests.control.worlds import World
from tests.frontend.fakes import FakeBackend, tiny_assets
from tests.frontend.tracing.span_list import SpanList

MARK = "zanzibar"
KEYS = [
    ApiKey("alice", f"sk-{MARK}-1", priority=0, models=("tiny",)),
    ApiKey("bob", f"sk-{MARK}-2", expires=datetime(2020, 1, 1, tzinfo=UTC)),
]
TRACED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def audit_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "phalanx.audit"]


def client_of(backend: FakeBackend, registry: CollectorRegistry, spans: SpanList) -> httpx.AsyncClient:
    app = create_app(backend, keys=ApiKeys(KEYS), registry=registry, tracer=Tracer(spans, SamplingRules(ratio=1.0)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://api-server", headers=TRACED)


async def test_refused_keys_are_logged_by_name_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = FakeBackend(assets=tiny_assets(names=("tiny", "other")))
    requests: list[tuple[str, dict[str, Any]]] = [
        ("1", {}),
        ("2", {}),
        ("3", {}),
        ("1", {"model": "other"}),
        ("1", {"model": MARK}),
        ("1", {"priority": -1}),
    ]
    async with client_of(backend, CollectorRegistry(), SpanList()) as client:
        for number, (key, fields) in enumerate(requests):
            headers = {"authorization": f"Bearer sk-{MARK}-{key}", "x-request-id": f"r{number}"}
            await client.post("/v1/completions", json={"prompt": MARK, "max_tokens": 1} | fields, headers=headers)
        await client.get(f"/{MARK}", headers={"x-request-id": "r6"})
    lines = [(line["request_id"], line["caller"], line["verb"], line["object"], line["outcome"]) for line in audit_lines(caplog)]
    assert lines == [
        ("r1", "bob", "authenticate", "/v1/completions", "refused"),
        ("r2", "", "authenticate", "/v1/completions", "refused"),
        ("r3", "alice", "use", "models/other", "refused"),
        ("r5", "alice", "use", "priority/-1", "refused"),
        ("r6", "", "authenticate", "other", "refused"),
    ]
    assert [line["why"].split()[:3] for line in audit_lines(caplog)][:2] == [["This", "API", "key"], ["Incorrect", "API", "key"]]
    assert all(line["level"] == "WARNING" for line in audit_lines(caplog))


async def test_keys_and_prompts_reach_no_log_event_or_metric(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    backend, registry, spans = FakeBackend(), CollectorRegistry(), SpanList()
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": MARK, "max_tokens": 2}),
        ("/v1/completions", {"prompt": MARK, "max_tokens": 2, "stream": True, "stop": [MARK]}),
        ("/v1/completions", {"prompt": "x", "model": MARK}),
        ("/v1/completions", {"prompt": "x", "user": MARK, "cache_salt": MARK}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2}),
        ("/v1/generate", {"prompt": MARK, MARK: 1}),
        ("/v1/batch", {"requests": [{"prompt": MARK, "max_tokens": 1}, MARK]}),
        ("/v1/embeddings", {"input": MARK}),
        ("/tokenize", {"prompt": MARK}),
        (f"/{MARK}", {}),
    ]
    async with client_of(backend, registry, spans) as client:
        statuses = set()
        for key in ("1", "2", "3"):
            for path, body in bodies:
                headers = {"authorization": f"Bearer sk-{MARK}-{key}"}
                statuses.add((await client.post(path, json=body, headers=headers)).status_code)
        for step in (ValueError("a bug"), BackendError(503, "gone", "no group")):
            backend.script = lambda request, step=step: [step]  # type: ignore[misc]
            failed = await client.post(*bodies[0][:1], json=bodies[0][1], headers={"authorization": f"Bearer sk-{MARK}-1"})
            statuses.add(failed.status_code)
        metrics = (await client.get("/metrics")).text
    assert statuses >= {200, 400, 401, 404, 500, 503}
    own = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("phalanx")]
    assert len(own) > len(bodies) and len(spans.spans) > 5 and "phalanx_http_responses_total" in metrics
    in_cluster = json.dumps(await in_kubernetes(own))
    assert json.loads(own[-1])["message"] in in_cluster
    for text in (*own, *(repr(span) for span in spans.spans), metrics, in_cluster):
        assert MARK not in text


async def in_kubernetes(log_lines: list[str]) -> Json:
    """Returns what Kubernetes and the operator write about pods that crash: their last lines are the termination message."""
    world = World()
    await world.reconcile()
    return await world.crash("\n".join(log_lines)[-2048:])


@pytest.mark.parametrize(
    ("status", "outcome", "level"), [(0, "accepted", "INFO"), (403, "refused", "WARNING"), (409, "failed", "WARNING")]
)
def test_an_order_ends_in_one_line(status: int, outcome: str, level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    try:
        with audited("drain", "root", "r1", outcome="accepted") as entry:
            entry.subject, entry.detail = "groups/a", {"target": "b"}
            if status:
                raise ApiError(status, "x" * 1000)
    except ApiError as error:
        assert error.status == status
    [line] = audit_lines(caplog)
    why = "x" * 200 if status else ""
    expected = {"verb": "drain", "object": "groups/a", "caller": "root", "request_id": "r1", "target": "b", "why": why}
    assert line == line | expected | {"outcome": outcome, "level": level, "message": "audit"}
