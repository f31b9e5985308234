"""The Responses API, read by the `openai` client: items of streamed and whole answers, tools, reasoning, formats, errors."""

import asyncio
import json
import logging
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError, Delta
from tests.frontend.fakes import FakeBackend, StoredOutputs, text_script, tiny_assets, tiny_tokenizer, token_ids
from tests.frontend.openai_responses.responding import (
    CITY,
    CONVERSATION,
    SECRET,
    TOOL,
    parts_of,
    responses_client,
    streamed,
    whole,
)
from tests.frontend.serving import served
from tests.frontend.tool_chat import ANSWER, CALL, TOOLS_TEMPLATE

USER: Any = [{"role": "user", "content": "weather?"}]
MESSAGE = {"max_tokens": 9, "messages": USER}
RUNS = pytest.mark.parametrize("run", [whole, streamed])


@RUNS
async def test_answer_has_an_item_for_each_part(run: Any) -> None:
    call = ("function_call", json.dumps(json.loads(CALL)["arguments"]))
    async with responses_client(ANSWER) as (client, backend):
        answer = await run(client, tools=[{**TOOL, "strict": True}])
        prompt = backend.requests[0].prompt
        assert backend.requests[0].sampling.grammar is None
    assert parts_of(answer) == [("reasoning", "hm, a tool"), ("message", "Let me look."), call, call]
    assert answer["status"] == "completed" and answer["id"].startswith("resp_")
    ids = [item["id"] for item in answer["output"]] + [item["call_id"] for item in answer["output"][2:]]
    assert len(set(ids)) == len(ids)
    usage = answer["usage"]
    assert usage["input_tokens"] == len(prompt) and usage["total_tokens"] == len(prompt) + usage["output_tokens"]
    assert 3 <= usage["output_tokens_details"]["reasoning_tokens"] <= len(token_ids("<think>\nhm, a tool\n</think>\n\n"))


@RUNS
async def test_second_call_is_left_out_on_request(run: Any) -> None:
    async with responses_client(ANSWER) as (client, _):
        answer = await run(client, tools=[TOOL], parallel_tool_calls=False)
    assert [kind for kind, _ in parts_of(answer)] == ["reasoning", "message", "function_call"]
    assert answer["parallel_tool_calls"] is False


@RUNS
@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "incomplete")])
async def test_status_says_why_the_answer_ended(run: Any, finish: wire.FinishReason, status: str) -> None:
    async with responses_client("one two", finish) as (client, _):
        answer = await run(client, max_output_tokens=9)
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert (answer["status"], answer["incomplete_details"], parts_of(answer)) == (status, reason, [("message", "one two")])
    assert answer["output"][0]["status"] == status and answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


@RUNS
async def test_call_cut_by_the_limit_is_incomplete(run: Any) -> None:
    async with responses_client('<tool_call>\n{"name": "weather", "arguments": {"city": "Par', "length") as (client, _):
        answer = await run(client, tools=[TOOL])
    assert parts_of(answer) == [("function_call", '{"city": "Par')]
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "incomplete")


async def test_client_accumulates_streams_with_every_kind_of_item() -> None:
    async with responses_client(ANSWER) as (client, _):
        async with client.responses.stream(model="tiny", input="weather?", tools=[TOOL]) as stream:
            kinds = {event.type async for event in stream}
            last = await stream.get_final_response()
        expected = await whole(client, tools=[TOOL])
    assert parts_of(last.model_dump(mode="json")) == parts_of(expected) and "response.reasoning_text.delta" in kinds


@RUNS
async def test_answer_without_text_is_an_empty_message(run: Any) -> None:
    backend = FakeBackend(lambda request: [Delta(index=0, tokens=[request.sampling.stop_token_ids[0]], finish="stop")])
    async with served(create_app(backend)) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET) as client:
        assert parts_of(await run(client)) == [("message", "")]


@RUNS
async def test_request_is_repeated_in_the_response(run: Any) -> None:
    fields: Any = {
        "instructions": "be brief", "max_output_tokens": 50, "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9,
        "tool_choice": {"type": "function", "name": "weather"}, "tools": [{**TOOL, "strict": False}], "truncation": "auto",
        "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "store": False,
    }  # fmt: skip
    async with responses_client(f"<tool_call>\n{CALL}\n</tool_call>") as (client, backend):
        answer = await run(client, **fields)
        plain = await run(client)
        await run(client, safety_identifier="s")
    assert {name: answer[name] for name in fields if name != "tools"} == {
        name: fields[name] for name in fields if name != "tools"
    }
    assert {**fields["tools"][0], "description": None}.items() <= {"description": None, **answer["tools"][0]}.items()
    assert (plain["temperature"], plain["tool_choice"], plain["store"], plain["text"]["format"]) == (
        1,
        "auto",
        True,
        {"type": "text"},
    )
    assert [request.tenant for request in backend.requests] == ["u", "", "s"]
    assert backend.requests[0].sampling.temperature == 0.5


