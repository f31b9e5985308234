"""Grammars of answers with calls only, in the syntax of a format.

    hermes, llama3_json, ...    an object with name and arguments, perhaps in a list
    deepseek, kimi_k2, ...      a name, then its arguments
    qwen3_coder, glm45          a name, then a tag for each parameter: those with required values once, others at most once

A mark that is an added token of the tokenizer is that token, other marks are text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx_frontend.text.formats.json_calls import (
    DEEPSEEK,
    DEEPSEEK_KIND,
    FUNCTOOLS,
    HERMES_BEGIN,
    HERMES_END,
    KIMI,
    MISTRAL_ARGS,
    MISTRAL_BEGIN,
    TOOL_CALL,
    TOOL_CALL_ENDS,
)
from phalanx_frontend.text.formats.reader import Functions
from phalanx_frontend.text.formats.registry import HARMONY
from phalanx_frontend.text.formats.tagged_calls import (
    FUNCTION,
    FUNCTION_END,
    KEY,
    KEY_END,
    PARAMETER,
    PARAMETER_END,
    VALUE,
    VALUE_END,
)
from phalanx_frontend.text.formats.typed_values import Parameters
from phalanx_frontend.text.grammar import BLANKS_PATTERN, MAX_GRAMMAR_CHARS, GrammarError

Tokens = Mapping[str, int]
"""`TextTokenizer.grammar_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Texts around the calls of an answer, and around the parts of each."""

    key: str = ""
    """Of the arguments in an object with the name; otherwise the name precedes an object of arguments."""
    open: str = ""
    before: str = ""
    name_end: str = ""
    after: str = ""
    between: str = ""
    close: str = ""
    is_single: bool = False
    parameter: str = ""
    """Before the name of a parameter; then these have tags."""
    key_end: str = ""
    value_end: str = ""

    @property
    def opening(self) -> str:
        """Text that begins calls; empty for an object alone."""
        return self.open + self.before


_LLAMA = CallSyntax(key="parameters", between="; ")
_QWEN3_CODER = CallSyntax(
    before=f"{HERMES_BEGIN}\n{FUNCTION}",
    name_end=">\n",
    parameter=PARAMETER,
    key_end=">\n",
    value_end=f"\n{PARAMETER_END}\n",
    after=f"{FUNCTION_END}\n{HERMES_END}",
    between="\n",
)
_SYNTAX: Final = {
    "hermes": CallSyntax(key="arguments", before=f"{HERMES_BEGIN}\n", after=f"\n{HERMES_END}", between="\n"),
    "llama3_json": _LLAMA,
    "llama4_pythonic": _LLAMA,
    "mistral": CallSyntax(before=MISTRAL_BEGIN, name_end=MISTRAL_ARGS),
    "mistral list": CallSyntax(key="arguments", open=f"{MISTRAL_BEGIN}[", between=", ", close="]"),
    "deepseek_v3": CallSyntax(
        open=DEEPSEEK.section,
        before=f"{DEEPSEEK.call}{DEEPSEEK_KIND}{DEEPSEEK.head_end}",
        name_end="\n```json\n",
        after=f"\n```{DEEPSEEK.call_end}",
        between="\n",
        close=DEEPSEEK.section_end,
    ),
    "deepseek_v31": CallSyntax(
        open=DEEPSEEK.section,
        before=DEEPSEEK.call,
        name_end=DEEPSEEK.head_end,
        after=DEEPSEEK.call_end,
        close=DEEPSEEK.section_end,
    ),
    "kimi_k2": CallSyntax(
        open=KIMI.section,
        before=f"{KIMI.call}functions.",
        name_end=f":\0{KIMI.head_end}",
        after=KIMI.call_end,
        close=KIMI.section_end,
    ),
    HARMONY: CallSyntax(before="<|channel|>commentary to=functions.", name_end=" <|constrain|>json<|message|>", is_single=True),
    "phi4_mini_json": CallSyntax(key="arguments", open=f"{TOOL_CALL}[", between=", ", close=f"]{TOOL_CALL_ENDS[0]}"),
    "phi4_mini_json text": CallSyntax(key="arguments", open=f"{FUNCTOOLS}[", between=", ", close="]"),
    "granite": CallSyntax(key="arguments", open=f"{TOOL_CALL}[", between=", ", close="]"),
    "granite text": CallSyntax(key="arguments", before=f"{HERMES_BEGIN}\n", after=f"\n{HERMES_END}", between="\n"),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "glm45": CallSyntax(
        before=HERMES_BEGIN,
        name_end="\n",
        parameter=KEY,
        key_end=f"{KEY_END}\n{VALUE}",
        value_end=f"{VALUE_END}\n",
        after=HERMES_END,
        between="\n",
    ),
}
"""By name of the format, or of its variant. A NUL is a number."""
_ANY_NAME: Final = "/[a-zA-Z0-9_.-]{1,64}/"


def call_syntax(format: str, tokens: Tokens) -> CallSyntax | None:
    """Returns the syntax of forced calls; null for formats without one. Checkpoints of one format differ in their tokens."""
    variants = {
        "mistral": ("mistral list", MISTRAL_ARGS),
        "phi4_mini_json": ("phi4_mini_json text", TOOL_CALL),
        "granite": ("granite text", TOOL_CALL),
    }
    other, mark = variants.get(format, ("", ""))
    return _SYNTAX.get(other if other and mark not in tokens else format)


