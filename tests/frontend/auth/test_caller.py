"""Request ids, API keys, tenants and priorities."""

from typing import Any

import httpx
import pytest

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import ApiError
from tests.frontend.fakes import FakeBackend

ALICE, BOB = ApiKey("alice", "sk-alice", priority=-5), ApiKey("bob", "sk-bob", priority=3)
GATED = ["/v1/models", "/v1/health", "/v1/completions", "/nothing"]


def client_of(backend: FakeBackend, keys: list[ApiKey] | None = None) -> httpx.AsyncClient:
    app = create_app(backend, keys=ApiKeys(keys or []))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://api-server")


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [{}, bearing("sk-eve"), {"authorization": "Basic sk-alice"}, bearing(""), bearing("sk-alice2")]
)
async def test_without_a_key_only_probes_and_metrics_are_answered(headers: dict[str, str]) -> None:
    backend = FakeBackend()
    async with client_of(backend, [ALICE, BOB]) as client:
        for path in GATED:
            answer = await client.post(path, content=b"{", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"]
        for path in ("/health", "/healthz", "/ping", "/readyz", "/metrics"):
            assert (await client.get(path, headers=headers)).status_code == 200
    assert not backend.requests


async def test_the_tenant_is_the_key_s_name() -> None:
    backend = FakeBackend()
    async with client_of(backend, [ALICE, BOB]) as client:
        for key in (ALICE, BOB):
            body = {"prompt": "x", "user": "someone", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body, headers=bearing(key.key))).status_code == 200
    assert [request.tenant for request in backend.requests] == ["alice", "bob"]
    assert [request.priority for request in backend.requests] == [0, 3]


async def test_without_keys_the_tenant_is_the_user() -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        await client.post("/v1/completions", json={"prompt": "x", "user": "someone", "max_tokens": 1})
    assert backend.requests[0].tenant == "someone"


@pytest.mark.parametrize(
    ("caller", "tenant", "user", "is_for"),
    [
        (Caller(request_id="id"), "t", "u", "t"),
        (Caller(request_id="id"), None, "u", "u"),
        (Caller(request_id="id"), None, None, ""),
        (Caller(request_id="id", key=ALICE, has_keys=True), "t", "u", "alice"),
        (Caller(request_id="id", key=None, has_keys=True), "t", "u", ""),
    ],
)
def test_caller_identity_table(caller: Caller, tenant: str | None, user: str | None, is_for: str) -> None:
    assert caller.tenant(tenant, user) == is_for


@pytest.mark.parametrize(
    ("key", "requested", "priority"),
    [(None, None, 0), (None, -9, -9), (ALICE, None, 0), (ALICE, -5, -5), (ALICE, 7, 7), (BOB, None, 3), (BOB, 3, 3)],
)
def test_a_priority_within_the_key_s_bound_is_taken(key: ApiKey | None, requested: int | None, priority: int) -> None:
    assert Caller(request_id="id", key=key, has_keys=key is not None).priority(requested) == priority


@pytest.mark.parametrize(
    ("key", "requested", "status"), [(ALICE, -6, 403), (BOB, 0, 403), (None, 2**40, 400), (None, -(2**40), 400)]
)
def test_forbidden_priority_is_refused_by_name(key: ApiKey | None, requested: int, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        Caller(request_id="id", key=key, has_keys=key is not None).priority(requested)
    assert (caught.value.status, caught.value.param) == (status, "priority")
    assert caught.value.code == ("priority_not_allowed" if status == 403 else None)


async def test_request_id_is_accepted_and_returned() -> None:
    async with client_of(FakeBackend()) as client:
        own = {"x-request-id": "a.b:c-1"}
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=own)
        assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-a.b:c-1", "a.b:c-1")
        for method, path, body in [("GET", "/nothing", b""), ("POST", "/v1/completions", b"{"), ("GET", "/healthz", b"")]:
            assert (await client.request(method, path, content=body, headers=own)).headers["x-request-id"] == "a.b:c-1"
        drawn = {(await client.get("/v1/models")).headers["x-request-id"] for _ in range(3)}
        assert len(drawn) == 3


@pytest.mark.parametrize("id", ["", "x" * 129, "a b", "é", "a\tb", '"'])
@pytest.mark.parametrize("path", ["/v1/models", "/healthz"])
async def test_a_request_id_that_cannot_be_logged_is_replaced(path: str, id: str) -> None:
    async with client_of(FakeBackend()) as client:
        answer = await client.get(path, headers=[(b"x-request-id", id.encode())])
    assert answer.status_code == 200
    assert len(answer.headers["x-request-id"]) == 32 and answer.headers.get_list("x-request-id") != [id]


class BrokenBackend(FakeBackend):
    def assets(self) -> wire.Assets:
        raise RuntimeError("a bug")


async def test_a_bug_is_answered_with_the_request_s_id() -> None:
    async with client_of(BrokenBackend()) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (500, ["mine"])


# Health


async def test_health_separates_liveness_from_readiness() -> None:
    backend = FakeBackend(not_ready="ranks load")
    expected: dict[str, Any] = {"alive": True, "ready": False, "reason": "ranks load", "incarnation": None, "ranks": []}
    async with client_of(backend) as client:
        answer = await client.get("/v1/health")
        assert (answer.status_code, answer.json()) == (503, expected)
        assert (await client.get("/healthz")).status_code == 200
        backend.reason = None
        answer = await client.get("/v1/health")
        assert (answer.status_code, answer.json()) == (200, {**expected, "ready": True, "reason": None})
