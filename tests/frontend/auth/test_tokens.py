"""Tokens of an issuer: which are accepted, what they permit, and which are refused."""

import json
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import FastAPI
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.caller import authenticate
from phalanx_frontend.auth.oidc import OidcSettings
from phalanx_frontend.auth.tokens import LEEWAY_S, MAX_TOKEN_BYTES, IssuerTokens, permissions
from phalanx_frontend.errors import ApiError
from phalanx_frontend.logs import JsonFormatter
from tests.frontend.auth.issuer import AUDIENCE, Issuer, encoded, jwk, public_key, running_issuer, signed
from tests.frontend.fakes import FakeBackend, tiny_assets

KINDS = ["RS256 old", "PS384 b", "ES256 c", "ES384 d", "ES512 e", "EdDSA f"]
FUTURE = 4_000_000_000


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    """An issuer that publishes a key of each kind."""
    with running_issuer() as running:
        running.keys = [jwk(kind) for kind in KINDS]
        yield running


@pytest.fixture(scope="module")
def verifier(issuer: Issuer) -> IssuerTokens:
    """A verifier whose clock is at rest: it reads the keys once."""
    return IssuerTokens(issuer.settings(), clock=lambda: 0.0)


@pytest.fixture(scope="module")
def server(verifier: IssuerTokens) -> FastAPI:
    """An API server with a key, which also accepts the tokens."""
    return create_app(FakeBackend(), keys=ApiKeys([ApiKey("team", "sk-1")], verifier))


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server")


def forged(issuer: Issuer, algorithm: str, secret: bytes) -> str:
    """A token whose `kid` names a key of the issuer, with a signature of the secret, or none."""
    hmac = jwt.get_algorithm_by_name("HS256")
    return signed(issuer.claims(), {"kid": "RS256 old"}, algorithm, lambda text: hmac.sign(text, secret) if secret else b"")


def public_pem() -> bytes:
    return public_key("RS256 old").public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_of_each_algorithm_is_accepted(issuer: Issuer, verifier: IssuerTokens, kind: str) -> None:
    key = await verifier.verify(issuer.token(kind).encode())
    assert (key.name, key.models, key.priority, key.quota) == ("oidc:alice", None, None, None)


