"""Grammars of forced calls allow what a model of the format writes, and its parser reads it."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from phalanx_api import wire
from phalanx_frontend.text.formats.forced import call_syntax, forced_grammar
from phalanx_frontend.text.formats.reader import Functions
from phalanx_frontend.text.formats.registry import TOOL_FORMATS
from phalanx_frontend.text.grammar import GrammarError, grammar_source
from phalanx_frontend.text.parts import Content
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import tiny_tokenizer_json
from tests.frontend.text.part_lists import parse, read_calls
from tests.frontend.text.written_calls import WRITINGS, Call

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "number"}}}}},
}
FUNCTIONS = {"weather": SCHEMA, "mcp.now": {}}
CASES = {
    "hermes": ("hermes", 0, []),
    "llama3_json": ("llama3_json", 0, []),
    "llama4_pythonic": ("llama3_json", 0, []),
    "mistral": ("mistral", 0, ["[TOOL_CALLS]", "[ARGS]"]),
    "qwen3_coder": ("qwen3_coder", 0, []),
    "qwen3_xml": ("qwen3_xml", 0, ["<tool_call>"]),
    "deepseek_v3": ("deepseek_v3", 0, []),
    "deepseek_v31": ("deepseek_v31", 0, list(TOOL_FORMATS["deepseek_v31"].marks)),
    "openai": ("openai", 0, list(TOOL_FORMATS["openai"].marks)),
    "phi4_mini_json": ("phi4_mini_json", 1, ["<|tool_call|>", "<|/tool_call|>"]),
    "granite": ("granite", 1, ["<|tool_call|>"]),
    "glm45": ("glm45", 0, []),
    "kimi_k2": ("kimi_k2", 0, list(TOOL_FORMATS["kimi_k2"].marks)),
}
"""The writing of each format, and its special tokens."""
WITHOUT_MARKS = {"mistral": ("mistral", 2), "phi4_mini_json": ("phi4_mini_json", 0), "granite": ("granite", 0)}
CITIES = st.text(alphabet='ab"\\{}<>\n é漢', max_size=6)
WEATHER = st.fixed_dictionaries(
    {"city": CITIES},
    optional={
        "unit": st.sampled_from(["C", "F"]),
        "days": st.integers(-9, 99),
        "place": st.fixed_dictionaries({}, optional={"at": st.lists(st.integers(0, 9), max_size=2)}),
    },
)
ORDERED = WEATHER.map(lambda arguments: {key: arguments[key] for key in SCHEMA["properties"] if key in arguments})
CALLS: st.SearchStrategy[list[Call]] = st.lists(
    st.tuples(st.just("weather"), ORDERED) | st.just(("mcp.now", {})), min_size=1, max_size=3
)


@cache
def tokenizers(marks: tuple[str, ...]) -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json().decode())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer, LLTokenizer(tokenizer.to_str()), {mark: int(tokenizer.token_to_id(mark) or 0) for mark in marks}


def matcher_of(name: str, marks: list[str], is_single: bool, functions: Functions = FUNCTIONS) -> LLMatcher:
    _, guide, special = tokenizers(tuple(marks))
    syntax = call_syntax(name, special)
    assert syntax is not None
    grammar = forced_grammar(syntax, functions, is_single, special)
    matcher = LLMatcher(guide, grammar_source(wire.Grammar("lark", grammar)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def follows(name: str, marks: list[str], text: str, is_single: bool = False, functions: Functions = FUNCTIONS) -> bool:
    tokenizer, _, _ = tokenizers(tuple(marks))
    matcher = matcher_of(name, marks, is_single, functions)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(name: str, number: int, calls: list[Call]) -> str:
    text = WRITINGS[name][number].write(calls)
    if name == "openai":  # the prompt ends with the first header's start, and `<|call|>` ends the answer
        text = text.removeprefix("<|start|>assistant").removesuffix("<|call|>")
    return text.replace("[TOOL_CALLS] [", "[TOOL_CALLS][")


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=15)
@given(calls=CALLS)
def test_written_calls_follow_the_grammar(name: str, calls: list[Call]) -> None:
    writing, number, marks = CASES[name]
    calls = calls[:1] if name == "openai" else calls
    text = written(writing, number, calls)
    assert follows(name, marks, text)
    assert follows(name, marks, text, is_single=True) is (len(calls) == 1)
    assert read_calls(parse(TOOL_FORMATS[name].parser(FUNCTIONS), list(text))) == calls


@pytest.mark.parametrize("name", WITHOUT_MARKS)
def test_marks_are_text_where_they_are_no_tokens(name: str) -> None:
    calls: list[Call] = [("weather", {"city": "Paris"}), ("mcp.now", {})]
    assert follows(name, [], written(*WITHOUT_MARKS[name], calls))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
def test_added_tokens_are_tokens_though_not_special(name: str) -> None:
    """As those of Qwen and GLM."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json().decode())
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in TOOL_FORMATS[name].marks])
    tokens = TextTokenizer(tokenizer.to_str().encode()).grammar_tokens
    syntax = call_syntax(name, tokens)
    assert syntax is not None and set(TOOL_FORMATS[name].marks) <= set(tokens)
    grammar = wire.Grammar("lark", forced_grammar(syntax, FUNCTIONS, False, tokens))
    for city, follows_it in [("Paris < é", True), (3, False)]:
        text = written(CASES[name][0], CASES[name][1], [("weather", {"city": city, "days": 2 if follows_it else "no"})])
        matcher = LLMatcher(LLTokenizer(tokenizer.to_str()), grammar_source(grammar))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is follows_it, matcher.get_error()


