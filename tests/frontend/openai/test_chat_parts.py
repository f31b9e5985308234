"""Reasoning and tool calls in streamed and whole answers, read by the `openai` client."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from phalanx_api import wire
from phalanx_frontend.app import create_app
from tests.frontend.fakes import CHAT_TEMPLATE, FakeBackend, text_script, tiny_assets, tiny_tokenizer
from tests.frontend.serving import served
from tests.frontend.tool_chat import ANSWER, CALL, TOOL, TOOLS_TEMPLATE, USER


@asynccontextmanager
async def chat_client(text: str, template: str | None = TOOLS_TEMPLATE) -> AsyncIterator[tuple[AsyncOpenAI, FakeBackend]]:
    """Yields a client of an API server with a model that generates this text."""
    backend = FakeBackend(text_script(text, finish="stop"), tiny_assets(chat_template=template))
    async with (
        served(create_app(backend)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, backend


async def whole(client: AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """Returns the fields of the message except its role, and the finish reason."""
    answer = await client.chat.completions.create(model="tiny", messages=fields.pop("messages", USER), **fields)
    message = answer.choices[0].message.model_dump(exclude_none=True)
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert message.get("reasoning") == message.get("reasoning_content")
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in message.get("tool_calls", []))
    return {
        "reasoning": message.get("reasoning_content", ""),
        "content": message.get("content", ""),
        "calls": calls,
        "finish": answer.choices[0].finish_reason,
    }


async def streamed(client: AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """Returns the same, joined from a stream."""
    result: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None}
    ids = []
    stream = await client.chat.completions.create(model="tiny", messages=fields.pop("messages", USER), stream=True, **fields)
    async for chunk in stream:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        assert delta.get("reasoning") == delta.get("reasoning_content")
        result["reasoning"] += delta.get("reasoning", "")
        result["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                ids.append(call["id"])
                assert call["index"] == len(result["calls"])
                result["calls"].append({"name": call["function"]["name"], "arguments": ""})
            result["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        result["finish"] = chunk.choices[0].finish_reason or result["finish"]
    assert len(set(ids)) == len(result["calls"])
    return result


@pytest.mark.parametrize("run", [whole, streamed])
async def test_an_answer_is_split_into_its_parts(run: Any) -> None:
    arguments = '{"city": "Paris }"}'
    calls = [{"name": "weather", "arguments": arguments}] * 2
    async with chat_client(ANSWER) as (client, _):
        assert await run(client, tools=[TOOL]) == {
            "reasoning": "hm, a tool",
            "content": "Let me look.",
            "calls": calls,
            "finish": "tool_calls",
        }


@pytest.mark.parametrize("run", [whole, streamed])
async def test_reasoning_is_left_out_on_request(run: Any) -> None:
    async with chat_client(ANSWER) as (client, _):
        expected = await run(client, tools=[TOOL])
        shown = await run(client, tools=[TOOL], extra_body={"include_reasoning": False})
    assert expected["reasoning"] == "hm, a tool" and shown == {**expected, "reasoning": ""}


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize(
    ("stop", "arguments", "finish"),
    [("Paris", '{"city": "', "stop"), ("</tool_call>\n", '{"city": "Paris }"}', "tool_calls"), ("nowhere", None, "tool_calls")],
)
async def test_stop_string_inside_a_call_ends_no_call(run: Any, stop: str, arguments: str | None, finish: str) -> None:
    async with chat_client(ANSWER) as (client, _):
        result = await run(client, tools=[TOOL], stop=stop)
    assert result["finish"] == finish and (arguments is None or [call["arguments"] for call in result["calls"]] == [arguments])


@pytest.mark.parametrize("run", [whole, streamed])
async def test_without_tools_calls_are_text(run: Any) -> None:
    async with chat_client("x <tool_call>{}") as (client, _):
        assert (await run(client))["content"] == "x <tool_call>{}"
        assert (await run(client, tools=[TOOL], tool_choice="none"))["content"] == "x <tool_call>{}"


@pytest.mark.parametrize("run", [whole, streamed])
async def test_a_prompt_that_begins_the_reasoning(run: Any) -> None:
    async with chat_client("hm</think>yes") as (client, _):
        result = await run(client, extra_body={"chat_template_kwargs": {"thinking": True}})
        assert (result["reasoning"], result["content"], result["finish"]) == ("hm", "yes", "stop")


async def test_named_call_ends_like_openai_and_forces_its_grammar() -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    async with chat_client(f"<tool_call>\n{CALL}\n</tool_call>") as (client, backend):
        result = await whole(client, tools=[TOOL], tool_choice=choice)
        assert (result["calls"][0]["name"], result["finish"]) == ("weather", "stop")
        grammar = backend.requests[0].sampling.grammar
        assert grammar is not None and '"<tool_call>\\n"' in grammar.text


@pytest.mark.parametrize("run", [whole, streamed])
async def test_forced_calls_and_forms_follow_the_reasoning(run: Any) -> None:
    thinking = {"chat_template_kwargs": {"thinking": True}}
    async with chat_client(f"hm</think>\n\n<tool_call>\n{CALL}\n</tool_call>") as (client, backend):
        result = await run(client, tools=[TOOL], tool_choice="required", extra_body=thinking)
        assert (result["reasoning"], len(result["calls"]), result["finish"]) == ("hm", 1, "tool_calls")
        assert grammar_start(backend) == "start: thought BLANKS (calls)"
    async with chat_client('hm</think>\n\n{"a": 1}') as (client, backend):
        result = await run(client, response_format={"type": "json_object"}, extra_body=thinking)
        assert (result["reasoning"], result["content"]) == ("hm", '{"a": 1}')
        assert grammar_start(backend) == "start: thought BLANKS (form)"
    async with chat_client('{"a": 1}') as (client, backend):
        result = await run(client, response_format={"type": "json_object"})
        assert (result["reasoning"], result["content"]) == ("", '{"a": 1}')
        assert grammar_start(backend) == 'start: (BLANKS ("<think>") thought BLANKS)? (form)'


FORM: Any = {"type": "json_object"}


@pytest.mark.parametrize("run", [whole, streamed])
async def test_tools_and_a_form_leave_the_choice(run: Any) -> None:
    """To the model, which calls, or answers in the form: that may spell a call."""
    fields: Any = {"tools": [TOOL], "response_format": FORM, "extra_body": {"chat_template_kwargs": {"thinking": True}}}
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    async with chat_client(f"hm</think>\n\n{call}") as (client, backend):
        result = await run(client, **fields)
        assert (result["reasoning"], result["content"], result["finish"]) == ("hm", "", "tool_calls")
        assert [one["name"] for one in result["calls"]] == ["weather"]
        assert grammar_start(backend) == "start: thought BLANKS (form | calls)"
        await run(client, **fields, tool_choice="none")
        assert grammar_start(backend) == "start: thought BLANKS (form)"
    form = json.dumps({"a": call})
    async with chat_client(f"hm</think>{form}") as (client, _):
        result = await run(client, **fields, tool_choice="auto")
        assert (result["content"], result["calls"], result["finish"]) == (form, [], "stop")


def tool(name: str, **schema: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": schema}}}}


FREE = '"additionalProperties": true'
NAMES_TEMPLATE = TOOLS_TEMPLATE.replace("{{ tools | tojson }}", "{% for tool in tools %}{{ tool.function.name }} {% endfor %}")


@pytest.mark.parametrize("template", [NAMES_TEMPLATE, "{# <function= <parameter= #}" + NAMES_TEMPLATE])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "integer", "not": {"const": 1}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "integer", "description": "a" * 100_001},
    ],
)
async def test_tools_that_no_grammar_follows_leave_the_form(template: str, schema: dict[str, Any]) -> None:
    """Such a function may be called with any arguments, another one with those of its schema."""
    tools = [tool("other", type="array", maxItems=3), tool("unsupported", **schema)]
    async with chat_client('{"a": 1}', template) as (client, backend):
        assert (await whole(client, tools=tools, response_format=FORM))["content"] == '{"a": 1}'
        grammar = backend.requests[0].sampling.grammar
        assert grammar is not None and grammar.text.partition("\n")[0].endswith("(form | calls)")
        assert "maxItems" in grammar.text and "unsupported" in grammar.text
        assert not any(word in grammar.text for word in ("uniqueItems", '"not"', "propertyNames", "description"))
        with pytest.raises(openai.BadRequestError) as caught:
            await whole(client, tools=tools, response_format={"type": "json_object", "schema": {"uniqueItems": True}})
        assert (caught.value.param, caught.value.code) == ("response_format.schema", "invalid_grammar")


async def test_tools_too_long_together_leave_the_form() -> None:
    tools = [tool(f"long_{number}", type="array", title="a" * 60_000) for number in range(2)]
    async with chat_client('{"a": 1}', NAMES_TEMPLATE) as (client, backend):
        assert (await whole(client, tools=tools, response_format=FORM))["content"] == '{"a": 1}'
        grammar = backend.requests[0].sampling.grammar
        assert grammar is not None and grammar.text.count(FREE) == 2 and len(grammar.text) < 2_000


async def test_tools_without_a_grammar_allow_no_form() -> None:
    template = "{% if tools %}[func_name1(params)] {{ tools }}{% endif %}{{ messages[0].content }}"
    async with chat_client("no", template) as (client, _):
        with pytest.raises(openai.BadRequestError, match="pythonic, cannot be used with response_format") as caught:
            await whole(client, tools=[TOOL], response_format=FORM)
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
        assert (await whole(client, tools=[TOOL], response_format=FORM, tool_choice="none"))["content"] == "no"


async def test_ended_reasoning_leaves_the_bare_grammar() -> None:
    template = TOOLS_TEMPLATE.replace("<think>\n", "<think>\n\n</think>\n\n")
    async with chat_client('{"a": 1}', template) as (client, backend):
        fields: Any = {"response_format": {"type": "json_object"}, "extra_body": {"chat_template_kwargs": {"thinking": True}}}
        assert (await whole(client, **fields))["content"] == '{"a": 1}'
        assert backend.requests[0].sampling.grammar == wire.Grammar("json_schema", '{"type":"object"}')


async def test_a_schema_that_is_no_object_is_refused() -> None:
    async with chat_client("no") as (client, _):
        with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be read") as caught:
            await whole(client, extra_body={"guided_json": "[1]"})
        assert caught.value.code == "invalid_grammar"


def grammar_start(backend: FakeBackend) -> str:
    """Returns the first rule of the latest request's grammar."""
    grammar = backend.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "lark"
    return grammar.text.partition("\n")[0]


