"""Pydantic schemas of OpenAI's Responses API.

Items and tools have one flat schema each, so that the location of an error is the field as the client wrote it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from phalanx_frontend.fields import INT32_MAX, INT64_MAX, Priority, Share, ShortText, Text, TopCount, UserId
from phalanx_frontend.openai.tools import MAX_TOOLS, FunctionName

MAX_METADATA = 16
"""OpenAI's bound of pairs."""
MAX_ITEMS = 10_000
"""Of one conversation: each costs processor time of the server, however short it is."""


class _Known(BaseModel):
    """Other fields, such as `annotations`, are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class _Open(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ContentPart(_Known):
    """A part of an item's content: `input_text`, `input_image`, `output_text`, `reasoning_text`, `summary_text` or `refusal`."""

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | None = None
    """A data: or https: URL."""


def parse_parts(value: object) -> object:
    """Returns text as a list with one part, and other values unchanged."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


ContentParts = Annotated[list[ContentPart], BeforeValidator(parse_parts, json_schema_input_type=str | list[ContentPart])]


class Item(_Known):
    """One item of a conversation: `message` (the default with a role), `function_call`, `function_call_output`, `reasoning`,
    or `item_reference` (the default without one)."""

    type: Text | None = None
    id: ShortText | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: ContentParts | None = None
    summary: list[ContentPart] | None = None
    call_id: ShortText | None = None
    name: FunctionName | None = None
    arguments: Text | None = None
    output: ContentParts | None = None

    @property
    def kind(self) -> str:
        """The type."""
        return self.type or ("item_reference" if self.role is None else "message")


def parse_items(value: object) -> object:
    """Returns text as a list with one message of the user, and other values unchanged."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[list[Item], Field(max_length=MAX_ITEMS), BeforeValidator(parse_items, json_schema_input_type=str | list[Item])]


class FunctionTool(_Open):
    """A tool. Only functions are supported; the model's calls are answered by the client."""

    type: Text
    name: FunctionName | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(_Known):
    """A tool by its name."""

    type: Text
    name: FunctionName | None = None


class ToolRule(_Known):
    """A `tool_choice` that names tools: one `function`, or `allowed_tools` with a mode."""

    type: Text
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = Field(default=None, min_length=1, max_length=MAX_TOOLS)


def parse_rule(value: object) -> object:
    """Returns a keyword as a rule, and other values unchanged."""
    return {"type": value} if isinstance(value, str) else value


ToolRules = Annotated[ToolRule, BeforeValidator(parse_rule, json_schema_input_type=str | ToolRule)]


class TextFormat(_Known):
    """Form of the output; `json_schema` needs a name and a schema. Every schema is enforced, whatever `strict` is."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(_Known):
    """Form and length of the text."""

    format: TextFormat | None = None
    verbosity: Text | None = None


class ReasoningOptions(_Known):
    """Reasoning. `effort` reaches the chat template; `summary` has no effect: the reasoning itself is returned."""

    effort: ShortText | None = None
    summary: Text | None = None
    generate_summary: Text | None = None


class CountInputRequest(_Open):
    """POST /v1/responses/input_tokens: the fields that decide the prompt."""

    model: Text | None = None
    input: Items = []
    instructions: Text | None = None
    previous_response_id: ShortText | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolRules | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)


class ResponsesRequest(CountInputRequest):
    """POST /v1/responses."""

    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    cache: Literal["no-store"] | None = None
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: Share | None = None
    seed: int | None = Field(default=None, ge=-INT64_MAX - 1, le=INT64_MAX)
    max_tool_calls: int | None = Field(default=None, ge=1, le=INT32_MAX)
    include: list[Text] | None = None
    top_logprobs: TopCount | None = None
    metadata: (
        Annotated[
            dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=MAX_METADATA)
        ]
        | None
    ) = None
    user: UserId | None = None
    safety_identifier: UserId | None = None
    prompt_cache_key: UserId | None = None
    priority: Priority | None = None