@pytest.mark.parametrize("fields", [{"store": False}, {"cache": "no-store"}], ids=str)
async def test_unstored_response_bypasses_the_response_cache(fields: dict[str, Any]) -> None:
    cache = StoredOutputs()
    app = create_app(FakeBackend(text_script("one", finish="stop"), tiny_assets()), cache=cache)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        kept = await client.post("/v1/responses", json={"input": "a", "temperature": 0})
        assert (len(cache.outputs), kept.headers["x-phalanx-cache"]) == (1, "miss")
        for path, body in (("responses", {"input": "a", **fields}), ("messages", {**MESSAGE, "cache": "no-store"})):
            answer = await client.post(f"/v1/{path}", json={"temperature": 0, **body})
            assert answer.status_code == 200 and "x-phalanx-cache" not in answer.headers
    assert len(cache.outputs) == 1


def scripted_app(text: str, sizes: list[int], **fields: Any) -> tuple[Any, FakeBackend]:
    """Returns an API server whose model generates the text in pieces of these numbers of tokens."""
    tokens = token_ids(text)
    cuts = [0]
    while cuts[-1] < len(tokens):
        cuts.append(min(len(tokens), cuts[-1] + sizes[len(cuts) % len(sizes)]))

    def script(request: wire.Request) -> list[Any]:
        spans = list(pairwise(cuts))
        ends: list[wire.FinishReason | None] = [*[None] * (len(spans) - 1), "stop"]
        return [Delta(index=a, tokens=tokens[a:b], finish=end) for (a, b), end in zip(spans, ends, strict=True)]

    backend = FakeBackend(script, tiny_assets(chat_template=TOOLS_TEMPLATE))
    return create_app(backend, **fields), backend


