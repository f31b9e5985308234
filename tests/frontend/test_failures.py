"""Failing scripts and refused bodies: every error has OpenAI's form."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import Delta, KeepAlive
from phalanx_frontend.limits import Limits
from tests.frontend.fakes import FakeBackend, Step, tiny_assets, token_ids
from tests.frontend.posting import FULL, client_of, events, post, scripted


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_refusal_before_the_first_token_has_its_status(is_streamed: bool) -> None:
    answer = await post(scripted(FULL), stream=is_streamed)
    assert answer.status_code == 429
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2200")
    assert answer.json()["error"] == {
        "message": "too many requests wait", "type": "rate_limit_error", "param": None, "code": "queue_full"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([Delta(index=0, tokens=token_ids("a")), FULL], "queue_full"),
        ([Delta(index=0, tokens=token_ids("a")), RuntimeError("a bug")], "internal_error"),
        ([Delta(index=0, tokens=token_ids("a"))], "internal_error"),
        ([Delta(index=0, tokens=token_ids("a")), Delta(index=2, tokens=token_ids("b"), finish="length")], "internal_error"),
        ([KeepAlive(), FULL], "queue_full"),
    ],
    ids=["refusal", "bug", "end without a reason", "a token is missing", "refusal after a comment"],
)
async def test_failure_after_the_first_byte_is_an_event(steps: list[Step], code: str) -> None:
    answer = await post(scripted(*steps), stream=True)
    assert answer.status_code == 200
    assert json.loads(events(answer)[-1])["error"]["code"] == code


async def test_a_bug_of_the_backend_is_a_500() -> None:
    answer = await post(scripted(Delta(index=0, tokens=token_ids("a")), RuntimeError("a bug")))
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_a_bug_outside_the_answer_is_a_500_too() -> None:
    class Broken(FakeBackend):
        def assets(self) -> wire.Assets:
            raise RuntimeError("a bug")

    answer = await post(Broken())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
    ids=lambda value: str(value),
)
async def test_a_bad_field_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    answer = await post(backend, path, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not backend.requests


@pytest.mark.parametrize(
    ("template", "code"),
    [(None, "no_chat_template"), ("{% if %}", "no_chat_template"), ("{{ raise_exception('no') }}", None), ("", None)],
    ids=["none", "broken", "refuses", "empty prompt"],
)
async def test_a_conversation_without_a_working_template_is_refused(template: str | None, code: str | None) -> None:
    backend = FakeBackend(assets=tiny_assets(chat_template=template))
    answer = await post(backend, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_a_body_over_the_limit_is_refused() -> None:
    async with client_of(FakeBackend(), Limits(max_body_bytes=100)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x" * 100})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_bodies_of_open_requests_have_bounded_memory() -> None:
    """Also those that never end, and of each tenant: another one gets half of what is free."""
    keys, go = ApiKeys([ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2")]), asyncio.Event()
    app = create_app(FakeBackend(), limits=Limits(max_open_bytes=1000), keys=keys)

    async def half() -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"x" * 400
        await go.wait()
        yield b'"}'

    async def post_as(key: str, content: AsyncIterator[bytes] | bytes) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post("/v1/completions", content=content, headers=headers)

    body = b'{"prompt": "%s"}' % (b"x" * 100)
    slow = asyncio.create_task(post_as("sk-1", half()))
    await asyncio.sleep(0.1)
    refused = await post_as("sk-1", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "body_memory_full")
    assert refused.headers["retry-after"] == "1"
    assert (await post_as("sk-2", body)).status_code == 200
    go.set()
    assert (await slow).status_code == 200
    assert (await post_as("sk-1", body)).status_code == 200


@pytest.mark.parametrize(
    "content", ["prompt=x", '{"prompt": "x"}', "\xff", ""], ids=["form", "JSON as text", "no text", "nothing"]
)
async def test_a_body_that_is_no_json_is_refused(content: str) -> None:
    async with client_of(FakeBackend()) as client:
        answer = await client.post("/v1/completions", content=content.encode("latin-1"), headers={"content-type": "text/plain"})
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
        broken = await client.post("/v1/completions", content=b"\xff", headers={"content-type": "application/json"})
        assert broken.status_code == 400


@pytest.mark.parametrize("prompt", [[1, 40], "Once upon a time"], ids=["ids", "text"])
async def test_token_without_embedding_is_refused(prompt: Any) -> None:
    backend = FakeBackend(assets=tiny_assets(vocab_size=2))
    response = await post(backend, prompt=prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert not backend.requests


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": [2**70]}, {"stop_token_ids": [1] * 129}, {"top_k": 2**70}],
    ids=["stop id too large", "too many stop ids", "top_k too large"],
)
async def test_numbers_that_no_frame_can_carry_are_refused(fields: dict[str, Any]) -> None:
    backend = FakeBackend()
    response = await post(backend, **fields)
    assert (response.status_code, response.json()["error"]["param"].partition("[")[0]) == (400, next(iter(fields)))
    assert not backend.requests
