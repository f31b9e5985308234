"""llguidance source of a grammar, for API server and sampling rank.

Between JSON tokens one space or one indented newline is allowed, so that a model cannot fill its output with blanks.
"""

from typing import assert_never

from llguidance import LLMatcher

from phalanx_api import wire

MAX_GRAMMAR_CHARS = 100_000
"""About a second to compile."""
INDENTATION = 40
"""Maximum spaces after a newline."""
BLANKS_PATTERN = rf" |\r?\n {{0,{INDENTATION}}}|\r?\n\t{{1,10}}"


class GrammarError(ValueError):
    """A grammar cannot be compiled or continued."""


def grammar_source(grammar: wire.Grammar) -> str:
    """Returns the source that llguidance compiles. Raises GrammarError."""
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