TEXTS = (
    ANSWER, "one <3 two", "a  b <", f"x <tool_call>\n{CALL}\n</tool_call> y", '<tool_call>\n{"name": "wea', "<think>\nonly",
    f"<think>\n\na\n\nb <\n</think>\n\n 🦊 <tool_call>\n{CALL}\n</tool_call>", "<thinking> no", "once 🦊 upon a\n\n time 🦊",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("sizes", [[1], [3], [1, 5, 2], [1000]])
async def test_split_answers_equal_the_whole_and_the_chat(text: str, sizes: list[int]) -> None:
    """Also with logprobs, where each text has those of its own tokens."""
    app, _ = scripted_app(text, sizes)
    function: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    async with (
        served(app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET, max_retries=0) as client,
    ):
        answers = [
            await run(client, tools=[TOOL], include=include)
            for run in (whole, streamed)
            for include in ([], ["message.output_text.logprobs"])
        ]
        chat: Any = (await client.chat.completions.create(model="tiny", messages=USER, tools=[function])).choices[0].message
    first, *others = [parts_of(answer) for answer in answers]
    assert others == [first] * 3
    assert len({json.dumps(answer["usage"]) for answer in answers}) == 1
    texts = {kind: "".join(text for one, text in first if one == kind) for kind in ("message", "reasoning")}
    assert (texts["message"], texts["reasoning"]) == (chat.content or "", getattr(chat, "reasoning_content", ""))
    calls = [call.function.arguments for call in chat.tool_calls or ()]
    assert [text for kind, text in first if kind == "function_call"] == calls
    for answer in (answers[1], answers[3]):
        for item in answer["output"]:
            if item["type"] == "message":
                spelled = b"".join(bytes(entry["bytes"]) for entry in item["content"][0]["logprobs"]).decode(errors="replace")
                assert item["content"][0]["text"].strip() in spelled and "think>" not in spelled


async def test_logprobs_are_those_of_a_chat() -> None:
    async with responses_client("one two", template="{{ messages[0].content }}") as (client, _):
        answers = [await run(client, include=["message.output_text.logprobs"], top_logprobs=2) for run in (whole, streamed)]
        chat = await client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
        plain = await whole(client)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    expected = [entry.model_dump(mode="json") for entry in logprobs.content]
    assert [answer["output"][0]["content"][0]["logprobs"] for answer in answers] == [expected, expected]
    assert plain["output"][0]["content"][0]["logprobs"] == []


class Place(BaseModel):
    city: str


async def test_client_parses_formats_of_whole_and_streamed_answers() -> None:
    async with responses_client('{"city": "Paris"}') as (client, backend):
        parsed = await client.responses.parse(model="tiny", input="where?", text_format=Place)
        async with client.responses.stream(model="tiny", input="where?", text_format=Place) as stream:
            last = await stream.get_final_response()
        await whole(client, text={"format": {"type": "json_object"}})
        await whole(client, tools=[TOOL], tool_choice="required")
        await whole(client, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert parsed.output_parsed == last.output_parsed == Place(city="Paris")
    grammars = [request.sampling.grammar for request in backend.requests]
    assert all(grammar is not None and grammar.kind == "lark" for grammar in grammars), "calls, or forms after the reasoning"
    assert ["form: %json" in grammar.text for grammar in grammars if grammar is not None] == [True] * 3 + [False] * 2


async def test_allowed_tools_are_the_only_ones_shown() -> None:
    other = {**TOOL, "name": "clock"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    async with responses_client("ok") as (client, backend):
        answer = await whole(client, tools=[TOOL, other], tool_choice=choice)
    prompt = tiny_tokenizer().decode(backend.requests[0].prompt, skip_special_tokens=False)
    assert "clock" in prompt and '"weather"' not in prompt and backend.requests[0].sampling.grammar is not None
    assert answer["tool_choice"] == choice and len(answer["tools"]) == 2


async def test_conversation_reaches_the_template_in_order() -> None:
    items: Any = [
        {"role": "developer", "content": "in French"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "look", "annotations": []}, {"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{broken"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "system", "content": "hurry"},
        {"role": "user", "content": "now?"},
    ]  # fmt: skip
    async with responses_client("ok", template=CONVERSATION) as (client, backend):
        counted = await client.responses.input_tokens.count(model="tiny", input=items, instructions="be brief")
        await whole(client, input=items, instructions="be brief")
        await whole(client, reasoning={"effort": "low", "summary": "auto"})
        await whole(client, reasoning={"effort": "none"})
    prompts = [tiny_tokenizer().decode(request.prompt, skip_special_tokens=False) for request in backend.requests]
    assert prompts[0] == (
        '[system:be brief\nin French][user:a\nb][assistant:look\nnoweather{"city": 1}weather{"invalid_json": "{broken"}hm]'
        "[tool:sunc1][tool:rainc2][user:hurry\nnow?]"
    )
    assert counted.input_tokens == len(backend.requests[0].prompt)
    assert prompts[1:] == ["[user:weather?]low", "[user:weather?]Falsenone"]


@pytest.mark.parametrize("limit", [None, 30, 200])
async def test_counted_input_is_that_of_the_request(limit: int | None) -> None:
    turns: Any = [{"role": role, "content": f"{role} {turn} " + "x" * 20} for turn in range(30) for role in ("user", "assistant")]
    fields: Any = {"input": turns, "truncation": "auto"} | ({} if limit is None else {"max_output_tokens": limit})
    async with responses_client("ok", template=CONVERSATION) as (client, backend):
        counted = await client.responses.input_tokens.count(model="tiny", extra_body=fields)
        answer = await whole(client, **fields)
    assert counted.input_tokens == answer["usage"]["input_tokens"] == len(backend.requests[0].prompt)


async def test_truncation_leaves_out_the_oldest_turns() -> None:
    turns: Any = [{"role": role, "content": f"{role} {turn} " + "x" * 20} for turn in range(30) for role in ("user", "assistant")]
    items: Any = [{"role": "system", "content": "be brief"}, *turns, {"role": "user", "content": "last"}]
    async with responses_client("ok", template=CONVERSATION) as (client, backend):
        with pytest.raises(openai.BadRequestError) as error:
            await whole(client, input=items)
        answer = await whole(client, input=items, truncation="auto", max_output_tokens=40)
        await whole(client, input="short", truncation="auto")
        await whole(client, input=items, truncation="auto", max_output_tokens=4000)
        counted = await client.responses.input_tokens.count(model="tiny", input=items, truncation="auto")
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    prompt = tiny_tokenizer().decode(backend.requests[0].prompt, skip_special_tokens=False)
    assert prompt.startswith("[system:be brief][user:user ") and prompt.endswith("[user:last]") and answer["truncation"] == "auto"
    length = len(backend.requests[0].prompt)
    assert 512 - 40 - 110 <= length <= 512 - 40 and 512 - 64 - 110 <= counted.input_tokens <= 512 - 64
    assert len(backend.requests[1].prompt) < 20 and 512 // 2 - 110 <= len(backend.requests[2].prompt) <= 512 // 2


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "x"}, fields]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOL, fields]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (item(role="user", content=[{"type": "input_file", "file_url": "data:"}]), "input[1].content[0].type"),
        (item(role="user", content=[{"type": "input_image", "file_id": "f"}]), "input[1].content[0].image_url"),
        (item(role="assistant", content=[{"type": "input_image", "image_url": "data:"}]), "input[1].content[0].type"),
        (item(role="user", content=[{"type": "input_text"}]), "input[1].content[0].text"),
        (item(role="user", content=[{"type": "input_text", "text": 5}]), "input[1].content[0].text"),
        (item(role="user"), "input[1].content"),
        (item(role="tool", content="x"), "input[1].role"),
        (item(type="message", content="x"), "input[1].role"),
        (item(type="web_search_call", id="w"), "input[1].type"),
        (item(type="function_call", call_id="c", name="f"), "input[1].arguments"),
        (item(type="function_call", call_id="c", arguments="{}"), "input[1].name"),
        (item(type="function_call", name="f", arguments="{}"), "input[1].call_id"),
        (item(type="function_call_output", call_id="c", output="x"), "input[1].call_id"),
        (item(type="function_call_output", call_id="c"), "input[1].output"),
        (item(type="item_reference", id="msg_1"), "input[1].id"),
        (item(id="msg_1"), "input[1].id"),
        ({"input": []}, "input"),
        (tool(type="web_search"), "tools[1].type"),
        (tool(type="file_search", vector_store_ids=["v"]), "tools[1].type"),
        (tool(type="computer_use_preview"), "tools[1].type"),
        (tool(type="mcp", server_label="s"), "tools[1].type"),
        (tool(type="code_interpreter"), "tools[1].type"),
        (tool(type="custom", name="c"), "tools[1].type"),
        (tool(type="function"), "tools[1].name"),
        (tool(type="function", name="a b"), "tools[1].name"),
        (tool(**TOOL), "tools[1].name"),
        ({"tools": [{**TOOL, "parameters": {"a": 2**70}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search_preview"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice.tools[0].type"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "odd"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["message.output_text.logprobs", "file_search_call.results"]}, "include[1]"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    backend = FakeBackend(text_script("ok"), tiny_assets(chat_template=TOOLS_TEMPLATE))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(backend)), base_url="http://api-server") as client:
        answer = await client.post("/v1/responses", json={"model": "tiny", "input": "x", **fields})
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    assert answer.status_code == (404 if param.endswith(".id") else 400) and error["message"] and not backend.requests


async def test_failure_of_a_stream_is_an_event() -> None:
    """The `openai` client raises it; its fields are those of the reference too."""
    full = BackendError(429, "queue_full", "too many requests wait", retry_after_s=2.2)
    backend = FakeBackend(lambda request: [Delta(index=0, tokens=token_ids("a")), full], tiny_assets(chat_template="x"))
    app = create_app(backend)
    async with served(app) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET, max_retries=0) as client:
        with pytest.raises(openai.APIError, match="too many requests wait") as error:
            await streamed(client)
        with pytest.raises(openai.RateLimitError):
            await whole(client)
    assert error.value.code == "queue_full" and error.value.type == "rate_limit_error"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as http:
        answer = await http.post("/v1/responses", json={"input": "x", "stream": True})
    *_, name, id, data = answer.text.strip().splitlines()
    document = json.loads(data.removeprefix("data: "))
    assert name == "event: error" or id == "event: error"
    assert (document["type"], document["code"], document["sequence_number"]) == ("error", "queue_full", 5)


