"""Keys of an issuer: discovery, rotation, an issuer that is away, and documents that are unusable."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from phalanx_frontend.app import create_app
from phalanx_frontend.auth import tokens
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.caller import accepted_keys
from phalanx_frontend.auth.tokens import (
    MAX_AGE_S,
    MAX_DOCUMENT_BYTES,
    UNKNOWN_KEY_INTERVAL_S,
    IssuerTokens,
    KeysUnusable,
    parse_keys,
)
from phalanx_frontend.errors import ApiError
from tests.frontend.auth.issuer import KEYS, Issuer, jwk, private_key, running_issuer
from tests.frontend.fakes import FakeBackend
from tests.frontend.serving import served
from tests.polling import until

OLD, NEW = "ES256 old", "ES256 new"


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with running_issuer() as running:
        running.keys = [jwk(OLD)]
        yield running


async def outcome(verifier: IssuerTokens, token: str) -> str:
    """Returns the tenant, or the code of the error."""
    try:
        return (await verifier.verify(token.encode())).name
    except ApiError as error:
        return str(error.code)


async def test_a_rotation_of_keys_has_no_gap(issuer: Issuer) -> None:
    clock = Clock()
    verifier, old, new = IssuerTokens(issuer.settings(), clock), issuer.token(OLD), issuer.token(NEW)
    assert await outcome(verifier, old) == "oidc:alice"
    issuer.keys = [jwk(OLD), jwk(NEW)]
    clock.now += UNKNOWN_KEY_INTERVAL_S
    assert [await outcome(verifier, token) for token in (new, old)] == ["oidc:alice"] * 2
    assert issuer.num_reads == 2, "the first token of the new key causes a read"
    issuer.keys = [jwk(NEW)]
    assert await outcome(verifier, old) == "oidc:alice"
    clock.now += UNKNOWN_KEY_INTERVAL_S
    assert await outcome(verifier, issuer.token("ES256 third")) == "invalid_token"
    assert [await outcome(verifier, token) for token in (new, old)] == ["oidc:alice", "invalid_token"], "also a cached one"


async def test_many_unknown_keys_cause_one_read(issuer: Issuer) -> None:
    clock, issuer.delay_s = Clock(), 0.1
    verifier = IssuerTokens(issuer.settings(), clock)
    strange = [issuer.token("ES256 strange", header={"kid": f"k{number}"}) for number in range(20)]
    good = [outcome(verifier, issuer.token(OLD, sub=f"user-{number}")) for number in range(20)]
    found = await asyncio.gather(*good, *(outcome(verifier, token) for token in strange))
    assert found == [f"oidc:user-{number}" for number in range(20)] + ["invalid_token"] * 20
    assert issuer.num_reads == 1
    clock.now += UNKNOWN_KEY_INTERVAL_S - 1
    assert (await outcome(verifier, strange[0]), issuer.num_reads) == ("invalid_token", 1)
    clock.now += 1
    assert (await outcome(verifier, strange[0]), issuer.num_reads) == ("invalid_token", 2)


async def test_keys_work_while_the_issuer_is_away(issuer: Issuer) -> None:
    clock, issuer.status = Clock(), 500
    app = create_app(FakeBackend(), keys=ApiKeys([ApiKey("team", "sk-1")], IssuerTokens(issuer.settings(), clock)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:

        async def models(key: str) -> httpx.Response:
            return await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})

        refused = await models(issuer.token(OLD))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "issuer_unavailable")
        assert int(refused.headers["retry-after"]) > 0 and "www-authenticate" not in refused.headers
        assert (await models("sk-1")).status_code == 200
        issuer.status = 200
        clock.now += UNKNOWN_KEY_INTERVAL_S
        assert (await models(issuer.token(OLD))).status_code == 200


async def test_the_last_keys_are_kept_for_a_day(issuer: Issuer) -> None:
    clock = Clock()
    verifier, token = IssuerTokens(issuer.settings(), clock), issuer.token(OLD)
    assert await outcome(verifier, token) == "oidc:alice"
    issuer.status = 503
    clock.now += MAX_AGE_S - 1
    assert await outcome(verifier, issuer.token(OLD, sub="bob")) == "oidc:bob"
    assert await outcome(verifier, issuer.token(NEW)) == "invalid_token"
    clock.now += UNKNOWN_KEY_INTERVAL_S
    assert await outcome(verifier, token) == "issuer_unavailable"


UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("long", {"content": b" " * (MAX_DOCUMENT_BYTES + 1)}, "more than 262144 bytes"),
    ("many keys", {"keys": [jwk(OLD, kid=str(number)) for number in range(101)]}, "more than 100 are not read"),
    ("no key", {"keys": []}, "none of the 0 keys"),
    ("no usable key", {"keys": [{"kty": "oct", "kid": OLD, "k": "AAAA", "alg": "HS256"}]}, "none of the 1 keys"),
    ("no JSON", {"content": b"<html>"}, "not a JSON Web Key Set"),
    ("a list", {"content": b"[]"}, "not a JSON Web Key Set"),
    ("deep", {"content": b"[" * 100_000}, "not a JSON Web Key Set"),
    ("compressed", {"content": b"\x1f\x8b\x08\x00", "headers": {"content-encoding": "gzip"}}, "not a JSON Web Key Set"),
    ("a status", {"status": 404}, "returned the status 404"),
    ("a redirect", {"status": 302, "headers": {"location": KEYS}}, "returned the status 302"),
    ("another issuer", {"configuration": {"issuer": "https://other.example"}}, "that of the issuer https://other.example"),
    ("keys without TLS", {"configuration": {"jwks_uri": "http://192.0.2.1/keys"}}, "is not an https URL"),
    ("keys in a file", {"configuration": {"jwks_uri": "file:///keys"}}, "is not an https URL"),
    ("no keys", {"configuration": {"jwks_uri": 1}}, "not the configuration of an issuer"),
    ("slow", {"delay_s": 1.0}, "no answer within 0.2 s"),
]


@pytest.mark.parametrize(("fields", "words"), [row[1:] for row in UNUSABLE], ids=[row[0] for row in UNUSABLE])
async def test_unusable_documents_change_no_key(
    issuer: Issuer, fields: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    verifier = IssuerTokens(issuer.settings(), clock)
    assert await outcome(verifier, issuer.token(OLD)) == "oidc:alice"
    monkeypatch.setattr(tokens, "FETCH_S", 0.2 if "slow" in str(words) or fields.get("delay_s") else 5.0)
    for name, value in fields.items():
        setattr(issuer, name, value)
    clock.now += UNKNOWN_KEY_INTERVAL_S
    assert await outcome(verifier, issuer.token(NEW)) == "invalid_token"
    assert await outcome(verifier, issuer.token(OLD, sub="bob")) == "oidc:bob"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert words in vars(record)["why"]


def private_numbers(kind: str) -> dict[str, Any]:
    """The key with its private part, which an issuer publishes by mistake."""
    key: Any = private_key(kind)
    return {"d": f"{key.private_numbers().private_value:x}"}


@pytest.mark.parametrize(
    ("entry", "algorithms"),
    [
        (jwk("RS256 a"), ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")),
        (jwk("RS256 a", alg="PS256"), ("PS256",)),
        (jwk("ES384 a"), ("ES384",)),
        (jwk("EdDSA a"), ("EdDSA",)),
        (jwk(OLD, **private_numbers(OLD)), ("ES256",)),
        (jwk(OLD, key_ops=["verify"], use=None, x5c=["x"], other={"a": 1}), ("ES256",)),
        (jwk(OLD, key_ops=["sign"]), None),
        (jwk("RS256 a", use="enc", alg="RSA-OAEP"), None),
        (jwk("RS256 a", alg="HS256"), None),
        (jwk("RS256 a", alg="ES256"), None),
        (jwk("RS256 a", n="AQAB"), None),
        (jwk("RS256 a", e="AQ"), None),
        (jwk("RS256 a", n="!"), None),
        (jwk(OLD, x=jwk(NEW)["x"]), None),
        (jwk(OLD, crv="P-384"), None),
        (jwk(OLD, crv="secp256k1"), None),
        (jwk("EdDSA a", crv="X25519"), None),
        (jwk("EdDSA a", x="AA"), None),
        ({"kty": "oct", "k": "AAAA", "alg": "HS256"}, None),
        ({"kid": "no type"}, None),
        (jwk(OLD, kid=7), None),
        ("text", None),
    ],
)
def test_keys_of_a_set_table(entry: Any, algorithms: tuple[str, ...] | None) -> None:
    document = json.dumps({"keys": [entry]}).encode()
    if algorithms is None:
        with pytest.raises(KeysUnusable):
            parse_keys(document)
        [key] = parse_keys(json.dumps({"keys": [entry, jwk(NEW)]}).encode())
        assert key.jwk.kid == NEW, "others are used"
    else:
        [key] = parse_keys(document)
        assert key.algorithms == algorithms and "PrivateKey" not in type(key.public).__name__


async def test_a_token_needs_no_kid_with_one_key(issuer: Issuer) -> None:
    verifier = IssuerTokens(issuer.settings())
    assert await outcome(verifier, issuer.token(OLD, header={"kid": None})) == "oidc:alice"


async def test_a_jwks_uri_needs_no_discovery(issuer: Issuer) -> None:
    issuer.configuration = {"issuer": "https://other.example"}
    verifier = IssuerTokens(issuer.settings(jwks_uri=issuer.url + KEYS))
    assert await outcome(verifier, issuer.token(OLD)) == "oidc:alice"


async def test_a_server_reads_keys_before_and_between_requests(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "REFRESH_S", 0.02)
    async with served(create_app(FakeBackend(), keys=accepted_keys((), issuer.settings()))) as url:
        await until(lambda: issuer.num_reads >= 3)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            answer = await http.get("/v1/models", headers={"authorization": f"Bearer {issuer.token(OLD)}"})
        assert answer.status_code == 200
    await asyncio.sleep(0.1)  # the issuer counts a read when it arrives, perhaps after the server's end
    reads = issuer.num_reads
    await asyncio.sleep(0.1)
    assert issuer.num_reads == reads, "a server that has ended reads no more"