@pytest.mark.parametrize("run", [whole, streamed])
async def test_disabled_parallel_calls_return_only_the_first(run: Any) -> None:
    async with chat_client(ANSWER) as (client, _):
        assert len((await run(client, tools=[TOOL], parallel_tool_calls=False))["calls"]) == 1


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize(
    ("said", "text", "reasoning", "content"),
    [("It is", " sunny", "", " sunny"), ("<think>\nh", "m\n</think>\n\nyes", "m", "yes"), ("<think>a</think>b", " c", "", " c")],
)
async def test_continued_message_keeps_its_part(run: Any, said: str, text: str, reasoning: str, content: str) -> None:
    template = "{# <｜Assistant｜> </think> #}" + CHAT_TEMPLATE
    async with chat_client(text, template) as (client, backend):
        messages = [*USER, {"role": "assistant", "content": said}]
        result = await run(client, messages=messages, extra_body={"continue_final_message": True})
    assert (result["reasoning"], result["content"]) == (reasoning, content)
    assert tiny_tokenizer().decode(backend.requests[0].prompt, skip_special_tokens=False).endswith(f"<|assistant|>{said}")


@pytest.mark.parametrize(
    ("said", "start"), [("It is", None), ("<think>\nh", 'start: (BLANKS ("<think>"))? thought BLANKS (form)')]
)
async def test_form_of_a_continued_message_follows_its_part(said: str, start: str | None) -> None:
    template = "{# <｜Assistant｜> </think> #}" + CHAT_TEMPLATE
    async with chat_client("m", template) as (client, backend):
        messages = [*USER, {"role": "assistant", "content": said}]
        await whole(client, messages=messages, extra_body={"continue_final_message": True, "guided_choice": ["a", "b"]})
        grammar = backend.requests[0].sampling.grammar
        assert grammar is not None
        assert "thought" not in grammar.text if start is None else grammar_start(backend) == start