def forced_grammar(syntax: CallSyntax, functions: Functions, is_single: bool, tokens: Tokens) -> str:
    """Returns the Lark source of an answer with one or more calls of `functions`, or with one alone.

    Raises GrammarError if it is too long.
    """
    one = _object_call(syntax, functions) if syntax.key else _bounded(_named_call(syntax, functions, tokens))
    call = joined(literal(syntax.before, tokens), "body", literal(syntax.after, tokens))
    more = "" if is_single or syntax.is_single else f"({joined(literal(syntax.between, tokens), 'call')})*"
    start = joined(literal(syntax.open, tokens), "call", more, literal(syntax.close, tokens))
    return f"start: {start}\ncall: {call}\n{one}"


def _object_call(syntax: CallSyntax, functions: Functions) -> str:
    """Returns the rule of an object. Schemas are stored under their functions' names, with redirected references."""
    calls = [_call_schema(name, syntax.key) for name in functions]
    definitions = {name: _redirected(schema or {"type": "object"}, name) for name, schema in functions.items()}
    return f"body: %json {_json({'anyOf': calls, '$defs': definitions})}\n"


def _bounded(rules: Iterator[str]) -> str:
    """Returns the text of rules. Raises GrammarError before it is too long: each parameter may repeat all definitions."""
    lines, length = list[str](), 0
    for rule in rules:
        length += len(rule)
        if length > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"more than {MAX_GRAMMAR_CHARS} characters; simplify it")
        lines.append(rule)
    return "\n".join(lines) + "\n"


def _named_call(syntax: CallSyntax, functions: Functions, tokens: Tokens) -> Iterator[str]:
    """Yields the rules of a name with its arguments."""
    end = literal(syntax.name_end, tokens)
    yield f"body: {' | '.join(f'call_{index}' for index in range(len(functions)))}"
    for index, (name, schema) in enumerate(functions.items()):
        yield f"call_{index}: {joined(quoted(name), end, f'args_{index}')}"
        if syntax.parameter:
            yield from _parameter_rules(syntax, schema, tokens, index)
        else:
            yield f"args_{index}: %json {_json(schema or {'type': 'object'})}"


def _parameter_rules(syntax: CallSyntax, schema: Mapping[str, Any], tokens: Tokens, index: int) -> Iterator[str]:
    """Yields the rules of the tags of a function's parameters, in the order of its schema."""
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    must = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    parameters = Parameters(schema)
    if not names and schema.get("additionalProperties"):
        value = f"value_{index}"
        tag = joined(literal(syntax.parameter, tokens), _ANY_NAME, literal(syntax.key_end, tokens), value)
        yield f"args_{index}: ({tag})*"
        yield from _value_rules(value, syntax, parameters, "", tokens)
        return
    tags = []
    for position, name in enumerate(names):
        rule = f"value_{index}_{position}"
        tag = joined(literal(syntax.parameter, tokens), quoted(name), literal(syntax.key_end, tokens), rule)
        tags.append(f"({tag}){'' if name in must else '?'}")
        yield from _value_rules(rule, syntax, parameters, name, tokens)
    yield f"args_{index}: " + (joined(*tags) or quoted(""))


def _value_rules(rule: str, syntax: CallSyntax, parameters: Parameters, name: str, tokens: Tokens) -> list[str]:
    """Returns the rules of a value with the text after it. A text ends where that is first."""
    types, declared = parameters.types(name), parameters.schema(name)
    end, definitions = literal(syntax.value_end, tokens), parameters.definitions
    if types and "string" not in types:
        return [f"{rule}: %json {_json({**declared, **definitions})} {end}"]
    if choices := parameters.texts(name):
        texts = " | ".join(map(quoted, choices))
        if not (others := sorted(types - {"string"})):
            return [f"{rule}: ({texts}) {end}"]
        other = _json({"allOf": [declared, {"type": others}], **definitions})
        return [f"{rule}: ({texts} | {rule}_other) {end}", f"{rule}_other: %json {other}"]
    if any(mark in tokens for mark in (PARAMETER_END, VALUE_END)):
        return [f"{rule}: /(?s:.*)/ {end}"]
    return [f"{rule}[suffix={quoted(syntax.value_end)}]: /(?s:.*)/"]


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": {"whitespace_pattern": BLANKS_PATTERN}, **schema}, ensure_ascii=False)


def literal(text: str, tokens: Tokens) -> str:
    """Returns a text in Lark. Its added tokens are tokens."""
    marks = [mark for mark in tokens if mark in text]
    pieces = re.split("|".join(map(re.escape, sorted([*marks, "\0"], key=len, reverse=True))).join("()"), text)
    return joined(*("/[0-9]{1,3}/" if p == "\0" else f"<[{tokens[p]}]>" if p in tokens else quoted(p) for p in pieces if p))


def quoted(text: str) -> str:
    """Returns a string in Lark."""
    return json.dumps(text, ensure_ascii=False)


def joined(*pieces: str) -> str:
    """Returns a sequence in Lark."""
    return " ".join(filter(None, pieces))


def _call_schema(name: str, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _redirected(schema: Any, name: str) -> Any:
    """Returns the schema with references redirected to `#/$defs/name`."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_redirected(part, name) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _redirected(part, name) for key, part in schema.items()}
    if isinstance(pointer := schema.get("$ref"), str) and pointer.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{pointer[1:]}"
    return moved