BAD: list[tuple[str, Any, str]] = [
    ("no algorithm", lambda i: forged(i, "none", b""), "algorithm that is not allowed"),
    ("None", lambda i: forged(i, "None", b""), "algorithm that is not allowed"),
    ("the public key as secret", lambda i: forged(i, "HS256", public_pem()), "algorithm that is not allowed"),
    ("a secret under RS256", lambda i: forged(i, "RS256", public_pem()), "signature"),
    ("ES256K", lambda i: forged(i, "ES256K", b"x"), "algorithm that is not allowed"),
    ("an algorithm of another key", lambda i: i.token("ES256 c", header={"kid": "RS256 old"}), "does not publish"),
    ("another key", lambda i: i.token("RS256 unpublished", header={"kid": "RS256 old"}), "signature"),
    ("an unknown key", lambda i: i.token("RS256 unpublished"), "does not publish"),
    ("no kid, several keys", lambda i: i.token(header={"kid": None}), "does not publish"),
    ("another issuer", lambda i: i.token(iss="https://other.example"), "another issuer"),
    ("no issuer", lambda i: i.token(iss=None), "no claim iss"),
    ("another audience", lambda i: i.token(aud="other"), "another audience"),
    ("a longer audience", lambda i: i.token(aud=AUDIENCE + "x"), "another audience"),
    ("other audiences", lambda i: i.token(aud=["other", "more"]), "another audience"),
    ("no audience", lambda i: i.token(aud=None), "no claim aud"),
    ("an audience of numbers", lambda i: i.token(aud=[1]), "another audience"),
    ("expired", lambda i: i.token(exp=int(time.time() - LEEWAY_S - 5)), "has expired"),
    ("no expiry", lambda i: i.token(exp=None), "no claim exp"),
    ("an expiry in words", lambda i: i.token(exp="tomorrow"), "exp is not a time"),
    ("an expiry without end", lambda i: i.token(exp=1e300), "exp is not a time"),
    ("a true expiry", lambda i: i.token(exp=True), "exp is not a time"),
    ("not yet", lambda i: i.token(nbf=FUTURE), "not valid yet"),
    ("issued later", lambda i: i.token(iat=FUTURE), "not valid yet"),
    ("no tenant", lambda i: i.token(sub=None), "no claim sub"),
    ("an empty tenant", lambda i: i.token(sub=""), "sub is not a printable text"),
    ("a tenant of two lines", lambda i: i.token(sub="a\nb"), "sub is not a printable text"),
    ("a long tenant", lambda i: i.token(sub="a" * 257), "sub is not a printable text"),
    ("a logout token", lambda i: i.token(header={"typ": "logout+jwt"}), "another type"),
    ("critical extensions", lambda i: i.token(header={"crit": ["exp"], "exp": 1}), "critical extensions"),
    ("a deep header", lambda i: f"{encoded(b'[' * 9000)}.e30.e30", "malformed"),
    ("a long token", lambda i: i.token(more="x" * MAX_TOKEN_BYTES), "malformed"),
    ("no JSON", lambda i: "a.b.c", "malformed"),
    ("empty parts", lambda i: "..", "malformed"),
    ("padding", lambda i: i.token() + "==", "malformed"),
    ("an ignored character", lambda i: i.token() + "!", "malformed"),
]


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_a_bad_token_is_refused_with_its_reason(
    issuer: Issuer, server: FastAPI, make: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    token = make(issuer)
    async with client_of(server) as client:
        answer = await client.get("/v1/models", headers={"authorization": f"Bearer {token}"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (401, "invalid_request_error")
    assert error["code"] == ("token_expired" if "expired" in words else "invalid_token")
    assert words in error["message"] and error["message"].endswith(".")
    assert answer.headers["www-authenticate"] == f'Bearer error="invalid_token", error_description="{error["message"]}"'
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("phalanx")]
    audit = [json.loads(line) for line in lines if '"phalanx.audit"' in line]
    assert [(line["verb"], line["outcome"], line["why"]) for line in audit] == [
        ("authenticate", "refused", error["message"][:200])
    ]
    assert audit[0]["caller"] == ("oidc:alice" if "expired" in words else ""), "only verified claims are logged"
    assert not any(part in line for line in lines for part in token.split(".") if len(part) > 8)


@pytest.mark.parametrize(
    ("header", "challenge"), [({}, "Bearer"), ({"authorization": "Basic x"}, 'Bearer error="invalid_token"')]
)
async def test_a_request_without_a_token_is_refused(server: FastAPI, header: dict[str, str], challenge: str) -> None:
    async with client_of(server) as client:
        answer = await client.get("/v1/models", headers=header)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"].startswith(challenge)
        assert (await client.get("/healthz")).status_code == 200


@given(data=st.data())
@settings(deadline=None, max_examples=150)
async def test_every_mutation_of_a_token_is_refused(issuer: Issuer, verifier: IssuerTokens, data: st.DataObject) -> None:
    token = bytearray(issuer.token(data.draw(st.sampled_from(KINDS))).encode())
    original = bytes(token)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(token) - 1))
        match data.draw(st.sampled_from(["replace", "insert", "delete"])):
            case "replace":
                token[position] = data.draw(st.sampled_from(b"ABCDwxyz0189-_.=!"))
            case "insert":
                token.insert(position, data.draw(st.sampled_from(b"Az09-_.=! ")))
            case _:
                del token[position]
    assume(bytes(token) != original)
    assert (await verifier.verify(original)).name == "oidc:alice"
    with pytest.raises(ApiError) as caught:
        await verifier.verify(bytes(token))
    assert (caught.value.status, caught.value.code) == (401, "invalid_token")