@pytest.mark.parametrize("name", CASES)
def test_other_answers_do_not_follow(name: str) -> None:
    writing, number, marks = CASES[name]
    assert not follows(name, marks, "It is sunny.")
    for call in [
        ("weather", {}),
        ("weather", {"city": "Paris", "days": "two"}),
        ("other", {}),
        ("weather", {"city": "a", "unit": "K"}),
    ]:
        assert not follows(name, marks, written(writing, number, [call])), call


def parameter(schema: dict[str, Any]) -> dict[str, Any]:
    definitions = {
        "$defs": {"Unit": {"enum": ["C", "F"]}, "Point": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        "definitions": {"Level": {"type": "integer", "enum": [1, 2]}},
    }
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], **definitions}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]}, ["C", "F", None], ["K", 3, []]),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "integer"}]}, ["C", 3], ["K", None, "null"]),
        ({"oneOf": [{"const": "all"}, {"type": "array", "items": {"type": "integer"}}]}, ["all", [1]], ["any", ["all"]]),
        ({"type": ["string", "null"]}, ["C", "K"], []),
        ({"type": ["string", "null"], "enum": ["C", None]}, ["C", None], ["K", 3]),
        ({"$ref": "#/$defs/Unit"}, ["C", "F"], ["K", None]),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "title": "U"}, ["C", "F"], ["K", None]),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, [{"x": 1}], ["x", {"x": "y"}, {}]),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, [1], [1.5, "x"]),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, [1], [1.5, "x"]),
        ({"$ref": "#/definitions/Level"}, [1, 2], [3, "1 or 2"]),
        ({"properties": {"x": {"type": "integer"}}, "required": ["x"]}, [{"x": 1}], ["x", {}]),
        ({"additionalProperties": {"type": "integer"}}, [{"x": 1}, {}], ["x", {"x": "y"}]),
        ({"items": {"type": "integer"}}, [[1, 2]], ["x", ["y"]]),
    ],
)
def test_values_in_tags_follow_their_schema(schema: dict[str, Any], allowed: list[Any], refused: list[Any]) -> None:
    functions = {"f": parameter(schema)}
    for name in ("qwen3_coder", "glm45"):
        for value in (*allowed, *refused):
            text = written(name, 0, [("f", {"v": value})]).replace("\nNone\n", "\nnull\n")
            assert follows(name, [], text, functions=functions) is (value in allowed), (name, value)
            found = read_calls(parse(TOOL_FORMATS[name].parser(functions), list(text)))
            assert value in refused or found == [("f", {"v": value})]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_additional_parameters_may_be_written(name: str) -> None:
    functions = {"f": {"type": "object", "additionalProperties": {"type": "integer"}}}
    for arguments in ({}, {"a": 1}, {"a": 1, "b_2": 22}):
        text = written(name, 0, [("f", arguments)])
        assert follows(name, [], text, functions=functions)
        assert read_calls(parse(TOOL_FORMATS[name].parser(functions), list(text))) == [("f", arguments)]
    assert not follows(name, [], written(name, 0, [("f", {"a": "x"})]), functions=functions)
    assert follows(name, [], written(name, 0, [("f", {"a": "x"})]), functions={"f": {"additionalProperties": True}})


class CountingSchema(dict[str, Any]):
    """A schema that counts how often its words are read."""

    reads = 0

    def get(self, word: str, default: Any = None) -> Any:
        """Reads a word."""
        CountingSchema.reads += 1
        return super().get(word, default)


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_schemas_that_refer_to_themselves_are_cheap(word: str) -> None:
    CountingSchema.reads = 0
    itself = CountingSchema({word: [CountingSchema({"$ref": "#/$defs/A"}) for _ in range(40)]})
    schema = parameter(CountingSchema({"$ref": "#/$defs/A"})) | {"$defs": {"A": itself}}
    syntax = call_syntax("glm45", {})
    assert syntax is not None
    forced_grammar(syntax, {"f": schema}, True, {})
    read_calls(parse(TOOL_FORMATS["glm45"].parser({"f": schema}), [written("glm45", 0, [("f", {"v": 1})])]))
    assert 0 < CountingSchema.reads < 200_000


def test_definitions_that_many_parameters_repeat_are_bounded() -> None:
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(300)}, "$defs": {"A": {"title": "a" * 1_000}}}
    syntax = call_syntax("qwen3_coder", {})
    assert syntax is not None
    with pytest.raises(GrammarError, match="more than 100000 characters"):
        forced_grammar(syntax, {"f": schema}, True, {})


@pytest.mark.parametrize("name", CASES)
def test_every_allowed_answer_is_read(name: str) -> None:
    """Random tokens of the grammar, the end of a text in tags or quotes preferred, make calls without content."""
    _, _, marks = CASES[name]
    tokenizer, _, special = tokenizers(tuple(marks))
    source, ended = random.Random(name), 0
    for _ in range(12):
        matcher, tokens = matcher_of(name, marks, is_single=False), list[int]()
        while not matcher.is_accepting() and len(tokens) < 250:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(mask[: tokenizer.get_vocab_size()])]
            closing = [token for token in allowed if token in special.values() or tokenizer.decode([token])[:1] in '"</}']
            tokens.append(source.choice(closing if closing and source.random() < 0.5 else allowed))
            assert matcher.consume_token(tokens[-1])
        if not matcher.is_accepting():
            continue
        ended += 1
        parts = parse(TOOL_FORMATS[name].parser(FUNCTIONS), list(tokenizer.decode(tokens, skip_special_tokens=False)))
        assert read_calls(parts) and not any(isinstance(part, Content) for part in parts)
    assert ended
