"""Converts a request of the Messages API to a chat request."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from phalanx_frontend.anthropic.schemas import (
    ClientTool,
    CountTokensRequest,
    ImageBlock,
    ImageOrigin,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolSelection,
    ToolUseBlock,
    Turn,
)
from phalanx_frontend.errors import ApiError, api_error_of_validation, invalid
from phalanx_frontend.images.parts import ImagePart, TextPart, content_of
from phalanx_frontend.openai.prompt import merged_turns, thinking_switch
from phalanx_frontend.openai.sampling import refuse_fields_of_chats
from phalanx_frontend.openai.schemas import ChatRequest, JsonSchemaFormat, Message, ResponseFormat
from phalanx_frontend.openai.tools import CalledFunction, Function, NamedChoice, NamedFunction, PastCall, Tool

UNSUPPORTED = ("mcp_servers", "container", "thread")
"""Fields for tools and conversations at Anthropic's servers: without them the answer would differ silently."""
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Start of a line that begins the system prompt and changes with each request of some clients: no prefix would be shared."""


class MessagesChat(ChatRequest):
    """A chat whose `max_tokens` may exceed the context: the answer then ends where the context does."""

    clamps_max_tokens = True


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Returns the chat request. Raises ApiError 400 for conversations that no chat template has, and beyond bounds of a chat."""
    try:
        return _chat_request(body)
    except ValidationError as error:
        raise api_error_of_validation(error.errors(), ()) from error


def _chat_request(body: CountTokensRequest) -> ChatRequest:
    for name in UNSUPPORTED:
        if (body.model_extra or {}).get(name):
            raise invalid(name, f"{name} is not supported; leave it out", "unsupported_parameter")
    refuse_fields_of_chats({**(body.model_extra or {}), "service_tier": None})  # has other values here, all without an effect
    sampling: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        sampling = {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "user": body.metadata.user_id if body.metadata is not None else None,
            "priority": body.priority,
            "cache": body.cache,
        }
    is_single = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    return MessagesChat(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=False if is_single else None,
        response_format=_response_format(body),
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        chat_template_kwargs=thinking_switch(_has_thinking(body)),
        continue_final_message=_continues(body) or None,
        **sampling,
    )


def _messages(body: CountTokensRequest) -> list[Message]:
    system = "\n".join(filter(None, (_without_billing(block.text) for block in body.system)))
    messages = [Message(role="system", content=system)] if system else []
    for position, turn in enumerate(body.messages):
        messages += [_assistant(turn, position)] if turn.role == "assistant" else _user(turn, position)
    return merged_turns(messages)


def _continues(body: CountTokensRequest) -> bool:
    """Returns whether the last message begins the answer, as only text without thinking does."""
    last, position = body.messages[-1], len(body.messages) - 1
    if last.role != "assistant":
        return False
    texts = [block.text for block in last.content if isinstance(block, TextBlock)]
    is_text = any(texts) and len(texts) == len(last.content)
    if not isinstance(body, MessagesRequest):
        return is_text
    if not is_text:
        raise invalid(f"messages[{position}].content", "a last message of the assistant must be text, which the answer continues")
    if _has_thinking(body):
        raise invalid(f"messages[{position}].role", "with thinking the last message must be the user's")
    return True


def _has_thinking(body: CountTokensRequest) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_PREFIX) else text


def _user(turn: Turn, position: int) -> list[Message]:
    """Returns one message for each result of a tool, then one for text and images: results follow their calls in chat templates.

    A template has no mark for errors.
    """
    results, parts = list[Message](), list[TextPart | ImagePart]()
    for index, block in enumerate(turn.content):
        match block:
            case TextBlock(text=text):
                parts.append(TextPart(text))
            case ImageBlock(source=source) if turn.role == "user":
                parts.append(_image(source, f"messages[{position}].content[{index}].source"))
            case ToolResultBlock() if turn.role == "user":
                result = f"Error: {_joined(block.content)}" if block.is_error else _joined(block.content)
                results.append(Message(role="tool", content=result, tool_call_id=block.tool_use_id))
            case _:
                raise _misplaced(position, index, block.type, turn.role)
    return [*results, Message(role="user", content=content_of(parts))] if parts or not results else results


def _image(source: ImageOrigin, field: str) -> ImagePart:
    name, value = ("url", source.url) if source.type == "url" else ("data", source.data)
    if value is None:
        raise invalid(f"{field}.{name}", f"{field}.{name}: is required")
    url = value if source.type == "url" else f"data:{source.media_type or ''};base64,{value}"
    return ImagePart(url, f"{field}.{name}")


def _assistant(turn: Turn, position: int) -> Message:
    texts, thoughts, calls = list[TextBlock](), list[str](), list[PastCall]()
    for index, block in enumerate(turn.content):
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass  # opaque
            case ToolUseBlock(id=id, name=name, input=arguments):
                function = CalledFunction(name=name, arguments=json.dumps(arguments))
                calls.append(PastCall(id=id, function=function))
            case _:
                raise _misplaced(position, index, block.type, "assistant")
    reasoning = "\n".join(thoughts) or None
    return Message(role="assistant", content=_joined(texts), reasoning_content=reasoning, tool_calls=calls or None)


def _misplaced(position: int, index: int, kind: str, role: str) -> ApiError:
    return invalid(f"messages[{position}].content[{index}].type", f"a message of the {role} has no block of type {kind}")


def _joined(texts: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in texts)


def _tool(tool: ClientTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


def _tool_choice(selection: ToolSelection | None) -> str | NamedChoice | None:
    if selection is None:
        return None
    if selection.type != "tool":
        return "required" if selection.type == "any" else selection.type
    if selection.name is None:
        raise invalid("tool_choice.name", "tool_choice of type tool needs the name of a tool")
    return NamedChoice(type="function", function=NamedFunction(name=selection.name))


def _response_format(body: CountTokensRequest) -> ResponseFormat | None:
    format = body.output_config.format if body.output_config is not None and body.output_config.format else body.output_format
    if format is None:
        return None
    schema = JsonSchemaFormat(name="answer", schema=format.schema_)
    return ResponseFormat(type="json_schema", json_schema=schema)
