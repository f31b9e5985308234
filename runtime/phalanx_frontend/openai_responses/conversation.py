"""Converts a request of the Responses API, with the items before it, to a chat request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from phalanx_frontend.errors import ApiError, api_error_of_validation, invalid
from phalanx_frontend.images.parts import ImagePart, MixedContent, TextPart, content_of
from phalanx_frontend.openai.prompt import merged_turns
from phalanx_frontend.openai.sampling import refuse_fields_of_chats
from phalanx_frontend.openai.schemas import ChatRequest, JsonSchemaFormat, Message, ResponseFormat
from phalanx_frontend.openai.tools import CalledFunction, Function, NamedChoice, NamedFunction, PastCall, Tool
from phalanx_frontend.openai_responses.schemas import (
    ContentPart,
    CountInputRequest,
    FunctionTool,
    Item,
    ResponsesRequest,
    ToolRule,
)

T = TypeVar("T")
UNSUPPORTED = ("conversation", "context_management", "moderation", "prompt")
"""Fields for what OpenAI's servers keep or do: without them the answer would differ silently."""
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Supported values of `include`. Reasoning is returned as plain text, so that clients need no encrypted copy of it."""


class ResponsesChat(ChatRequest):
    """A chat whose `max_tokens` may exceed the context: the answer then ends where the context does."""

    clamps_max_tokens = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """Items in order; the first `num_earlier` are those of earlier responses."""

    items: Sequence[Item]
    num_earlier: int

    @property
    def own(self) -> Sequence[Item]:
        """Items of the request."""
        return self.items[self.num_earlier :]

    def field(self, position: int) -> str:
        """Returns the field of the request that has an item."""
        return f"input[{position - self.num_earlier}]" if position >= self.num_earlier else "previous_response_id"


def chat_request(body: CountInputRequest, conversation: Conversation) -> ChatRequest:
    """Returns the chat request. Raises ApiError 400 for items and fields that no chat has."""
    check_fields(body)
    tools, choice = _tools(body)
    try:
        return ResponsesChat(
            model=body.model,
            messages=_messages(body.instructions, conversation),
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            response_format=_response_format(body),
            reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
            max_tokens=body.max_output_tokens,
            return_token_ids=True,  # counts tokens of reasoning
            **(_sampling(body) if isinstance(body, ResponsesRequest) else {}),
        )
    except ValidationError as error:
        raise named_by_client(api_error_of_validation(error.errors(), ())) from error


def check_fields(body: CountInputRequest) -> None:
    """Raises ApiError 400 for fields without an implementation."""
    extra = body.model_extra or {}
    for name in UNSUPPORTED:
        if extra.get(name):
            raise _unsupported(name, f"{name} is not supported; leave it out")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _unsupported("text.verbosity", "text.verbosity is not supported; leave it out")
    if not body.input and body.previous_response_id is None:
        raise invalid("input", "input: is required")
    refuse_fields_of_chats(extra)
    if not isinstance(body, ResponsesRequest):
        return
    if body.background and body.store is False:
        raise invalid("background", "background: the response must be stored; leave store out")
    for position, name in enumerate(body.include or ()):
        if name not in INCLUDED:
            raise _unsupported(f"include[{position}]", f"include of {name} is not supported; leave it out")


def _unsupported(param: str, message: str) -> ApiError:
    return invalid(param, message, "unsupported_parameter")


def has_logprobs(body: ResponsesRequest) -> bool:
    """Returns whether the response has logprobs."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def _sampling(body: ResponsesRequest) -> Mapping[str, Any]:
    return {
        "stream": body.stream or body.background,  # events of an answer in the background are kept
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "user": body.user or body.safety_identifier,
        "priority": body.priority,
        "cache": "no-store" if body.store is False else body.cache,
        "logprobs": has_logprobs(body),
        "top_logprobs": body.top_logprobs if has_logprobs(body) else None,
    }


def _messages(instructions: str | None, conversation: Conversation) -> list[Message]:
    system, messages, calls = [instructions] if instructions else [], list[Message](), set[str]()
    for position, item in enumerate(conversation.items):
        message = _message(item, conversation.field(position))
        if item.kind == "reasoning" and message.reasoning_content is None:
            continue  # encrypted
        calls.update(call.id for call in message.tool_calls or ())
        if message.tool_call_id is not None and message.tool_call_id not in calls:
            field = f"{conversation.field(position)}.call_id"
            raise invalid(field, f"no function_call before this item has the call_id {message.tool_call_id}")
        if message.role != "system":
            messages.append(message)
        elif messages:
            messages.append(Message(role="user", content=message.content))  # chat templates take a system message first
        elif isinstance(message.content, str) and message.content:
            system.append(message.content)
    return [*([Message(role="system", content="\n".join(system))] if system else []), *merged_turns(messages)]


