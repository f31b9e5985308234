"""Calls that a client sends back are rendered as the model writes them, in templates in the manner of each family."""

import json
from typing import Any

import pytest

from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.prompt import render, tool_options
from phalanx_frontend.openai.schemas import Message
from phalanx_frontend.openai.served_model import ServedModel, load_model
from phalanx_frontend.openai.tools import CalledFunction, Function, PastCall, Tool
from phalanx_frontend.text.formats.conversation import SYSTEM_TOOLS, fitted_tools
from phalanx_frontend.text.formats.json_calls import DEEPSEEK
from phalanx_frontend.text.formats.registry import TOOL_FORMATS
from tests.frontend.fakes import FakeBackend, text_script, tiny_assets, tiny_tokenizer
from tests.frontend.posting import client_of
from tests.frontend.text.family_templates import FAMILY_TEMPLATES
from tests.frontend.text.part_lists import parse, read_calls
from tests.frontend.tool_chat import USER

SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
FUNCTIONS: dict[str, dict[str, Any]] = {"weather": SCHEMA, "now": {}}
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": 'Köln "}', "days": [1, {"a": None}]}), ("now", {})]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name]}} for name in FUNCTIONS]
ONE_CALL = {"llama3_json", "openai"}


def past(*ids: str) -> list[Message]:
    """Returns a conversation with both calls, reasoning, and their results in the other order."""
    calls = [
        PastCall(id=id, function=CalledFunction(name=name, arguments=json.dumps(arguments)))
        for id, (name, arguments) in zip(ids, CALLS, strict=True)
    ]
    results = [Message(role="tool", content=f"of {id}", tool_call_id=id) for id in reversed(ids)]
    assistant = Message(role="assistant", content="Let me look.", reasoning_content="hm", tool_calls=calls)
    return [Message(role="user", content="weather?"), assistant, *results]


def served(name: str) -> ServedModel:
    model = load_model(tiny_assets(chat_template=FAMILY_TEMPLATES[name]))
    assert model.chat_template().tool_format == name
    return model


def shown(name: str, *ids: str) -> str:
    return render(served(name), past(*ids), False, {"tools": fitted_tools(TOOLS, name)})


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_rendered_calls_are_read_as_sent(name: str) -> None:
    lines = [line for line in shown(name, "call_1", "call_2").replace("RESULT", "\nRESULT").split("\n") if "RESULT" not in line]
    text = "\n".join(lines)
    texts = [text] if name != "llama3_json" else [line for line in lines if line.startswith("{")]
    found = [call for part in texts for call in read_calls(parse(TOOL_FORMATS[name].parser(FUNCTIONS), [part]))]
    assert found == CALLS
    assert name in SYSTEM_TOOLS or "2 tools weather now" in text


@pytest.mark.parametrize("name", sorted(ONE_CALL))
def test_results_follow_their_calls(name: str) -> None:
    text = shown(name, "call_1", "call_2")
    places = [text.index(word) for word in ("Köln", "of call_1", "now", "of call_2")]
    assert places == sorted(places)


def test_mistral_ids_have_nine_characters() -> None:
    text = shown("mistral", "call_0123456789abcdef", "abcdefgh1")
    id = text.split("[CALL_ID]")[1][:9]
    assert id.isalnum() and f"RESULT {id} of call_0123456789abcdef" in text
    assert "[CALL_ID]abcdefgh1[ARGS]" in text and "RESULT abcdefgh1 of" in text


def test_kimi_ids_have_names_and_numbers() -> None:
    text = shown("kimi_k2", "call_1", "functions.now:7")
    assert "<|tool_call_begin|>functions.weather:0<" in text and "RESULT functions.weather:0 of call_1" in text
    assert "<|tool_call_begin|>functions.now:7<" in text


def test_harmony_thinking_has_the_content_before_a_call() -> None:
    assert "analysis<|message|>hm\nLet me look.<|end|>" in shown("openai", "call_1", "call_2")
    answered = [Message(role="user", content="x"), Message(role="assistant", content="y", reasoning_content="z")]
    assert "analysis<|message|>z<|end|>" in render(served("openai"), answered, False, {})


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_deepseek_reads_tools_from_the_system_message(name: str) -> None:
    model, tools = (
        served(name),
        [Tool(type="function", function=Function(name="weather", description="of a city", parameters=SCHEMA))],
    )
    options = tool_options(tools, None, model)
    text = render(model, [Message(role="system", content="Be brief."), Message(role="user", content="hi")], True, options)
    assert text.startswith("Be brief.\n\n## Tools\n") and "of a city" in text and json.dumps(SCHEMA) in text
    written = f"{DEEPSEEK.section}{DEEPSEEK.call}{'function' + DEEPSEEK.head_end if name == 'deepseek_v3' else ''}"
    assert written in text and text.count("weather") == 1
    assert render(model, [Message(role="user", content="hi")], True, options).startswith("## Tools\n")
    showing = load_model(tiny_assets(chat_template=FAMILY_TEMPLATES[name] + "{{ tools }}"))
    assert "## Tools" not in render(showing, [Message(role="user", content="hi")], True, options)


@pytest.mark.parametrize(("name", "content"), [("deepseek_v3", ""), ("deepseek_v3", "Let me look."), ("deepseek_v31", "")])
def test_deepseek_calls_have_no_content(name: str, content: str) -> None:
    asked, calls, *results = past("call_1", "call_2")
    text = render(served(name), [asked, calls.model_copy(update={"content": content}), *results], False, {})
    assert text.count("<｜tool▁call▁begin｜>") == 2
    assert [line for line in text.split("\n") if line.startswith("SAID")] == ([f"SAID {content}"] if content else [])


