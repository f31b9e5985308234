"""The check of grammars before a backend receives them."""

from collections.abc import Callable

import pytest

from phalanx_api.wire import Grammar
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.structured import GrammarCheck
from phalanx_frontend.text.grammar_process import TOO_COSTLY, GrammarProcess
from tests.frontend.fakes import tiny_tokenizer_json

CHECK = GrammarCheck(tiny_tokenizer_json())
GOOD = [
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Grammar("json_schema", '{"x-guidance": {"whitespace_pattern": " "}, "type": "array"}'),
    Grammar("regex", "(yes|no)[0-9]{3}"),
    Grammar("lark", 'start: "a" [b]\nb: /[bc]+/'),
]
BAD = {
    "not json": (Grammar("json_schema", "{"), "cannot be read"),
    "no object": (Grammar("json_schema", "7"), "int|number|schema|object"),
    "unknown type": (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
    "regex": (Grammar("regex", "("), "unclosed group"),
    "lark": (Grammar("lark", "start: missing"), "missing"),
}


@pytest.mark.parametrize("grammar", GOOD, ids=lambda grammar: grammar.kind)
async def test_grammars_that_compile_pass(grammar: Grammar) -> None:
    await CHECK.check("form", grammar)


@pytest.mark.parametrize(("grammar", "why"), BAD.values(), ids=BAD.keys())
async def test_others_are_refused_with_the_reason_in_one_line(grammar: Grammar, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        await CHECK.check("form", grammar)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "form", "invalid_grammar")
    assert "\n" not in refused.value.message


def chain(length: int) -> Grammar:
    """A grammar whose rules each name the next one."""
    rules = [f"r{number}: r{number + 1}" for number in range(length)]
    return Grammar("lark", "\n".join(["start: r0", *rules, f'r{length}: "a"']))


def linked(length: int) -> Grammar:
    """A schema whose definitions each refer to the next one."""
    links = ",".join(f'"a{number}": {{"$ref": "#/$defs/a{number + 1}"}}' for number in range(length))
    return Grammar("json_schema", f'{{"$defs": {{{links}, "a{length}": {{}}}}, "$ref": "#/$defs/a0"}}')


@pytest.mark.parametrize("make", [chain, linked])
async def test_grammar_that_overflows_the_stack_is_refused(make: Callable[[int], Grammar]) -> None:
    await CHECK.check("form", make(100))
    with pytest.raises(ApiError, match="too many nested rules") as refused:
        await CHECK.check("form", make(3000))
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")
    await CHECK.check("form", make(101))


def test_grammar_without_an_end_is_refused_after_its_time() -> None:
    process = GrammarProcess(tiny_tokenizer_json(), cpu_s=0)
    assert process.problem(Grammar("json_schema", '{"type": "integer", "multipleOf": 99999989}')) == TOO_COSTLY
    assert process.problem(GOOD[2]) == ""
    process.close()
