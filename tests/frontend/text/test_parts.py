"""Reasoning and tool calls in text pieces: the result does not depend on the cuts."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_frontend.text.formats.reasoning import THINK, reasoning_parser
from phalanx_frontend.text.formats.registry import TOOL_FORMATS
from phalanx_frontend.text.parts import Arguments, Content, ParserChain, Part, PartParser, Reasoning, ToolCall
from tests.examples import examples
from tests.frontend.text.part_lists import cut, parse, read_calls

FUNCTIONS: dict[str, dict[str, Any]] = {name: {} for name in "fgh"}
HERMES, LLAMA = TOOL_FORMATS["hermes"], TOOL_FORMATS["llama3_json"]
MAKERS: dict[str, Callable[[], PartParser]] = {
    "reasoning": lambda: reasoning_parser(THINK, "marked"),
    "reasoning inside": lambda: reasoning_parser(THINK, "inside"),
    "hermes": lambda: HERMES.parser(FUNCTIONS),
    "llama": lambda: LLAMA.parser(FUNCTIONS),
    "reasoning, hermes": lambda: ParserChain(reasoning_parser(THINK, "marked"), HERMES.parser(FUNCTIONS)),
}
CALL_F, CALL_G = '{"name": "f", "arguments": {"a": "}"}}', '{"parameters": [1, "\\""], "name":"g"}'
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", CALL_F, CALL_G, '{"name": 3}', '{"name": "h"}')
PIECES = st.sampled_from([*MARKS, *'< \nx{}"\\;é'])
TEXTS = st.lists(PIECES, max_size=10).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(alphabet='ab"\\{}[]<é ', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='k"}', max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.text(alphabet='fg_"', min_size=1, max_size=4), st.dictionaries(st.text(max_size=3), JSON_VALUES)))


@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None, max_examples=150)
@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=8))
def test_parts_do_not_depend_on_how_the_text_came(kind: str, text: str, places: list[int]) -> None:
    assert parse(MAKERS[kind](), cut(text, places)) == parse(MAKERS[kind](), [text])
    assert parse(MAKERS[kind](), list(text)) == parse(MAKERS[kind](), [text])


@pytest.mark.parametrize("kind", ["hermes", "llama", "reasoning"])
@settings(deadline=None, max_examples=80)
@given(text=st.text(alphabet="ab <>\n", max_size=20))
def test_answer_without_markers_is_content(kind: str, text: str) -> None:
    assert parse(MAKERS[kind](), list(text)) == ([Content(text)] if text else [])


@settings(deadline=None, max_examples=examples(80))
@given(calls=CALLS, content=st.text(alphabet="ab", max_size=4))
def test_hermes_calls_are_read_as_written(calls: list[tuple[str, dict[str, Any]]], content: str) -> None:
    written = "".join(f"\n<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    parts = parse(HERMES.parser(functions_of(calls)), list(content + written))
    assert read_calls(parts) == calls
    assert "".join(part.text for part in parts if isinstance(part, Content)) == content


@settings(deadline=None, max_examples=examples(80))
@given(calls=CALLS.filter(bool))
def test_llama_calls_are_read_as_written(calls: list[tuple[str, dict[str, Any]]]) -> None:
    parts = parse(
        LLAMA.parser(functions_of(calls)),
        list("; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)),
    )
    assert read_calls(parts) == calls
    assert not any(isinstance(part, Content) for part in parts)


def functions_of(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {name: {} for name, _ in calls}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [ToolCall(0, "f"), Arguments(0, '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> ', [ToolCall(0, "f"), Arguments(0, "{}")]),
        ("hermes", 'so <tool_call>{"name": 3}</tool_call>', [Content('so <tool_call>{"name": 3}</tool_call>')]),
        ("hermes", 'so <tool_call>{"na', [Content('so <tool_call>{"na')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a', [ToolCall(0, "f"), Arguments(0, '{"a')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>done', [ToolCall(0, "f"), Arguments(0, "{}"), Content("done")]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', [ToolCall(0, "f"), Arguments(0, "{}")]),
        ("llama", '{"a": 1}', [Content('{"a": 1}')]),
        ("llama", '{"name": "Alice", "age": 30}', [Content('{"name": "Alice", "age": 30}')]),
        ("hermes", '<tool_call>{"name": "rm"}</tool_call>', [Content('<tool_call>{"name": "rm"}</tool_call>')]),
        ("llama", r'{"name": "f", "parameters": "{\"a\": 1}"}', [ToolCall(0, "f"), Arguments(0, '{"a": 1}')]),
        ("llama", '{"name": "f", "parameters": null}', [ToolCall(0, "f"), Arguments(0, "{}")]),
        ("llama", '{"name": "f", "parameters": [1]}', [Content('{"name": "f", "parameters": [1]}')]),
        ("llama", '{"name": "f", "name": "g"}', [Content('{"name": "f", "name": "g"}')]),
        ("llama", "plain {", [Content("plain {")]),
        ("reasoning", "<think>\nhm\n\n</think>\n\nyes\n", [Reasoning("hm"), Content("yes\n")]),
        ("reasoning", "<think>\n\n</think>\n\nyes", [Content("yes")]),
        ("reasoning", "<think>cut of", [Reasoning("cut of")]),
        ("reasoning", "  <thin", [Content("  <thin")]),
        ("reasoning inside", "hm</think>yes", [Reasoning("hm"), Content("yes")]),
    ],
)
def test_table(kind: str, text: str, expected: list[Part]) -> None:
    assert parse(MAKERS[kind](), list(text)) == expected


def test_call_name_is_sent_before_its_arguments_end() -> None:
    parser = HERMES.parser(FUNCTIONS)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Par') == [ToolCall(0, "f"), Arguments(0, '{"city": "Par')]
    assert parser.feed('is"}') == [Arguments(0, 'is"}')]
