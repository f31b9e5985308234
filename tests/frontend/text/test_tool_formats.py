"""Each format reads the calls that were written in it, wherever its text is cut, and no text makes it fail."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.engine_config import ReasoningParser, ToolCallParser
from phalanx_frontend.text.formats.reasoning import GRANITE, Start, reasoning_parser
from phalanx_frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from phalanx_frontend.text.parts import Arguments, Content, PartParser, Reasoning, ToolCall
from tests.examples import examples
from tests.frontend.text.part_lists import cut, joined, parse, read_calls
from tests.frontend.text.recording import FILE, OFFERED
from tests.frontend.text.written_calls import WRITINGS, Call, Writing

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "place": {"$ref": "#/$defs/Place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "limit": {"type": ["integer", "null"]},
        "any": {"title": "Any"},
    },
    "$defs": {"Place": {"type": "object"}},
}
FUNCTIONS = {"f": SCHEMA, "get_weather": SCHEMA, "mcp.search-1": SCHEMA}
AWKWARD = "ab\"'\\{}[]()<>|/:,;=.\n\t é漢🦊\x00"
TEXTS = st.text(alphabet=AWKWARD, max_size=12) | st.sampled_from(
    ["</tool_call", '"}}]', "\\u00e9", "\\n", "```", "call:f{", "None"]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='k"}é', max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-(10**20), 10**20),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "items": st.lists(JSON_VALUES, max_size=3),
        "place": st.dictionaries(st.text(alphabet='k"}é', min_size=1, max_size=3), JSON_VALUES, max_size=3),
        "note": st.none() | TEXTS.filter(lambda text: text.strip().lower() not in ("none", "null")),
        "limit": st.none() | st.integers(-9, 9),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), ARGUMENTS), min_size=1, max_size=4)
PLACES = st.lists(st.integers(0, 400), max_size=12)


CASES = [pytest.param(name, w, id=f"{name} {i}") for name, ws in WRITINGS.items() for i, w in enumerate(ws)]
WORDS = (
    "f get_weather functions.f:0 <function=f> <parameter=text> </parameter> </function> functools call:f <|channel|>analysis "
    "<|channel|>final <think> </think> {text:1} json \\u12"
).split()
PHRASES = [
    '{"name": "f", "arguments": {"a": "}"}}', '{"text": "x"}', "f(text='a', items=[1, None])",
    "<|channel|>commentary to=functions.f", " to=functions.f",
]  # fmt: skip
ALL_MARKS = sorted({mark for tool_format in TOOL_FORMATS.values() for mark in tool_format.marks})
PIECES = st.sampled_from([*ALL_MARKS, *WORDS, *PHRASES, *"[]{}()\"'\\,:;= \nx1é"])
ANY_TEXT = st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=30)


def parser(name: str) -> PartParser:
    return TOOL_FORMATS[name].parser(FUNCTIONS)


def test_every_format_is_written_and_may_be_chosen() -> None:
    assert set(WRITINGS) == set(TOOL_FORMATS)
    assert {"auto", "none", *TOOL_FORMATS} == set(get_args(ToolCallParser))
    assert {"auto", "none", *REASONING_FORMATS} == set(get_args(ReasoningParser))


@pytest.mark.parametrize(("name", "writing"), CASES)
@settings(deadline=None, max_examples=examples(50))
@given(calls=CALLS, before=st.text(alphabet="ab 漢\n", max_size=5), places=PLACES)
def test_calls_are_read_as_written(name: str, writing: Writing, calls: list[Call], before: str, places: list[int]) -> None:
    before = before if writing.has_text else ""
    text = before + writing.write(calls)
    for pieces in ([text], list(text), cut(text, places)):
        parts = parse(parser(name), pieces)
        assert read_calls(parts) == calls
        assert "".join(part.text for part in parts if isinstance(part, Content)) == before.rstrip()


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], 42, True, None, "42 km", "Paris"])
def test_glm_writes_values_without_types_as_json(value: object) -> None:
    text = (
        f"<tool_call>f\n<arg_key>any</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
    )
    for pieces in ([text + "</tool_call>"], list(text + "</tool_call>")):
        assert read_calls(parse(parser("glm45"), pieces)) == [("f", {"any": value})]


@pytest.mark.parametrize(("parameter", "written", "value"), [
    ("note", "Paris", "Paris"), ("note", "42", "42"), ("note", "\nParis\n", "\nParis\n"), ("note", "None", None),
    ("note", "", ""), ("count", "many", "many"), ("items", "a\nb", "a\nb"), ("limit", "7", 7), ("any", "7", "7"),
])  # fmt: skip
def test_newlines_around_tagged_values_are_dropped(parameter: str, written: str, value: object) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        assert read_calls(parse(parser("qwen3_coder"), pieces)) == [("f", {parameter: value})]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(deadline=None, max_examples=examples(40))
@given(text=ANY_TEXT, places=PLACES)
def test_parts_depend_on_the_text_alone(name: str, text: str, places: list[int]) -> None:
    assert parse(parser(name), cut(text, places)) == parse(parser(name), [text]) == parse(parser(name), list(text))


@pytest.mark.parametrize(("name", "writing"), CASES)
@settings(deadline=None, max_examples=examples(40))
@given(calls=CALLS, length=st.integers(0, 300))
def test_cut_off_calls_never_fail(name: str, writing: Writing, calls: list[Call], length: int) -> None:
    text = writing.write(calls)[:length]
    parts = parse(parser(name), list(text))
    assert parts == parse(parser(name), [text])
    names = [part.name for part in parts if isinstance(part, ToolCall)]
    assert names == [name for name, _ in calls[: len(names)]]
    complete = {
        part.index: json.loads(part.text) for part in parts if isinstance(part, Arguments) and part.index < len(names) - 1
    }
    assert list(complete.values()) == [arguments for _, arguments in calls[: len(complete)]]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(deadline=None, max_examples=examples(40))
@given(text=ANY_TEXT, places=PLACES)
def test_what_is_sent_depends_on_the_prefix_alone(name: str, text: str, places: list[int]) -> None:
    for at in places:
        prefix = text[:at]
        one, other = parser(name), parser(name)
        assert joined([part for char in prefix for part in one.feed(char)]) == joined(other.feed(prefix))
        assert one.is_holding == other.is_holding


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(deadline=None, max_examples=30)
@given(text=st.text(alphabet="ab <>[|(\n", max_size=20))
def test_answer_without_calls_is_content(name: str, text: str) -> None:
    assert parse(parser(name), list(text)) == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_mark_is_part_of_another(name: str) -> None:
    marks = TOOL_FORMATS[name].marks
    assert not [(one, other) for one in marks for other in marks if one != other and one in other]


MARKS = {name: marks for name, marks in REASONING_FORMATS.items() if marks is not None}


@pytest.mark.parametrize("name", MARKS)
@settings(deadline=None, max_examples=40)
@given(reasoning=st.text(alphabet="ab <>\n漢", max_size=9), content=st.text(alphabet="ab <>[\n漢", max_size=9), places=PLACES)
def test_reasoning_is_read_as_written(name: str, reasoning: str, content: str, places: list[int]) -> None:
    marks = MARKS[name]
    text = f"{marks.begins[0]}\n{reasoning}\n{marks.ends[0]}\n{content}"
    for pieces in ([text], list(text), cut(text, places)):
        parts = parse(reasoning_parser(marks, "marked"), pieces)
        assert "".join(p.text for p in parts if isinstance(p, Reasoning)) == reasoning.strip("\n").lstrip(marks.blanks)
        assert "".join(p.text for p in parts if isinstance(p, Content)) == content.lstrip(marks.blanks)


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("start", ["marked", "inside", "outside"])
@settings(deadline=None, max_examples=examples(30))
@given(data=st.data(), places=PLACES)
def test_reasoning_depends_on_the_text_alone(name: str, start: Start, data: st.DataObject, places: list[int]) -> None:
    marks = MARKS[name]
    pieces = st.sampled_from([*marks.all, *marks.calls, *"\n ab<[H"])
    text = data.draw(st.lists(pieces, max_size=8).map("".join))
    whole = parse(reasoning_parser(marks, start), [text])
    assert parse(reasoning_parser(marks, start), cut(text, places)) == whole == parse(reasoning_parser(marks, start), list(text))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>hm</think>\n<response>\nFour.\n</response>\n", "Four.\n"),
        ("<think>hm</think>\n<response>Four", "Four"),
        ("<think>hm</think>\nFour.", "Four."),
        ("Here is my thought process: hm\nHere is my response: Four. </response>", "Four. </response>"),
    ],
)
def test_marks_around_the_answer_are_dropped(text: str, content: str) -> None:
    for pieces in ([text], list(text)):
        parts = parse(reasoning_parser(GRANITE, "marked"), pieces)
        assert parts == [Reasoning("hm"), Content(content)]


RECORDED: list[str] = json.loads(FILE.read_text())


def test_recorded_answers_have_calls_and_broken_calls() -> None:
    names = [name for answer in RECORDED for name, _ in read_calls(parse(TOOL_FORMATS["hermes"].parser(OFFERED), [answer]))]
    assert {"add", "search"} <= set(names) and len(names) < len(RECORDED)


@pytest.mark.parametrize("answer", RECORDED)
@settings(deadline=None, max_examples=10)
@given(places=PLACES)
def test_recorded_answers_are_read_as_written(answer: str, places: list[int]) -> None:
    parts = parse(TOOL_FORMATS["hermes"].parser(OFFERED), [answer])
    for pieces in (list(answer), cut(answer, places)):
        assert parse(TOOL_FORMATS["hermes"].parser(OFFERED), pieces) == parts
    body = answer.removeprefix("<tool_call>\n").partition("\n</tool_call>")[0]
    try:
        written = json.loads(body)
    except ValueError:
        return
    is_call = written["name"] in OFFERED
    assert read_calls(parts) == ([(written["name"], written["arguments"])] if is_call else [])
    assert "".join(part.text for part in parts if isinstance(part, Content)) == ("" if is_call else answer)
