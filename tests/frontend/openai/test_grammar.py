"""The check of grammars before a backend receives them."""

import pytest

from phalanx_api.wire import Grammar
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.structured import GrammarCheck
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
