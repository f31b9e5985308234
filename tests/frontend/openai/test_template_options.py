"""Variables of the chat template that fields of requests set."""

from typing import Any

import pytest

from phalanx_frontend.anthropic import conversation as messages_api
from phalanx_frontend.anthropic.schemas import CountTokensRequest
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.prompt import chat_prompts, tokenize_prompt
from phalanx_frontend.openai.schemas import ChatRequest, TokenizeRequest
from phalanx_frontend.openai.served_model import ServedModel, load_model
from phalanx_frontend.openai_responses import conversation as responses_api
from phalanx_frontend.openai_responses.schemas import CountInputRequest
from tests.frontend.fakes import tiny_assets

USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SWITCHES = "{{ enable_thinking }} {{ thinking }}|"


async def rendered(chat: ChatRequest, model: ServedModel) -> str:
    [prompt] = await chat_prompts(chat, model)
    return model.tokenizer.decode(prompt.tokens, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, " |"),
        ({"reasoning_effort": "low"}, " |"),
        ({"reasoning_effort": "none"}, "False False|"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "False True|"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True |"),
    ],
)
async def test_effort_none_switches_reasoning_off(fields: dict[str, Any], expected: str) -> None:
    chat = ChatRequest.model_validate({"messages": USER, **fields})
    assert await rendered(chat, load_model(tiny_assets(chat_template=SWITCHES))) == expected


@pytest.mark.parametrize("options", [{"tools": [1]}, {"messages": []}, {"add_generation_prompt": False}])
async def test_fields_of_the_request_are_no_options(options: dict[str, Any]) -> None:
    model, [name] = load_model(tiny_assets()), options
    with pytest.raises(ApiError) as caught:
        await chat_prompts(ChatRequest.model_validate({"messages": USER, "chat_template_kwargs": options}), model)
    assert (caught.value.status, caught.value.param) == (400, f"chat_template_kwargs.{name}")
    with pytest.raises(ApiError, match=name):
        await tokenize_prompt(TokenizeRequest.model_validate({"messages": USER, "chat_template_kwargs": options}), model)


@pytest.mark.parametrize(
    ("thinking", "expected"), [(None, "False False|"), ("disabled", "False False|"), ("enabled", "True True|")]
)
async def test_thinking_of_messages_sets_both_switches(thinking: str | None, expected: str) -> None:
    given = {} if thinking is None else {"thinking": {"type": thinking, "budget_tokens": 1024}}
    body = CountTokensRequest.model_validate({"model": "tiny", "messages": USER, **given})
    assert await rendered(messages_api.chat_request(body), load_model(tiny_assets(chat_template=SWITCHES))) == expected


@pytest.mark.parametrize(("effort", "expected"), [("none", "False False|"), ("low", " |")])
async def test_effort_of_responses_sets_both_switches(effort: str, expected: str) -> None:
    body = CountInputRequest.model_validate({"input": "hi", "reasoning": {"effort": effort}})
    chat = responses_api.chat_request(body, responses_api.Conversation(body.input or [], 0))
    assert await rendered(chat, load_model(tiny_assets(chat_template=SWITCHES))) == expected


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": None},
        {"reasoning": "hm", "reasoning_content": ""},
        {"reasoning": None, "reasoning_content": "hm"},
        {"reasoning": "other", "reasoning_content": "hm"},
    ],
)
async def test_reasoning_of_earlier_turns_has_two_names(thoughts: dict[str, str | None]) -> None:
    turns = [*USER, {"role": "assistant", "content": "yes", **thoughts}, *USER]
    source = "{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}"
    assert (
        await rendered(ChatRequest.model_validate({"messages": turns}), load_model(tiny_assets(chat_template=source)))
        == "[][hm][]"
    )


@pytest.mark.parametrize("said", ["It is", "It is ", "|", "user", "a\n\n"])
async def test_last_message_is_continued_where_it_ends(said: str) -> None:
    model, messages = load_model(tiny_assets()), [*USER, {"role": "assistant", "content": said}]
    expected = f"<bos><|user|>hi\n<|assistant|>{said}"
    chat = ChatRequest.model_validate({"messages": messages, "continue_final_message": True, "add_generation_prompt": False})
    assert await rendered(chat, model) == expected
    body = TokenizeRequest.model_validate({"messages": messages, "continue_final_message": True})
    assert model.tokenizer.decode(await tokenize_prompt(body, model), skip_special_tokens=False) == expected
    given = CountTokensRequest.model_validate({"model": "tiny", "messages": messages})
    assert await rendered(messages_api.chat_request(given), model) == expected


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        (USER, {}, "continue_final_message"),
        ([*USER, {"role": "assistant", "content": ""}], {}, "continue_final_message"),
        ([*USER, {"role": "assistant", "content": "x", "tool_calls": [CALL]}], {}, "continue_final_message"),
        ([*USER, {"role": "assistant", "content": "x"}], {"add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
async def test_other_last_messages_are_not_continued(messages: Any, fields: dict[str, Any], param: str) -> None:
    chat = ChatRequest.model_validate({"messages": messages, "continue_final_message": True, **fields})
    with pytest.raises(ApiError) as caught:
        await chat_prompts(chat, load_model(tiny_assets()))
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_template_must_show_the_message_it_continues() -> None:
    chat = ChatRequest.model_validate(
        {"messages": [*USER, {"role": "assistant", "content": "x"}], "continue_final_message": True}
    )
    with pytest.raises(ApiError, match="does not show the end"):
        await chat_prompts(chat, load_model(tiny_assets(chat_template="{{ messages[0].content }}")))