async def test_logprobs_of_held_tokens_are_sent_once() -> None:
    async with chat_client(ANSWER) as (client, _):
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, tools=[TOOL], logprobs=True, top_logprobs=1, stream=True
        )
        tokens = [e.token async for chunk in stream if (lp := chunk.choices[0].logprobs) is not None for e in lp.content or []]
        answer = await client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL], logprobs=True, top_logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert tokens == [entry.token for entry in logprobs.content]
        assert "".join(tokens) == ANSWER


async def test_the_template_sees_tools_and_earlier_calls() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "sun"}]
    async with chat_client("fine") as (client, backend):
        await whole(client, messages=messages, tools=[TOOL])
    text = tiny_tokenizer().decode(backend.requests[0].prompt)
    assert "weather(Paris)" in text and "<|tool|>sun" in text and "Tools: [" in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ],
)
async def test_tools_that_cannot_be_called_are_refused(fields: Any, param: str) -> None:
    async with chat_client("no") as (client, backend):
        with pytest.raises(openai.BadRequestError) as caught:
            await whole(client, **fields)
        assert caught.value.param == param
        assert not backend.requests


async def test_model_without_tool_support_refuses_tools() -> None:
    async with chat_client("no", "{{ messages[0].content }}") as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await whole(client, tools=[TOOL])
        assert caught.value.param == "tools"
