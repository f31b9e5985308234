"""What the door says of grammars before any backend sees them."""

import pytest

from phalanx_api.wire import Grammar
from phalanx_frontend.text.grammar import GrammarError, check_grammar

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
def test_grammars_that_compile_pass(grammar: Grammar) -> None:
    check_grammar(grammar)


@pytest.mark.parametrize(("grammar", "why"), BAD.values(), ids=BAD.keys())
def test_others_are_refused_with_the_reason_in_one_line(grammar: Grammar, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as refused:
        check_grammar(grammar)
    assert "\n" not in str(refused.value)
