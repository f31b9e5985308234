"""Tools of a chat: schemas, template variables, and the grammar of a forced call."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from phalanx_api import wire
from phalanx_frontend.errors import invalid
from phalanx_frontend.fields import Text
from phalanx_frontend.text.grammar import BLANKS_PATTERN

MAX_TOOLS = 128
"""OpenAI's bound."""


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


def forced_calls(format: str, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool) -> wire.Grammar | None:
    """Returns the grammar of an answer with calls only, if a call is forced.

    One call if a function was named or `parallel` is false, else one or more. The name precedes the arguments.
    """
    if choice in (None, "none", "auto"):
        return None
    callable_tools = [tool for tool in tools if not isinstance(choice, NamedChoice) or tool.function.name == choice.function.name]
    key = "parameters" if format == "llama" else "arguments"
    calls = [_call_schema(tool.function.name, key) for tool in callable_tools]
    # Schemas are stored under their functions' names, with redirected references.
    definitions = {
        tool.function.name: _redirected(tool.function.parameters or {"type": "object"}, tool.function.name)
        for tool in callable_tools
    }
    bounded = {"x-guidance": {"whitespace_pattern": BLANKS_PATTERN}}
    schema = json.dumps({**bounded, "anyOf": calls, "$defs": definitions}, ensure_ascii=False)
    call, between = ("body", '"; "') if format == "llama" else (r'"<tool_call>\n" body "\n</tool_call>"', r'"\n"')
    more = "" if isinstance(choice, NamedChoice) or not parallel else f" ({between} call)*"
    return wire.Grammar("lark", f"start: call{more}\ncall: {call}\nbody: %json {schema}\n")


def _call_schema(name: str, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _redirected(schema: Any, name: str) -> Any:
    """Returns the schema with references redirected to `#/$defs/name`."""
    if isinstance(schema, list):
        return [_redirected(part, name) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _redirected(part, name) for key, part in schema.items()}
    if isinstance(pointer := schema.get("$ref"), str) and pointer.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{pointer[1:]}"
    return moved


def shown_calls(calls: Sequence[PastCall], param: str) -> list[dict[str, Any]]:
    """Returns earlier calls with arguments as objects. Raises ApiError 400 for invalid JSON."""
    shown = []
    for position, call in enumerate(calls):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise invalid(f"{param}[{position}].function.arguments", f"arguments must be valid JSON: {error}") from error
        shown.append({"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}})
    return shown