@pytest.mark.parametrize(
    ("claims", "fields", "expected"),
    [
        ({"sub": "a"}, {}, ("oidc:a", None, None)),
        ({"team": "b"}, {"tenant_claim": "team"}, ("oidc:b", None, None)),
        ({"sub": "a", "m": ["x", "y"]}, {"models_claim": "m"}, ("oidc:a", ("x", "y"), None)),
        ({"sub": "a", "m": "x"}, {"models_claim": "m"}, ("oidc:a", ("x",), None)),
        ({"sub": "a", "m": []}, {"models_claim": "m"}, ("oidc:a", (), None)),
        ({"sub": "a", "p": -3}, {"priority_claim": "p"}, ("oidc:a", None, -3)),
        ({"email": "a@b", "email_verified": True}, {"tenant_claim": "email"}, ("oidc:a@b", None, None)),
        ({"sub": "a", "hd": "b", "groups": ["c", "d"]}, {"required": (("hd", "b"), ("groups", "d"))}, ("oidc:a", None, None)),
    ],
)
def test_permissions_come_from_claims(claims: dict[str, Any], fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    key = permissions(claims | {"exp": FUTURE}, OidcSettings(issuer="https://a", audiences=("b",), **fields))
    assert (key.name, key.models, key.priority) == expected
    assert key.expires == datetime.fromtimestamp(FUTURE + LEEWAY_S, UTC)


@pytest.mark.parametrize(
    ("claims", "fields"),
    [
        ({"sub": 1}, {}),
        ({"sub": "a"}, {"models_claim": "m"}),
        ({"sub": "a", "m": [1]}, {"models_claim": "m"}),
        ({"sub": "a", "m": None}, {"models_claim": "m"}),
        ({"sub": "a"}, {"priority_claim": "p"}),
        ({"sub": "a", "p": "1"}, {"priority_claim": "p"}),
        ({"sub": "a", "p": True}, {"priority_claim": "p"}),
        ({"email": "a@b", "email_verified": False}, {"tenant_claim": "email"}),
        ({"email": "a@b"}, {"tenant_claim": "email"}),
        ({"sub": "a"}, {"required": (("hd", "b"),)}),
        ({"sub": "a", "hd": "bc"}, {"required": (("hd", "b"),)}),
        ({"sub": "a", "hd": {"b": 1}}, {"required": (("hd", "b"),)}),
    ],
)
def test_a_token_without_a_configured_claim_is_refused(claims: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        permissions(claims | {"exp": FUTURE}, OidcSettings(issuer="https://a", audiences=("b",), **fields))
    assert (caught.value.status, caught.value.code) == (401, "invalid_token")


async def test_keys_and_tokens_are_accepted_side_by_side(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend, registry = FakeBackend(assets=tiny_assets(names=("tiny", "other"))), CollectorRegistry()
    tokens = IssuerTokens(issuer.settings(models_claim="models", priority_claim="priority"))
    keys = ApiKeys([ApiKey("alice", "sk-alice"), ApiKey("jwt", "a.b.c")], tokens)
    app = create_app(backend, keys=keys, registry=registry, has_tenant_metrics=True)
    limited = issuer.token(models=["other"], priority=3)
    async with client_of(app) as client:

        async def complete(key: str, **fields: Any) -> tuple[int, str | None]:
            body = {"prompt": "x", "max_tokens": 1, "user": "eve"} | fields
            answer = await client.post("/v1/completions", json=body, headers={"authorization": f"bearer {key}"})
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert await complete("sk-alice") == (200, None)
        assert await complete("a.b.c") == (200, None), "a key may have the form of a token"
        assert await complete(limited, model="other") == (200, None)
        assert await complete(limited, model="tiny") == (404, "model_not_found")
        assert await complete(limited, model="other", priority=2) == (403, "priority_not_allowed")
        names = await client.get("/v1/models", headers={"authorization": f"Bearer {limited}"})
        assert [model["id"] for model in names.json()["data"]] == ["other"]
        metrics = (await client.get("/metrics")).text
    assert [request.tenant for request in backend.requests] == ["alice", "jwt", "oidc:alice"]
    assert [request.priority for request in backend.requests] == [0, 0, 3]
    assert 'tenant="oidc:alice"' in metrics and 'tenant="alice"' in metrics
    lines = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "phalanx.audit"]
    assert [(line["verb"], line["object"], line["caller"]) for line in lines] == [
        ("use", "models/tiny", "oidc:alice"),
        ("use", "priority/2", "oidc:alice"),
    ]


async def test_a_verified_token_is_refused_once_it_has_expired(issuer: Issuer, verifier: IssuerTokens) -> None:
    keys, expiry = ApiKeys((), verifier), int(time.time()) + 100
    header = f"Bearer {issuer.token(exp=expiry)}".encode()
    for unix_s, is_refused in [(expiry - 1, False), (expiry + LEEWAY_S - 1, False), (expiry + LEEWAY_S, True)]:
        key, refusal = await authenticate(keys, header, unix_s)
        assert key is not None and key.name == "oidc:alice"
        assert (refusal.code if refusal is not None else "") == ("token_expired" if is_refused else "")
