"""Grammars as llguidance reads them: the door checks them, the rank that draws masks with them, both from the same words here.

Between the tokens of JSON one space or one line end with its indentation is allowed, so that a model cannot fill its answer with
blanks.
"""

from typing import assert_never

from llguidance import LLMatcher

from phalanx_api import wire

INDENTATION = 40
"""Spaces after a line end: ten levels by four."""
BLANKS_PATTERN = rf" |\r?\n {{0,{INDENTATION}}}|\r?\n\t{{1,10}}"
"""What may stand between the tokens of JSON."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, or cannot go on: the message says why, for the client."""


def grammar_source(grammar: wire.Grammar) -> str:
    """What llguidance compiles. Raises GrammarError for a JSON schema that is no JSON object."""
    match grammar.kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": BLANKS_PATTERN})
            except ValueError as error:
                raise GrammarError(f"the JSON schema cannot be read: {error}") from error
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case _:
            assert_never(grammar.kind)