def _message(item: Item, field: str) -> Message:
    match item.kind:
        case "message":
            role = _required(item.role, f"{field}.role")
            content = _content(_required(item.content, f"{field}.content"), f"{field}.content", role)
            return Message(role="system" if role == "developer" else role, content=content)
        case "reasoning":
            thoughts = _text(item.content or item.summary or [], f"{field}.content", ("reasoning_text", "summary_text"))
            return Message(role="assistant", reasoning_content=thoughts or None)
        case "function_call":
            name, id = _required(item.name, f"{field}.name"), _required(item.call_id, f"{field}.call_id")
            arguments = _required(item.arguments, f"{field}.arguments")
            call = PastCall(id=id, function=CalledFunction(name=name, arguments=arguments))
            return Message(role="assistant", tool_calls=[call])
        case "function_call_output":
            output = _text(_required(item.output, f"{field}.output"), f"{field}.output", ("input_text", "output_text"))
            return Message(role="tool", content=output, tool_call_id=_required(item.call_id, f"{field}.call_id"))
        case kind:
            raise _unsupported(f"{field}.type", f"items of type {kind} are not supported")


def _required(value: T | None, field: str) -> T:
    if value is None:
        raise invalid(field, f"{field}: is required")
    return value


def _content(parts: Sequence[ContentPart], field: str, role: str) -> str | MixedContent:
    """Returns the content of a message. Only the user's may have images."""
    if role != "user" or all(part.type != "input_image" for part in parts):
        return _text(parts, field, ("input_text", "output_text"))
    shown = list[TextPart | ImagePart]()
    for position, part in enumerate(parts):
        if part.type == "input_image":
            name = f"{field}[{position}].image_url"
            shown.append(ImagePart(_required(part.image_url, name), name))
        else:
            shown.append(TextPart(_part_text(part, f"{field}[{position}]", ("input_text", "output_text"))))
    return content_of(shown)


def _text(parts: Sequence[ContentPart], field: str, kinds: Sequence[str]) -> str:
    return "\n".join(_part_text(part, f"{field}[{position}]", kinds) for position, part in enumerate(parts))


def _part_text(part: ContentPart, field: str, kinds: Sequence[str]) -> str:
    if part.type not in (*kinds, "text", "refusal"):
        raise _unsupported(f"{field}.type", f"parts of type {part.type} are not supported here: send text")
    return _required(part.refusal if part.type == "refusal" else part.text, f"{field}.text")


def _tools(body: CountInputRequest) -> tuple[list[Tool], str | NamedChoice | None]:
    rule = body.tool_choice
    tools = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(body.tools or ())]
    match rule:
        case None:
            return tools, None
        case ToolRule(type="none" | "auto" | "required" as keyword):
            return tools, keyword
        case ToolRule(type="function"):
            name = _required(rule.name, "tool_choice.name")
            return tools, NamedChoice(type="function", function=NamedFunction(name=name))
        case ToolRule(type="allowed_tools"):
            names = _allowed_names(rule, {tool.function.name for tool in tools})
            return [tool for tool in tools if tool.function.name in names], rule.mode or "auto"
    raise _unsupported("tool_choice.type", f"a tool_choice of type {rule.type} is not supported")


def _allowed_names(rule: ToolRule, known: set[str]) -> set[str]:
    names = set()
    for position, tool in enumerate(_required(rule.tools, "tool_choice.tools")):
        field = f"tool_choice.tools[{position}]"
        if tool.type != "function":
            raise _unsupported(f"{field}.type", f"tools of type {tool.type} are not supported")
        name = _required(tool.name, f"{field}.name")
        if name not in known:
            raise invalid(f"{field}.name", f"there is no function {name} in tools")
        names.add(name)
    return names


def _tool(tool: FunctionTool, field: str) -> Tool:
    if tool.type != "function":
        raise _unsupported(
            f"{field}.type", f"tools of type {tool.type} are not supported; only functions that the client runs are"
        )
    name = _required(tool.name, f"{field}.name")
    function = Function(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _response_format(body: CountInputRequest) -> ResponseFormat | None:
    format = body.text.format if body.text is not None else None
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return ResponseFormat(type="json_object")
    name, schema = _required(format.name, "text.format.name"), _required(format.schema_, "text.format.schema")
    described = JsonSchemaFormat(name=name, description=format.description, schema=schema, strict=format.strict)
    return ResponseFormat(type="json_schema", json_schema=described)


FIELDS = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
)
"""Fields of a chat, and the field of the request that sets each."""


def named_by_client(error: ApiError) -> ApiError:
    """Names the field of a chat error as the client wrote it."""
    param = error.param or ""
    for chat, ours in FIELDS:
        if param.partition("[")[0] == chat or param.startswith(f"{chat}."):
            error.param = ours if chat == "messages" else ours + param.removeprefix(chat)
            return error
    if param.startswith("tool"):
        error.param = param.replace(".function.", ".", 1)
    return error
