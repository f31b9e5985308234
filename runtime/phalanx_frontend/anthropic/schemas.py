"""Pydantic schemas of Anthropic's Messages API. Other fields, such as `cache_control`, are accepted and have no effect."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from phalanx_frontend.fields import INT32_MAX, Priority, Share, ShortText, Stops, Text, UserId
from phalanx_frontend.openai.tools import MAX_TOOLS, FunctionName

MAX_MESSAGES = 10_000
"""Of one request: each costs processor time of the server, however short it is."""


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class TextBlock(_Lenient):
    """Text of a message, a system prompt or the result of a tool."""

    type: Literal["text"]
    text: Text


class ImageOrigin(_Lenient):
    """Where an image is: its `data` in base64 with `media_type`, or a `url`. Files at Anthropic's servers are refused."""

    type: Literal["base64", "url"]
    media_type: ShortText | None = None
    data: Text | None = None
    url: Text | None = None


class ImageBlock(_Lenient):
    """An image of the user."""

    type: Literal["image"]
    source: ImageOrigin


class ThinkingBlock(_Lenient):
    """Reasoning of an earlier answer. Signatures are not checked: reasoning is plain text here."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(_Lenient):
    """Reasoning that only Anthropic can read. It is left out of the prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Lenient):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: ShortText
    name: FunctionName
    input: dict[str, Any]


def parse_blocks(value: object) -> object:
    """Returns text as a list with one block, and other values unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[list[TextBlock], BeforeValidator(parse_blocks, json_schema_input_type=str | list[TextBlock])]


def parse_result(value: object) -> object:
    """Returns blocks of text: an image, which a history would repeat in each request, becomes a note that it is missing."""
    blocks = parse_blocks(value)
    if not isinstance(blocks, list):
        return blocks
    kinds = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    return [
        {"type": "text", "text": f"[{kind}: results of tools are text only]"} if kind in UNREADABLE else block
        for block, kind in zip(blocks, kinds, strict=True)
    ]


UNREADABLE = ("image", "document", "search_result", "tool_reference")
"""Types of blocks in results of tools that a chat template cannot show."""


class ToolResultBlock(_Lenient):
    """The result of a tool call, in the user's next message."""

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: Annotated[list[TextBlock], BeforeValidator(parse_result, json_schema_input_type=str | list[TextBlock])] = []
    is_error: bool | None = None


_AnyBlock = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Block = Annotated[_AnyBlock, Field(discriminator="type")]
Blocks = Annotated[list[Block], BeforeValidator(parse_blocks, json_schema_input_type=str | list[Block])]


class Turn(_Lenient):
    """One message of the conversation. Text of the system after its start becomes text of the user, for most chat templates."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ClientTool(_Lenient):
    """A tool that the client runs; `input_schema` is the JSON schema of its arguments. Anthropic's own tools are refused."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]


class ToolSelection(_Lenient):
    """Which tools the model may or must call: `any` requires a call, `tool` one of `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Lenient):
    """Whether the model thinks before its answer, if its chat template has a switch. `budget_tokens` is not enforced."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)


class OutputFormat(_Lenient):
    """The JSON schema of the answer. Every schema is enforced."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Lenient):
    """Form of the answer, and the effort of reasoning models (`reasoning_effort` of their chat templates)."""

    format: OutputFormat | None = None
    effort: ShortText | None = None


class Metadata(_Lenient):
    """The user of the client's application."""

    user_id: UserId | None = None


class CountTokensRequest(_Lenient):
    """POST /v1/messages/count_tokens."""

    model: Text | None = None
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextBlocks = []
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Stops = []
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_p: Share | None = None
    top_k: int | None = Field(default=None, ge=0, le=INT32_MAX)
    metadata: Metadata | None = None
    priority: Priority | None = None
    cache: Literal["no-store"] | None = None
