"""Structured outputs: from request fields to one checked grammar."""

import json
from typing import Any

import pytest

from phalanx_api import wire
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.schemas import CompletionRequest
from phalanx_frontend.openai.structured import GrammarCheck, grammar_of
from phalanx_frontend.text.grammar import MAX_GRAMMAR_CHARS
from tests.frontend.fakes import tiny_tokenizer_json

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COMPACT = json.dumps(SCHEMA, separators=(",", ":"))
CHECK = GrammarCheck(tiny_tokenizer_json())
STRICT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": STRICT}, "json_schema", COMPACT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", COMPACT),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", COMPACT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", COMPACT),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", COMPACT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, "lark", 'start: "yes" | "n\\"o"'),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
        ({"guided_json": SCHEMA}, "json_schema", COMPACT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes"]}, "lark", 'start: "yes"'),
    ],
    ids=str,
)
async def test_each_spelling_gives_its_grammar(fields: dict[str, Any], kind: str, text: str) -> None:
    requested = grammar_of(completion(**fields))
    assert requested is not None
    assert (requested[1].kind, requested[1].text) == (kind, text)
    await CHECK.check(*requested)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}], ids=str)
def test_plain_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(completion(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": STRICT, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": "{no"}}, "structured_outputs.json"),
        ({"guided_json": {"title": "\ud800"}}, "guided_json"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_conflicting_or_empty_formats_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(completion(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "grammar",
    [
        wire.Grammar("regex", "(a|b"),
        wire.Grammar("json_schema", '{"type":"objekt"}'),
        wire.Grammar("json_schema", '{"$ref":"https://example.com/x"}'),
        wire.Grammar("json_schema", "[1]"),
        wire.Grammar("lark", "start: nothing"),
        wire.Grammar("lark", "start: A\nA: /.*a.{20}/ & /.*b.{30}/ & ~/.*c.{20}/"),
    ],
    ids=["open bracket", "no type", "elsewhere", "no schema", "unknown rule", "too costly"],
)
async def test_impossible_grammar_is_a_client_error(grammar: wire.Grammar) -> None:
    with pytest.raises(ApiError) as caught:
        await CHECK.check("guided_regex", grammar)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "guided_regex", "invalid_grammar")


async def test_gbnf_grammar_is_translated() -> None:
    requested = grammar_of(completion(guided_grammar='root ::= "yes" | "no"'))
    assert requested is not None and requested[1].kind == "lark" and "start:" in requested[1].text
    await CHECK.check(*requested)


async def test_unconstrainable_tokenizer_is_an_error() -> None:
    with pytest.raises(ApiError) as caught:
        await GrammarCheck(b"{}").check("guided_regex", wire.Grammar("regex", "a"))
    assert (caught.value.status, caught.value.code) == (400, "grammars_unsupported")
