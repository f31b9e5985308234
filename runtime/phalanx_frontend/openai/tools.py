"""Tools of a chat: schemas, template variables, and the grammar of a forced call."""

import json
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from phalanx_api import wire
from phalanx_frontend.errors import invalid
from phalanx_frontend.fields import Text
from phalanx_frontend.text.formats.forced import call_syntax, forced_grammar
from phalanx_frontend.text.formats.reader import Functions
from phalanx_frontend.text.grammar import GrammarError

MAX_TOOLS = 128
"""OpenAI's bound."""
NO_TOKENS: Mapping[str, int] = MappingProxyType({})


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


NAME_PATTERN = "^[a-zA-Z0-9_.-]{1,128}$"
"""OpenAI's pattern, plus the dot of MCP servers and the length of Anthropic's names."""
FunctionName = Annotated[str, Field(pattern=NAME_PATTERN)]


class Function(_StrictModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_StrictModel):
    """One tool. Only functions are supported."""

    type: Literal["function"]
    function: Function


class NamedFunction(_StrictModel):
    """A function by its name."""

    name: FunctionName


class NamedChoice(_StrictModel):
    """A `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


def parse_choice(value: object) -> str | NamedChoice:
    """Parses `tool_choice`: a keyword, or a function by name. Raises ValueError."""
    if value in ("none", "auto", "required"):
        return str(value)
    try:
        return NamedChoice.model_validate(value)
    except ValidationError as error:
        raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}') from error


_BY_NAME = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}}}
_FUNCTION = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _BY_NAME},
}
_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, _FUNCTION]}
ToolChoice = Annotated[str | NamedChoice, PlainValidator(parse_choice), WithJsonSchema(_CHOICE)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class CalledFunction(_StrictModel):
    """Function and arguments of an earlier call; `arguments` is JSON text."""

    name: FunctionName
    arguments: Text


class PastCall(_StrictModel):
    """A tool call in an assistant's message."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ShownArguments(dict[str, Any]):
    """Arguments in a template: an object, and its JSON text where the template writes or adds it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises ApiError 400 for a choice without tools, and unknown or duplicate functions."""
    names = [tool.function.name for tool in tools]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise invalid(f"tools[{position}].function.name", f"the function {name} is given twice")
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "tool_choice needs tools; set tools")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise invalid("tool_choice.function.name", f"there is no function {choice.function.name} in tools")


def shown_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> list[dict[str, Any]]:
    """Returns the tools for the template: all, or the chosen one."""
    if choice == "none":
        return []
    chosen_name = choice.function.name if isinstance(choice, NamedChoice) else None
    return [tool.model_dump(exclude_none=True) for tool in tools if chosen_name in (None, tool.function.name)]


def forced_calls(
    format: str, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool, tokens: Mapping[str, int] = NO_TOKENS
) -> wire.Grammar | None:
    """Returns the grammar of an answer with calls only, if a call is forced. Raises ApiError 400 for formats without one."""
    if choice in (None, "none", "auto"):
        return None
    grammar = call_grammar(format, tools, choice, parallel, tokens)
    if grammar is None:
        why = f"tool calls of this model's format, {format}, cannot be forced; let tool_choice be auto"
        raise invalid("tool_choice", why, "unsupported_parameter")
    return grammar


def call_grammar(
    format: str, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool, tokens: Mapping[str, int] = NO_TOKENS
) -> wire.Grammar | None:
    """Returns the grammar of calls; null for formats without one. Raises ApiError 400 for a too long one.

    One call if a function was named or `parallel` is false, else one or more. The name precedes the arguments. `tokens`:
    `TextTokenizer.grammar_tokens`.
    """
    syntax = call_syntax(format, tokens)
    if syntax is None:
        return None
    is_named = isinstance(choice, NamedChoice)
    callable_tools = [tool for tool in tools if not isinstance(choice, NamedChoice) or tool.function.name == choice.function.name]
    try:
        grammar = forced_grammar(syntax, tool_functions(callable_tools), is_named or not parallel, tokens)
    except GrammarError as error:
        raise invalid("tool_choice", f"the grammar of its calls has {error}") from error
    return wire.Grammar("lark", grammar)


def with_any_arguments(tools: Sequence[Tool], names: Container[str]) -> list[Tool]:
    """Returns the tools, those of `names` with any object as arguments."""
    free = {"parameters": {"type": "object", "additionalProperties": True}}
    return [
        tool.model_copy(update={"function": tool.function.model_copy(update=free)}) if tool.function.name in names else tool
        for tool in tools
    ]


def tool_functions(tools: Sequence[Tool]) -> Functions:
    """Returns the schemas of the parameters, by name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def shown_calls(calls: Sequence[PastCall]) -> list[dict[str, Any]]:
    """Returns earlier calls for the template."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": shown_arguments(call)}}
        for call in calls
    ]


def shown_arguments(call: PastCall) -> ShownArguments:
    """Returns the arguments of an earlier call, which templates iterate.

    A model may write text that is not a JSON object, and the conversation goes on: the template gets it as `invalid_json`.
    """
    text = call.function.arguments
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        read = None
    return ShownArguments(read if isinstance(read, dict) else {"invalid_json": text})
