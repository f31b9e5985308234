"""Tools of a chat: refusals, template variables, grammars of forced calls."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.tools import (
    CalledFunction,
    Function,
    NamedChoice,
    NamedFunction,
    PastCall,
    Tool,
    ToolChoice,
    check_tools,
    forced_calls,
    shown_arguments,
    shown_calls,
    shown_tools,
)
from phalanx_frontend.text.grammar import grammar_source
from tests.runtime.tiny import save_tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    Tool(type="function", function=Function(name="weather", description="of a city", parameters=CITY)),
    Tool(type="function", function=Function(name="now")),
]
NAMED = NamedChoice(type="function", function=NamedFunction(name="weather"))
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
LLAMA = PARIS.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        ([], NAMED, "tool_choice"),
        (TOOLS[1:], NAMED, "tool_choice.function.name"),
        ([*TOOLS, TOOLS[0]], None, "tools[2].function.name"),
    ],
)
def test_uncallable_tool_is_refused(tools: list[Tool], choice: ToolChoice | None, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_tools(tools, choice)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("choice", "names"), [("none", []), ("auto", ["weather", "now"]), (NAMED, ["weather"])])
def test_the_template_sees_the_tools_that_may_be_called(choice: ToolChoice, names: list[str]) -> None:
    check_tools(TOOLS, choice)
    shown = shown_tools(TOOLS, choice)
    assert [tool["function"]["name"] for tool in shown] == names
    if shown:
        assert shown[0] == {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}


def follows(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("format", "choice", "parallel", "text", "expected"),
    [
        ("hermes", "required", True, f"<tool_call>\n{PARIS}\n</tool_call>", True),
        ("hermes", "required", True, f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{PARIS}\n</tool_call>", True),
        ("hermes", "required", False, f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{PARIS}\n</tool_call>", False),
        ("hermes", "required", True, '<tool_call>\n{"name": "now", "arguments": {"any": 1}}\n</tool_call>', True),
        ("hermes", NAMED, True, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', False),
        ("hermes", NAMED, True, '<tool_call>\n{"name": "weather", "arguments": {"city": 3}}\n</tool_call>', False),
        ("hermes", "required", True, "It is sunny.", False),
        ("llama3_json", "required", True, f"{LLAMA}; {LLAMA}", True),
        ("llama3_json", NAMED, True, LLAMA, True),
        ("llama3_json", NAMED, True, PARIS, False),
        ("llama3_json", NAMED, True, json.dumps(json.loads(LLAMA), indent=4), True),
        ("llama3_json", NAMED, True, LLAMA.replace(": ", ":\t\t"), False),
        ("hermes", "required", True, f"<tool_call>\n{PARIS.replace(chr(32), chr(10) * 3)}\n</tool_call>", False),
    ],
)
def test_a_forced_answer_is_calls_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, format: str, choice: ToolChoice, parallel: bool, text: str, expected: bool
) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    grammar = forced_calls(format, TOOLS, choice, parallel)
    assert grammar is not None
    assert follows(LLTokenizer((folder / "tokenizer.json").read_text()), grammar_source(grammar), text) is expected


def test_forced_call_resolves_schema_references(tmp_path: Path) -> None:
    nested = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "required": ["at"], "$defs": {"Place": CITY}}
    tool = Tool(type="function", function=Function(name="weather", parameters=nested))
    grammar = forced_calls("llama3_json", [tool, TOOLS[1]], "required", True)
    assert grammar is not None
    save_tokenizer(tmp_path)
    tokenizer = LLTokenizer((tmp_path / "tokenizer.json").read_text())
    assert follows(tokenizer, grammar_source(grammar), '{"name": "weather", "parameters": {"at": {"city": "Paris"}}}')
    assert not follows(tokenizer, grammar_source(grammar), '{"name": "weather", "parameters": {"at": "Paris"}}')


@pytest.mark.parametrize("format", ["pythonic", "functiongemma", "gemma4"])
def test_formats_without_a_grammar_refuse_forced_calls(format: str) -> None:
    with pytest.raises(ApiError) as caught:
        forced_calls(format, TOOLS, "required", True)
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_parameter")


def test_no_call_is_forced_by_default() -> None:
    assert forced_calls("hermes", TOOLS, "auto", True) is None
    assert forced_calls("hermes", TOOLS, None, True) is None


def test_earlier_calls_reach_the_template_as_objects() -> None:
    call = PastCall(id="call_1", function=CalledFunction(name="weather", arguments='{"city": "Paris"}'))
    assert json.dumps(shown_calls([call])[0]["function"]) == PARIS


@pytest.mark.parametrize("text", ["{", '{"city":"P', "5", "[1]", "null", '"Paris"', "[" * 100_000], ids=lambda text: text[:12])
def test_arguments_without_an_object_stay_readable(text: str) -> None:
    call = PastCall(id="call_1", function=CalledFunction(name="weather", arguments=text))
    assert shown_arguments(call) == {"invalid_json": text}
