"""API keys in files: hashes, models, expiry, and several keys of one tenant."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys, KeysUnreadable, Quota, gather_keys
from phalanx_frontend.auth.caller import Caller, authenticate
from tests.frontend.fakes import FakeBackend, tiny_assets

ALICE = ApiKey("alice", "sk-alice", priority=-5)
HASH = "sha256:" + hashlib.sha256(b"sk-alice").hexdigest()
END = datetime(2030, 1, 1, tzinfo=UTC)
NAMES = ("tiny", "tiny-chat", "other")


def client_of(backend: FakeBackend, keys: list[ApiKey]) -> httpx.AsyncClient:
    app = create_app(backend, keys=ApiKeys(keys))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://api-server")


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=bearing(key))


def written(folder: Path, content: str) -> Path:
    file = folder / "keys"
    file.write_text(content)
    return file


@pytest.mark.parametrize(
    "content",
    [
        json.dumps([{"name": "alice", "key": "sk-alice", "priority": -5}, {"name": "bob", "key": "sk-bob"}]),
        "# who may ask\nalice sk-alice -5\n\nbob sk-bob # any priority\n",
    ],
    ids=["JSON", "lines"],
)
def test_keys_come_from_the_command_line_and_a_file(tmp_path: Path, content: str) -> None:
    keys = gather_keys(["one", "two"], written(tmp_path, content))
    assert [(key.name, key.key, key.priority) for key in keys] == [
        ("key-1", "one", None), ("key-2", "two", None), ("alice", "sk-alice", -5), ("bob", "sk-bob", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        "",
        "alice",
        "alice key high",
        "a b 1 c",
        "[1]",
        "[",
        "[" * 100_000,
        '[{"name": "a"}]',
        '[{"name": "a", "key": "k", "x": 1}]',
        '[{"name": "\\ud800", "key": "k"}]',
        "a k\nb k",
        "a k 2147483648",
        "a k concurrent=0",
        "a k concurrent=high",
        "a k requests=3",
        '[{"name": "a", "key": "k", "tokens_per_minute": 1.5}]',
        '[{"name": "a", "key": "k", "concurrent": true}]',
    ],
)
def test_unusable_key_file_is_refused_without_revealing_keys(tmp_path: Path, content: str) -> None:
    with pytest.raises(KeysUnreadable) as caught:
        gather_keys([], written(tmp_path, content))
    assert "high" not in str(caught.value)


@pytest.mark.parametrize("flag_keys", [[""], ["a b"], ["ключ"], ["same", "same"]])
def test_a_key_that_no_header_can_bring_is_refused(flag_keys: list[str]) -> None:
    with pytest.raises(KeysUnreadable):
        gather_keys(flag_keys, None)


def test_a_key_is_never_shown() -> None:
    assert "sk-alice" not in repr(ALICE) and "sk-alice" not in repr(Caller(request_id="id", key=ALICE, has_keys=True))


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(
            [{"name": "alice", "hash": HASH, "models": ["m", "n"], "expires": "2030-01-01T01:00:00+01:00", "tokens_per_day": 9}]
        ),
        f"alice {HASH} models=m,n expires=2030-01-01T00:00:00Z tokens_per_day=9",
    ],
    ids=["JSON", "line"],
)
def test_a_file_needs_only_the_hash(tmp_path: Path, content: str) -> None:
    [key] = gather_keys((), written(tmp_path, content))
    assert (key.name, key.key, key.models, key.expires, key.quota) == ("alice", "", ("m", "n"), END, Quota(tokens_per_day=9))
    keys = ApiKeys([key])
    assert keys.find(b"Bearer sk-alice") == key
    assert keys.find(f"Bearer {HASH}".encode()) is None, "a hash is no key"


@pytest.mark.parametrize(
    "content", ["team sk-old\nteam sk-new", '[{"name": "team", "key": "sk-old"}, {"name": "team", "key": "sk-new"}]']
)
async def test_two_keys_of_a_tenant_are_valid_together(tmp_path: Path, content: str) -> None:
    backend = FakeBackend()
    async with client_of(backend, gather_keys((), written(tmp_path, content))) as client:
        answers = [await complete(client, key) for key in ("sk-old", "sk-new", "sk-newer")]
    assert [answer.status_code for answer in answers] == [200, 200, 401]
    assert [request.tenant for request in backend.requests] == ["team", "team"]


# Expiry


@pytest.mark.parametrize(
    ("header", "before_s", "code"),
    [
        (b"Bearer sk-1", 1, None),
        (b"Bearer sk-1", 0, "api_key_expired"),
        (b"Bearer sk-1", -1, "api_key_expired"),
        (b"Bearer sk-2", -1, None),
        (b"Bearer sk-3", 1, "invalid_api_key"),
        (b"", 1, "invalid_api_key"),
    ],
)
async def test_a_key_is_valid_until_it_expires(header: bytes, before_s: int, code: str | None) -> None:
    keys = ApiKeys([ApiKey("team", "sk-1", expires=END), ApiKey("team", "sk-2")])
    _, refusal = await authenticate(keys, header, END.timestamp() - before_s)
    assert (None if refusal is None else (refusal.status, refusal.code)) == (None if code is None else (401, code))


async def test_an_expired_key_gets_401_with_its_end() -> None:
    backend = FakeBackend()
    expired = ApiKey("team", "sk-1", expires=datetime(2020, 1, 1, tzinfo=UTC))
    async with client_of(backend, [expired, ApiKey("team", "sk-2")]) as client:
        answer = await complete(client, "sk-1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "api_key_expired")
        assert answer.json()["error"]["message"] == "This API key expired at 2020-01-01T00:00:00+00:00: use another key of team."
        assert (await client.get("/metrics", headers={"authorization": "Bearer sk-1"})).status_code == 200
        assert (await complete(client, "sk-2")).status_code == 200
    assert len(backend.requests) == 1


# Models

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/generate", {"prompt": "x", "max_tokens": 1}),
    ("/v1/embeddings", {"input": "x"}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [3]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
async def test_a_key_may_use_only_its_models(path: str, body: dict[str, Any]) -> None:
    backend = FakeBackend(assets=tiny_assets(names=NAMES))
    async with client_of(backend, [ApiKey("a", "sk-a", models=("other", "unknown")), ApiKey("b", "sk-b")]) as client:
        statuses = [
            (await client.post(path, json=body | model, headers=bearing(key))).status_code
            for key in ("sk-a", "sk-b")
            for model in ({"model": "other"}, {"model": "tiny"}, {"model": "unknown"}, {})
        ]
        assert statuses == [200, 404, 404, 200, 200, 200, 404, 200]
        denied = (await client.post(path, json=body | {"model": "tiny"}, headers=bearing("sk-a"))).json()["error"]
    assert (denied["type"], denied["param"], denied["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert denied["message"] == "The model `tiny` does not exist or you do not have access to it."


async def test_models_lists_those_of_the_key() -> None:
    backend = FakeBackend(assets=tiny_assets(names=NAMES))
    async with client_of(backend, [ApiKey("a", "sk-a", models=("other",)), ApiKey("c", "sk-c", models=("x",))]) as client:
        listed = (await client.get("/v1/models", headers=bearing("sk-a"))).json()["data"]
        assert [card["id"] for card in listed] == ["other"]
        assert "tiny" not in str(listed), "the root of a model is no other name"
        assert (await client.get("/v1/models/other", headers=bearing("sk-a"))).status_code == 200
        assert (await client.get("/v1/models/tiny", headers=bearing("sk-a"))).status_code == 404
        assert (await client.get("/v1/models", headers=bearing("sk-c"))).json()["data"] == []
        assert (await complete(client, "sk-c")).status_code == 404
    assert not backend.requests


async def test_an_entry_of_a_batch_is_refused_alone() -> None:
    backend = FakeBackend(assets=tiny_assets(names=NAMES))
    entries = [{"prompt": "x", "max_tokens": 1, "model": model} for model in ("other", "tiny")]
    async with client_of(backend, [ApiKey("a", "sk-a", models=("other",))]) as client:
        answer = await client.post("/v1/batch", json={"requests": entries}, headers=bearing("sk-a"))
    first, second = answer.json()["responses"]
    assert "error" not in first and second["error"]["code"] == "model_not_found"