def test_tools_that_no_template_shows_are_refused() -> None:
    model = load_model(tiny_assets(chat_template="{# <tool_call> #}{{ messages[-1].content }}"))
    with pytest.raises(ApiError, match="does not show tools") as caught:
        tool_options([Tool(type="function", function=Function(name="now"))], None, model)
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_gpt_oss_tools_need_no_description() -> None:
    weather, now = (Tool(type="function", function=Function(name=name)) for name in FUNCTIONS)
    weather.function.description = "of a city"
    model = served("openai")
    text = render(model, [Message(role="user", content="hi")], False, tool_options([weather, now], None, model))
    assert "2 tools" in text and text.endswith("// of a city\n// \n")


def test_phi_reads_tools_from_the_system_message() -> None:
    text = shown("phi4_mini_json", "call_1", "call_2")
    functions = json.loads(text.split("<|tool|>")[1].split("<|/tool|>")[0])
    assert [function["name"] for function in functions] == ["weather", "now"]
    given = [Message(role="system", content="Be brief."), *past("call_1", "call_2")]
    assert render(served("phi4_mini_json"), given, False, {"tools": TOOLS}).count("<|tool|>") == 1


def test_results_have_the_names_of_their_functions() -> None:
    text = shown("functiongemma", "call_1", "call_2")
    assert "RESULT now of call_2" in text and "RESULT weather of call_1" in text
    given = [*past("call_1", "call_2")[:-1], Message(role="tool", name="other", content="x", tool_call_id="call_1")]
    assert "RESULT other x" in render(served("functiongemma"), given, False, {})
    with pytest.raises(ApiError, match="a result needs a name"):
        render(served("functiongemma"), [Message(role="tool", content="x", tool_call_id="unknown")], False, {})


def test_repeated_ids_name_the_latest_call() -> None:
    """Some models count the calls of each turn from 0."""
    turns = list[Message]()
    for name in ("weather", "now"):
        call = PastCall(id="call_0", function=CalledFunction(name=name, arguments="{}"))
        turns += [Message(role="user", content="?"), Message(role="assistant", content="", tool_calls=[call])]
        turns.append(Message(role="tool", content=f"of {name}", tool_call_id="call_0"))
    text = render(served("functiongemma"), turns, False, {})
    assert "RESULT weather of weather" in text and "RESULT now of now" in text


def test_gemma_results_are_in_the_turn_of_their_calls() -> None:
    answered = [*past("call_1", "call_2"), Message(role="assistant", content="Sunny."), Message(role="user", content="And now?")]
    text = render(served("gemma4"), answered, False, {})
    assert "<|turn>tool" not in text
    assert "<tool_call|>RESULT now of call_2\nRESULT weather of call_1\nSunny.<|turn>user\nAnd now?" in text
    assert text.startswith("<|turn>user\nweather?<|turn>assistant\nLet me look.<|turn>assistant\n<|tool_call>call:weather{")


def test_gemma_results_stay_messages_where_templates_read_them() -> None:
    source = FAMILY_TEMPLATES["gemma4"].replace("<|turn>", "{% if m['role'] == 'tool' %}TOOL {% endif %}<|turn>")
    text = render(load_model(tiny_assets(chat_template=source)), past("call_1", "call_2"), False, {})
    assert text.count("TOOL <|turn>tool\nof call_") == 2 and "RESULT" not in text


INSTRUCTED = [Message(role="developer", content="Be brief."), Message(role="user", content="hi")]
ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ROLES, "system: Be brief. user: hi "),
        (
            ROLES.replace("m.role }}", "{'developer': 'system', 'system': 'developer'}.get(m.role, m.role) }}"),
            "system: Be brief. ",
        ),
        ("{% if messages[0].role in ['system', \"developer\"] %}{{ messages[0].role }}{% endif %}", "developer"),
        ("{# for developers #}" + ROLES, "system: Be brief. user: hi "),
    ],
)
def test_developers_are_the_system_where_templates_have_none(source: str, expected: str) -> None:
    assert render(load_model(tiny_assets(chat_template=source)), INSTRUCTED, False, {}).startswith(expected)


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
async def test_conversation_continues_after_broken_arguments(name: str) -> None:
    broken = '{"city":"P'
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": broken}}
    chat = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    items = [{"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": broken}]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    backend = FakeBackend(text_script("ok"), tiny_assets(chat_template=FAMILY_TEMPLATES[name], max_model_len=2048))
    async with client_of(backend) as client:
        assert (await client.post("/v1/chat/completions", json={"messages": [*USER, *chat]})).status_code == 200
        first = (await client.post("/v1/responses", json={"input": [*USER, *items]})).json()
        answer = await client.post("/v1/responses", json={"previous_response_id": first["id"], "input": [output]})
        assert answer.status_code == 200, answer.text
    prompts = [tiny_tokenizer().decode(request.prompt, skip_special_tokens=False) for request in backend.requests]
    assert len(prompts) == 3 and all("invalid_json" in prompt and "city" in prompt for prompt in prompts)


def test_added_arguments_are_bounded() -> None:
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{% set ns = namespace(t='') %}"
    source += "{% for i in range(99) %}{% set ns.t = ns.t + a %}{% endfor %}"
    model = load_model(tiny_assets(chat_template=source))
    call = PastCall(id="call_1", function=CalledFunction(name="now", arguments=json.dumps({"a": "x" * 1_000_000})))
    with pytest.raises(ApiError, match="characters"):
        render(model, [Message(role="assistant", tool_calls=[call])], False, {})
