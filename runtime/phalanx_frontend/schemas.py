"""Requests of the HTTP API, as pydantic checks them. Types are strict: "10" is no number, 1 is no truth value.

None means the default everywhere, as OpenAI's clients send it. Unknown fields are kept in `model_extra` for `unsupported`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

INT64_MAX = 2**63 - 1


def parse_prompt(value: object) -> str | list[int]:
    """One prompt: text or token ids. A list with one prompt in it is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    if isinstance(value, list) and all(isinstance(prompt, str | list) for prompt in value):
        raise ValueError("several prompts in one request are not supported yet; send one request for each")
    raise ValueError("must be a string or an array of token ids")


def parse_stop(value: object) -> list[str]:
    """Stop strings, none of them empty."""
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or an array of strings")
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    return [whole_text(stop) for stop in stops]


def parse_content(value: object) -> str | None:
    """Text of a message: a string, or its text parts joined by line ends."""
    if value is None:
        return None
    if isinstance(value, str):
        return whole_text(value)
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('every part must be {"type": "text", "text": ...}: this model reads text only')
        texts.append(whole_text(part["text"]))
    return "\n".join(texts)


def whole_text(value: str) -> str:
    """The same string, once it is known to be encodable: JSON can spell half a character, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("is not valid Unicode: it has half of a surrogate pair") from error
    return value


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_PROMPT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}
_PARTS = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
        {"type": "null"},
    ]
}

Prompt = Annotated[str | list[int], PlainValidator(parse_prompt), WithJsonSchema(_PROMPT)]
Stops = Annotated[list[str], PlainValidator(parse_stop), WithJsonSchema(_TEXTS)]
Content = Annotated[str | None, PlainValidator(parse_content), WithJsonSchema(_PARTS)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
INT32_MAX = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationRequest(_Strict):
    """What completions and chat have in common: sampling, ends, shape of the answer."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: Share | None = None
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-INT64_MAX - 1, le=INT64_MAX)
    stop: Stops = []
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=128)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    add_special_tokens: bool | None = None


class Message(_Strict):
    """One message of a conversation. Fields beside these reach no template."""

    role: str = Field(min_length=1)
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. `chat_template_kwargs` are more variables for the template, as in vLLM."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(_Strict):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: Annotated[str, Field()] | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
