"""The Messages API, read by the `anthropic` client: blocks of streamed and whole answers, tools, thinking, errors."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from phalanx_api import wire
from phalanx_frontend.anthropic.schemas import MAX_MESSAGES
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.errors import ApiError, anthropic_error_body
from tests.frontend.fakes import FakeBackend, text_script, tiny_assets, tiny_tokenizer, token_ids
from tests.frontend.serving import served
from tests.frontend.tool_chat import ANSWER, CALL, TOOLS_TEMPLATE

TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
USER: Any = [{"role": "user", "content": "weather?"}]
CONVERSATION = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}"
    "{{ m.tool_call_id }}{{ m.reasoning_content }}]{% endfor %}{{ enable_thinking }}"
)
SECRET = "a-key-of-forty-characters-for-the-tests!"


@asynccontextmanager
async def messages_client(
    text: str, finish: wire.FinishReason = "stop", template: str = TOOLS_TEMPLATE, **fields: Any
) -> AsyncIterator[tuple[AsyncAnthropic, FakeBackend]]:
    """Yields a client of an API server with a model that generates this text."""
    backend = FakeBackend(text_script(text, finish=finish), tiny_assets(chat_template=template))
    async with (
        served(create_app(backend, **fields)) as url,
        AsyncAnthropic(base_url=url, api_key=SECRET, max_retries=0) as client,
    ):
        yield client, backend


async def whole(client: AsyncAnthropic, **fields: Any) -> dict[str, Any]:
    """Returns the message, with the input of calls as JSON text and without ids."""
    fields = {"max_tokens": 64, "messages": USER, **fields}
    return shown((await client.messages.create(model="tiny", **fields)).model_dump())


async def streamed(client: AsyncAnthropic, **fields: Any) -> dict[str, Any]:
    """Returns the same, accumulated by the client from events."""
    fields = {"max_tokens": 64, "messages": USER, **fields}
    async with client.messages.stream(model="tiny", **fields) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content)
    return shown(message.model_dump())


def shown(message: dict[str, Any]) -> dict[str, Any]:
    assert message["type"] == "message" and message["role"] == "assistant" and message["id"].startswith("msg_")
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) and all(id.startswith("toolu_") for id in ids)
    names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    blocks = [(block["type"], block[names[block["type"]]]) for block in message["content"]]
    reasons = {"stop": message["stop_reason"], "sequence": message["stop_sequence"]}
    counts = {name: message["usage"][name] for name in ("input_tokens", "output_tokens", "cache_read_input_tokens")}
    return {"blocks": blocks, **reasons, **counts}


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize("written", ['{"n": 123456789012345678901234567890}', '{"a": 1, "a": 2.50}', "{}"])
async def test_input_is_what_the_model_wrote(run: Any, written: str) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call>'
    async with messages_client(call) as (client, _):
        assert (await run(client, tools=[TOOL]))["blocks"] == [("tool_use", json.loads(written))]


@pytest.mark.parametrize("run", [whole, streamed])
async def test_answer_has_a_block_for_each_part(run: Any) -> None:
    call = ("tool_use", json.loads(CALL)["arguments"])
    async with messages_client(ANSWER) as (client, backend):
        answer = await run(client, tools=[TOOL])
        prompt = backend.requests[0].prompt
    assert answer["blocks"] == [("thinking", "hm, a tool"), ("text", "Let me look."), call, call]
    assert (answer["stop"], answer["sequence"]) == ("tool_use", None)
    assert answer["input_tokens"] + answer["cache_read_input_tokens"] == len(prompt) and answer["output_tokens"] > 10


@pytest.mark.parametrize("run", [whole, streamed])
async def test_second_call_is_left_out_on_request(run: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    async with messages_client(ANSWER) as (client, _):
        answer = await run(client, tools=[TOOL], tool_choice=choice)
    assert [kind for kind, _ in answer["blocks"]] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize(
    ("finish", "fields", "expected"),
    [
        ("stop", {}, ("end_turn", None, "one two three")),
        ("length", {}, ("max_tokens", None, "one two three")),
        ("stop", {"stop_sequences": ["two", "never"]}, ("stop_sequence", "two", "one ")),
    ],
)
async def test_stop_reasons_are_those_of_the_api(
    run: Any, finish: wire.FinishReason, fields: dict[str, Any], expected: Any
) -> None:
    async with messages_client("one two three", finish, template="{{ messages[0].content }}") as (client, _):
        answer = await run(client, **fields)
    assert (answer["stop"], answer["sequence"], answer["blocks"]) == (*expected[:2], [("text", expected[2])])


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ["one <3 two", "a  b <", f"x <tool_call>\n{CALL}\n</tool_call>", '<tool_call>\n{"name": "wea'])
async def test_message_has_the_text_of_the_chat(run: Any, size: int, text: str) -> None:
    """Also where the last tokens of an answer decide what the tokens before them are."""
    tokens = token_ids(text)
    pieces = [tokens[at : at + size] for at in range(0, len(tokens), size)]

    def script(request: wire.Request) -> list[Any]:
        ends: list[wire.FinishReason | None] = [*[None] * (len(pieces) - 1), "length"]
        return [Delta(index=at * size, tokens=part, finish=end) for at, (part, end) in enumerate(zip(pieces, ends, strict=True))]

    backend = FakeBackend(script, tiny_assets(chat_template=TOOLS_TEMPLATE))
    function = {"name": "weather", "parameters": TOOL["input_schema"]}
    chat = {"messages": USER, "tools": [{"type": "function", "function": function}], "max_tokens": 64}
    async with (
        served(create_app(backend)) as url,
        AsyncAnthropic(base_url=url, api_key=SECRET, max_retries=0) as client,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await run(client, tools=[TOOL])
        message = (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
    assert "".join(text for kind, text in answer["blocks"] if kind == "text") == (message["content"] or "")
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert [value for kind, value in answer["blocks"] if kind == "tool_use"] == calls


async def test_call_without_valid_json_is_no_call() -> None:
    async with messages_client('<tool_call>\n{"name": "weather", "arguments": {city: 1}}\n</tool_call>') as (client, _):
        answer = await whole(client, tools=[TOOL])
    assert answer["stop"] == "end_turn" and [kind for kind, _ in answer["blocks"]] == ["text"]


@pytest.mark.parametrize("run", [whole, streamed])
async def test_answer_ends_with_the_context(run: Any) -> None:
    async with messages_client("one two", "length", template="{{ messages[0].content }}") as (client, backend):
        backend.current_assets = tiny_assets(
            chat_template="{{ messages[0].content }}", max_model_len=len(token_ids("weather?one two"))
        )
        answer = await run(client, max_tokens=4000)
    assert answer["stop"] == "model_context_window_exceeded" and answer["blocks"] == [("text", "one two")]


async def test_billing_header_does_not_change_the_prompt() -> None:
    def system(hash: str) -> Any:
        return [{"type": "text", "text": f"x-anthropic-billing-header: cch={hash};"}, {"type": "text", "text": "be brief"}]

    async with messages_client("ok", template=CONVERSATION) as (client, backend):
        await whole(client, system=system("a"))
        await whole(client, system=system("b"))
        await whole(client, system="x-anthropic-billing-header: cch=c;\nbe brief")
    assert backend.requests[0].prompt == backend.requests[1].prompt == backend.requests[2].prompt


async def test_history_keeps_what_the_model_cannot_read_as_notes() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    turns: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "\ud83d"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image], "is_error": True}]},
        {"role": "system", "content": "hurry"},
        {"role": "user", "content": "now"},
    ]
    body = {"model": "tiny", "max_tokens": 4, "messages": turns}
    backend = FakeBackend(text_script("ok"), tiny_assets(chat_template=CONVERSATION))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(backend)), base_url="http://api-server") as client:
        refused = await client.post("/v1/messages", content=json.dumps(body))
        turns[1]["content"][0]["input"]["city"] = "Paris"
        answer = await client.post("/v1/messages", json=body)
    assert refused.status_code == 400 and answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    prompt = tiny_tokenizer().decode(backend.requests[0].prompt, skip_special_tokens=False)
    assert "[tool:Error: [image: results of tools are text only]t1][user:hurry\nnow]" in prompt


async def test_call_cut_by_the_limit_becomes_text() -> None:
    cut = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    async with messages_client(cut, "length") as (client, _):
        answer = await whole(client, tools=[TOOL])
    assert answer["stop"] == "max_tokens" and [kind for kind, _ in answer["blocks"]] == ["text"]
    assert "Par" in answer["blocks"][0][1]


async def test_conversation_reaches_the_template_in_order() -> None:
    turns: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "look"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and now?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "be brief"}]
    async with messages_client("ok", template=CONVERSATION) as (client, backend):
        counted = await client.messages.count_tokens(model="tiny", messages=turns, system=system)
        await whole(client, messages=turns, system=system)
        await whole(client, messages=turns, system="be brief", thinking={"type": "enabled", "budget_tokens": 1024})
    prompts = [tiny_tokenizer().decode(request.prompt, skip_special_tokens=False) for request in backend.requests]
    said = "[system:be brief][user:a\nb][assistant:lookweatherParishm][tool:sunt1][user:and now?]"
    assert prompts == [f"{said}False", f"{said}True"]
    assert counted.input_tokens == len(backend.requests[0].prompt)


async def test_answer_continues_the_last_message() -> None:
    async with messages_client(" sunny") as (client, backend):
        answer = await whole(client, messages=[*USER, {"role": "assistant", "content": "It is"}])
    assert answer["blocks"] == [("text", " sunny")]
    assert tiny_tokenizer().decode(backend.requests[0].prompt).endswith("<|assistant|>It is")


async def test_forced_tool_and_schema_become_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with messages_client(f"<tool_call>\n{CALL}\n</tool_call>") as (client, backend):
        answer = await whole(client, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
        await whole(client, tools=[TOOL], tool_choice={"type": "any"})
        await whole(client, extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert answer["stop"] == "tool_use"
    grammars = [request.sampling.grammar for request in backend.requests]
    assert [grammar is not None and grammar.kind for grammar in grammars] == ["lark"] * 3
    assert grammars[2] is not None and "%json" in grammars[2].text  # after the reasoning


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "messages[1].content"),
        (
            {
                "messages": [*USER, {"role": "assistant", "content": "It"}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
            "messages[1].role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "w", "input": {}}]}]},
            "content[0].type",
        ),
        ({"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "content[0].type"),
        ({"messages": USER * (MAX_MESSAGES + 1)}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
    ],
)
async def test_invalid_field_is_named(fields: dict[str, Any], where: str) -> None:
    async with messages_client("ok") as (client, backend):
        with pytest.raises(anthropic.BadRequestError) as error:
            await whole(client, **fields)
    body: Any = error.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert where in body["error"]["param"] and body["error"]["message"] and not backend.requests


async def test_key_is_taken_from_the_header_of_the_client() -> None:
    keys = ApiKeys([ApiKey("team", SECRET)])
    async with messages_client("ok", keys=keys) as (client, backend):
        await whole(client)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await whole(client.with_options(api_key="another"))
    body: Any = refused.value.body
    assert (body["error"]["type"], body["error"]["code"]) == ("authentication_error", "invalid_api_key")
    assert [request.tenant for request in backend.requests] == ["team"]


async def test_unknown_model_is_not_found() -> None:
    async with messages_client("ok") as (client, _):
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.messages.create(model="another", max_tokens=4, messages=USER)
    body: Any = error.value.body
    assert body["error"]["type"] == "not_found_error"


async def test_failure_of_a_stream_is_an_event() -> None:
    full = BackendError(429, "queue_full", "too many requests wait", retry_after_s=2.2)
    backend = FakeBackend(lambda request: [Delta(index=0, tokens=token_ids("a")), full], tiny_assets(chat_template="x"))
    async with (
        served(create_app(backend)) as url,
        AsyncAnthropic(base_url=url, api_key=SECRET, max_retries=0) as client,
    ):
        with pytest.raises(anthropic.APIStatusError, match="too many requests wait") as error:
            async with client.messages.stream(model="tiny", max_tokens=64, messages=USER) as stream:
                await stream.until_done()
        body: Any = error.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")


class LateBackend(FakeBackend):
    """Knows its model a moment after a request."""

    async def wait_for_assets(self, name: str = "") -> None:
        await asyncio.sleep(0.2)
        self.current_assets = tiny_assets(chat_template="x")


async def test_stream_is_held_until_a_model_is_known() -> None:
    """Comments keep the connection open; what happens then has the form of the API."""
    body = {"model": "tiny", "max_tokens": 4, "messages": USER, "stream": True}
    backend = LateBackend(text_script("a b"))
    backend.current_assets = None
    app = create_app(backend, keep_alive_s=0.05)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:
        refused = await client.post("/v1/messages", json={**body, "model": "another"})
        backend.current_assets = None
        answer = await client.post("/v1/messages", json=body)
    assert refused.text.startswith(": keep-alive\n") and "event: error\ndata: " in refused.text
    assert answer.text.startswith(": keep-alive\n") and "event: message_stop\n" in answer.text


def test_documented_types_are_those_of_the_statuses() -> None:
    page = (Path(__file__).parents[3] / "docs" / "messages.md").read_text()
    rows = re.findall(r"^\| ([0-9, ]+) \| `(\w+)` \|$", page, re.MULTILINE)
    documented = {int(status): kind for statuses, kind in rows for status in statuses.split(", ")}
    bodies = {status: json.loads(anthropic_error_body(ApiError(status, "why"))) for status in documented}
    assert documented == {status: body["error"]["type"] for status, body in bodies.items()} and len(documented) == 9


async def test_models_have_the_form_of_the_client() -> None:
    """Pages in either direction; other clients get OpenAI's list."""
    names = [f"m{number}" for number in range(5)]
    backend = FakeBackend(text_script("ok"), tiny_assets(names=names))
    async with served(create_app(backend)) as url, AsyncAnthropic(base_url=url, api_key=SECRET, max_retries=0) as client:
        listed = [model async for model in client.models.list(limit=2)]
        before = await client.models.list(limit=2, before_id="m3")
        backwards = [model.id async for model in before]
        assert [model.id for model in (await client.models.list(lifecycle=["active", "retired"])).data] == names
        assert (await client.models.list(lifecycle=["retired"])).data == []
        found, after = await client.models.retrieve("m1"), await client.models.list(limit=2, after_id="m2")
        for wrong in ({"after_id": "m9"}, {"before_id": "m9"}, {"after_id": "m1", "before_id": "m2"}, {"limit": 1001}):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.models.list(**wrong)
            assert list(wrong)[-1] in refused.value.message
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("m9")
        async with httpx.AsyncClient(base_url=url) as other:
            cards = (await other.get("/v1/models")).json()
            assert (await other.get("/v1/models?limit=5000&after_id=m9")).json() == cards, "parameters that OpenAI's API lacks"
            absent = (await other.get("/v1/models/m9")).json()
    assert [model.id for model in listed] == names and found == listed[1] and backwards == ["m1", "m2", "m0"]
    assert (before.has_more, before.first_id, before.last_id) == (True, "m1", "m2")
    assert (after.has_more, after.first_id, after.last_id) == (False, "m3", "m4")
    assert (found.type, found.lifecycle, found.display_name, found.max_input_tokens) == ("model", "active", "m1", 512)
    assert abs(found.created_at.timestamp() - cards["data"][0]["created"]) < 1 and missing.value.response.headers["request-id"]
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert [card["id"] for card in cards["data"]] == names and "type" not in cards
    assert (absent["error"]["code"], absent["error"]["type"]) == ("model_not_found", "invalid_request_error")
