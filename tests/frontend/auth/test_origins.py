"""Calls of web pages from browsers, over HTTP: preflights, and the headers of answers, errors and streams."""

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.origins import EXPOSED_HEADERS, add_origin_flag, with_origins
from phalanx_frontend.backend import BackendError
from tests.frontend.fakes import FakeBackend, Step, text_script
from tests.frontend.serving import served

PAGE, FOREIGN = "https://chat.example", "https://evil.example"
KEY = {"authorization": "Bearer sk-1"}
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
BODY = {"prompt": "x", "max_tokens": 3}
ALLOWED, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"


@asynccontextmanager
async def client_of(*origins: str, backend: FakeBackend | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a server with a key."""
    app = create_app(backend or FakeBackend(text_script("once upon a time")), keys=ApiKeys([ApiKey("team", "sk-1")]))
    async with served(with_origins(app, origins)) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
        yield client


def read(*flags: str) -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    add_origin_flag(parser)
    allowed: tuple[str, ...] = parser.parse_args(flags).allowed_origins
    return allowed


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/tokenize", "/nothing"])
async def test_a_preflight_needs_no_key(path: str) -> None:
    async with client_of(PAGE, "http://localhost:3000") as client:
        for origin in (PAGE, "http://localhost:3000"):
            answer = await client.options(path, headers=ASKED | {"origin": origin})
            assert (answer.status_code, answer.headers[ALLOWED]) == (200, origin)
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "origin" in answer.headers["vary"].lower()
            assert "access-control-allow-credentials" not in answer.headers


async def test_a_preflight_for_private_networks_is_answered() -> None:
    """A browser asks so before a public page calls a server at a private address."""
    async with client_of(PAGE) as client:
        headers = ASKED | {"origin": PAGE, "access-control-request-private-network": "true"}
        answer = await client.options("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-private-network"]) == (200, "true")


async def test_a_foreign_origin_is_not_allowed() -> None:
    async with client_of(PAGE) as client:
        preflight = await client.options("/v1/completions", headers=ASKED | {"origin": FOREIGN})
        assert preflight.status_code == 400 and ALLOWED not in preflight.headers
        for headers in ({"origin": FOREIGN}, {"origin": f"{PAGE}.evil.example"}, {"origin": "null"}, {}):
            answer = await client.post("/v1/completions", json=BODY, headers=KEY | headers)
            assert answer.status_code == 200 and ALLOWED not in answer.headers, "other clients need no header"
            assert "origin" in answer.headers["vary"].lower(), "for caches"


async def test_answers_and_errors_have_the_headers() -> None:
    async with client_of(PAGE) as client:
        page = {"origin": PAGE}
        answers = [
            await client.post("/v1/completions", json=BODY, headers=KEY | page),
            await client.post("/v1/completions", json=BODY, headers=page),
            await client.post("/v1/completions", json={}, headers=KEY | page),
            await client.get("/nothing", headers=KEY | page),
            await client.get("/v1/completions", headers=KEY | page),
        ]
        assert [answer.status_code for answer in answers] == [200, 401, 400, 404, 405]
        for answer in answers:
            assert answer.headers[ALLOWED] == PAGE and answer.headers[EXPOSED] == ", ".join(EXPOSED_HEADERS)
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status"), [(BackendError(503, "full", "full", retry_after_s=2), 503), (RuntimeError("a bug"), 500)]
)
async def test_failures_have_the_headers(error: Exception, status: int) -> None:
    """An internal error is sent outside of all middleware of the application."""

    def script(request: wire.Request) -> Sequence[Step]:
        return [error]

    async with client_of(PAGE, backend=FakeBackend(script)) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=KEY | {"origin": PAGE})
        assert (answer.status_code, answer.headers[ALLOWED]) == (status, PAGE)
        assert "retry-after" in answer.headers[EXPOSED]


async def test_streams_have_the_headers() -> None:
    async with client_of(PAGE) as client:
        headers = KEY | {"origin": PAGE}
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers) as answer:
            assert answer.headers[ALLOWED] == PAGE and answer.headers["content-type"].startswith("text/event-stream")
            assert [line async for line in answer.aiter_lines() if line][-1] == "data: [DONE]"


async def test_all_origins_may_be_allowed() -> None:
    async with client_of("*") as client:
        preflight = await client.options("/v1/completions", headers=ASKED | {"origin": FOREIGN})
        assert (preflight.status_code, preflight.headers[ALLOWED]) == (200, "*")
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type", "* would not be the key's"
        answer = await client.post("/v1/completions", json=BODY, headers=KEY | {"origin": FOREIGN})
        assert answer.headers[ALLOWED] == "*"


async def test_by_default_no_origin_is_allowed() -> None:
    async with client_of(*read()) as client:
        assert (await client.options("/v1/completions", headers=ASKED | {"origin": PAGE})).status_code == 401
        answer = await client.post("/v1/completions", json=BODY, headers=KEY | {"origin": PAGE})
        assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", ("*",)),
        ('["*"]', ("*",)),
        ("https://chat.example", (PAGE,)),
        ("HTTPS://Chat.Example:443, http://a:80,https://chat.example,", (PAGE, "http://a")),
        ('["https://chat.example", "http://a:8080"]', (PAGE, "http://a:8080")),
        (
            "http://[::1]:3000,chrome-extension://abc,http://a:443",
            ("http://[::1]:3000", "chrome-extension://abc", "http://a:443"),
        ),
        ("", ()),
        ("[]", ()),
    ],
)
def test_origins_are_as_browsers_send_them(text: str, expected: tuple[str, ...]) -> None:
    assert read(f"--allowed-origins={text}") == expected


@pytest.mark.parametrize(
    "text", ["chat.example", "https://chat.example/", "https://*.example", "https://a b", "null", '["a"', "[1]", "https://a:x"]
)
def test_what_is_no_origin_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(f"--allowed-origins={text}")
    assert "--allowed-origins" in (message := capsys.readouterr().err) and text.strip("[]") in message