async def test_disconnect_aborts_the_request() -> None:
    backend = FakeBackend(lambda request: [Delta(index=0, tokens=token_ids("a b")), asyncio.Event()])
    async with served(create_app(backend)) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET) as client:
        stream = await client.responses.create(model="tiny", input="x", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        assert await asyncio.wait_for(backend.aborts.get(), 10) == backend.requests[0].id


class LateModel(FakeBackend):
    """Knows its model a moment after a request."""

    async def wait_for_assets(self, name: str = "") -> None:
        await asyncio.sleep(0.2)
        self.current_assets = tiny_assets(chat_template="x")


async def test_stream_is_held_until_a_model_is_known() -> None:
    body = {"model": "tiny", "input": "x", "stream": True}
    backend = LateModel(text_script("a b"))
    backend.current_assets = None
    app = create_app(backend, keep_alive_s=0.05)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:
        refused = await client.post("/v1/responses", json={**body, "model": "another"})
        backend.current_assets = None
        answer = await client.post("/v1/responses", json=body)
    assert refused.text.startswith(": keep-alive\n") and "event: error\ndata: " in refused.text
    assert answer.text.startswith(": keep-alive\n") and "event: response.incomplete\n" in answer.text


async def test_no_log_has_text_of_the_conversation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "phalanx_frontend")
    async with responses_client("an answer that is private", template="{{ messages[0].content }}") as (client, _):
        answer = await whole(client, input="a question that is private", metadata={"a": "private"})
        await streamed(client, input="also private", previous_response_id=answer["id"])
    assert caplog.records and "private" not in caplog.text + "".join(str(vars(record)) for record in caplog.records)
