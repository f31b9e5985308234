"""Formats whose marks are special tokens: read by the API, in chat completions and messages, and never shown."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest
from anthropic import AsyncAnthropic
from httpx import AsyncClient
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.text.formats.registry import TOOL_FORMATS
from tests.frontend.fakes import EOS, FakeBackend, tiny_assets, token_deltas
from tests.frontend.serving import served
from tests.frontend.text.family_templates import FAMILY_TEMPLATES
from tests.frontend.tool_chat import TOOL, USER

PARIS = '{"city": "Paris"}'
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>"
)
KIMI = (
    "Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{PARIS}<|tool_call_end|><|tool_calls_section_end|>"
)
ANSWERS = {"openai": HARMONY, "mistral": f"Let me look.[TOOL_CALLS]weather[ARGS]{PARIS}", "kimi_k2": KIMI}
ENDS = {"openai": "<|call|>"}
MARKS = {"gemma4": (*TOOL_FORMATS["gemma4"].marks, "<|channel>", "<channel|>")}
"""Special tokens of a tokenizer, where they are not the marks of the calls alone."""


def special_tokenizer(name: str, assets: wire.Assets) -> Tokenizer:
    tokenizer = Tokenizer.from_str(assets.files["tokenizer.json"].decode())
    marks = (*MARKS.get(name, TOOL_FORMATS[name].marks), "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer


@asynccontextmanager
async def api(
    name: str, text: str, parsers: wire.ParserNames | None = None, template_end: str = ""
) -> AsyncIterator[tuple[str, FakeBackend]]:
    """Yields the URL of an API server with a model that generates this text; its last special token ends it."""
    assets = tiny_assets(chat_template=FAMILY_TEMPLATES[name] + template_end)
    tokenizer = special_tokenizer(name, assets)
    files = {**assets.files, "tokenizer.json": tokenizer.to_str().encode()}
    if parsers is not None:
        files[wire.PARSERS_FILE] = msgspec.json.encode(parsers)
    ends = [id for id in [tokenizer.token_to_id(ENDS.get(name, EOS))] if id is not None]
    tokens = tokenizer.encode("<|pad|>" + text, add_special_tokens=False).ids
    backend = FakeBackend(lambda request: token_deltas(tokens, "stop"), wire.make_assets(files, ["tiny"], 512, ends))
    async with served(create_app(backend)) as url:
        yield url, backend


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for delta in deltas:
        result["reasoning"] += delta.get("reasoning_content") or ""
        result["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                result["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            result["calls"][-1]["arguments"] += call["function"]["arguments"]
    return result


@pytest.mark.parametrize("name", ANSWERS)
async def test_completions_have_the_calls_of_special_tokens(name: str) -> None:
    async with api(name, ANSWERS[name]) as (url, _), AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL])
        stream = await client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL], stream=True)
        deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) async for chunk in stream]
    message = answer.choices[0].message.model_dump(exclude_none=True)
    for result in (joined([message]), joined(deltas)):
        [call] = result["calls"]
        assert (call["name"], call["arguments"]) == ("weather", PARIS)
        assert call["id"] == "functions.weather:0" if name == "kimi_k2" else call["id"].startswith("call_")
        assert (result["content"], result["reasoning"]) == ("Let me look.", "hm" if name == "openai" else "")
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("name", ANSWERS)
async def test_messages_have_the_calls_of_special_tokens(name: str) -> None:
    tool: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    messages: Any = [{"role": "user", "content": "weather?"}]
    async with api(name, ANSWERS[name]) as (url, _), AsyncAnthropic(base_url=url, api_key="none") as client:
        answer = await client.messages.create(model="tiny", max_tokens=400, messages=messages, tools=[tool])
        async with client.messages.stream(model="tiny", max_tokens=400, messages=messages, tools=[tool]) as stream:
            final = await stream.get_final_message()
    for message in (answer, final):
        blocks = [block.model_dump() for block in message.content]
        assert [block["type"] for block in blocks] == [*(["thinking"] if name == "openai" else []), "text", "tool_use"]
        assert blocks[-1]["input"] == json.loads(PARIS)
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("name", ANSWERS)
async def test_responses_have_the_calls_of_special_tokens(name: str) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": TOOL["function"]["parameters"], "strict": False}
    async with api(name, ANSWERS[name]) as (url, _), AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.responses.create(model="tiny", input="weather?", tools=[tool], max_output_tokens=400)
    output = [item.model_dump() for item in answer.output]
    assert [item["type"] for item in output] == [*(["reasoning"] if name == "openai" else []), "message", "function_call"]
    assert (output[-1]["name"], output[-1]["arguments"]) == ("weather", PARIS)
    assert name != "kimi_k2" or output[-1]["call_id"] == "functions.weather:0"


async def test_mark_of_token_and_word_is_read() -> None:
    text = "<|channel>thought\nhm<channel|>Four."
    async with api("gemma4", text) as (url, _), AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER)
        stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
        deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) async for chunk in stream]
    for result in (joined([answer.choices[0].message.model_dump(exclude_none=True)]), joined(deltas)):
        assert (result["reasoning"], result["content"]) == ("hm", "Four.")


async def test_without_a_parser_special_tokens_are_skipped() -> None:
    none = wire.ParserNames(tool_call="none", reasoning="none")
    async with api("openai", HARMONY, none) as (url, _), AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER)
        assert (answer.choices[0].message.content or "").startswith("analysishmassistantcommentaryLet me look.")
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL])


async def test_reasoning_of_harmony_needs_no_tools() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    async with api("openai", text) as (url, _), AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER)
        message = joined([answer.choices[0].message.model_dump(exclude_none=True)])
    assert (message["reasoning"], message["content"]) == ("hm", "yes")


CONTINUED: Any = [*USER, {"role": "assistant", "content": "Go"}]
LAST = "{{ messages[-1].content }}"


async def test_gpt_oss_continues_a_message_as_content() -> None:
    """The prompt ends inside of a final message, where ` to=` is no recipient."""
    text = " to=day.<|end|><|start|>assistant<|channel|>final<|message|>Bye."
    async with (
        api("openai", text, template_end=LAST) as (url, backend),
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        fields: Any = {"messages": CONTINUED, "extra_body": {"continue_final_message": True}}
        for tools in ([], [TOOL]):
            answer: Any = await client.chat.completions.create(model="tiny", tools=tools, **fields)
            assert answer.choices[0].message.content == " to=day.\nBye."
        assert len(backend.requests) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": TOOL | {"function": {"name": "weather"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, None),
    ],
)
async def test_messages_of_gpt_oss_continue_without_calls(fields: dict[str, Any], param: str | None) -> None:
    body = {"messages": CONTINUED, "continue_final_message": True, "tools": [TOOL], **fields}
    async with api("openai", "{}", template_end=LAST) as (url, _), AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == (200 if param is None else 400)
    assert param is None or (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, "unsupported_parameter")


async def test_forms_follow_the_reasoning_at_every_endpoint() -> None:
    """Between special tokens, of which the grammar has the ids."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named: Any = {"name": "n", "schema": schema}
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final <|constrain|>JSON<|message|>" + '{"a": 1}'
    async with api("openai", text) as (url, backend):
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            format: Any = {"type": "json_schema", "json_schema": named}
            chat = await client.chat.completions.create(model="tiny", messages=USER, response_format=format)
            form: Any = {"format": {"type": "json_schema", **named}}
            response = await client.responses.create(model="tiny", input="weather?", text=form, max_output_tokens=400)
        async with AsyncAnthropic(base_url=url, api_key="none") as client:
            config: Any = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
            messages: Any = [{"role": "user", "content": "weather?"}]
            message = await client.messages.create(model="tiny", max_tokens=400, messages=messages, extra_body=config)
        grammars = [request.sampling.grammar for request in backend.requests]
    assert grammars[0] is not None and grammars == [grammars[0]] * 3
    rules = grammars[0].text.splitlines()
    assert rules[0].startswith("start: analysis* (<[") and "<|end|>" not in "".join(rules[:2])
    fields = joined([chat.choices[0].message.model_dump(exclude_none=True)])
    assert (fields["reasoning"], fields["content"]) == ("hm", '{"a": 1}')
    assert [item.type for item in response.output] == ["reasoning", "message"] and response.output_text == '{"a": 1}'
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0
    blocks = [block.model_dump() for block in message.content]
    assert [(blocks[0]["thinking"]), blocks[1]["text"]] == ["hm", '{"a": 1}']
