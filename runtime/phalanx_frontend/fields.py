"""Types of request fields: parsers, and schemas for /openapi.json."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, PlainValidator, WithJsonSchema

from phalanx_frontend.images.parts import IMAGE_TYPES, ImagePart, MessageContent, MixedContent, TextPart, content_of, image_url

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
MAX_BIAS = 100.0
"""OpenAI's bound of `logit_bias`."""
MAX_ID_DIGITS = 10
"""Digits of the largest token id."""

Prompt = str | list[int]
"""Text or token ids."""


def parse_prompts(value: object) -> list[Prompt]:
    """Parses prompts, all text or all token ids. Raises ValueError."""
    if isinstance(value, str):
        return [valid_text(value)]
    if isinstance(value, list):
        if all(type(token) is int for token in value):
            return [value]
        if all(isinstance(prompt, str) for prompt in value):
            return [valid_text(prompt) for prompt in value]
        if all(isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in value):
            return value
    raise ValueError("must be a string, an array of strings, an array of token ids, or an array of arrays of token ids")


def parse_stop(value: object) -> list[str]:
    """Parses non-empty stop strings. Raises ValueError."""
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or an array of strings")
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    return [valid_text(stop) for stop in stops]


def parse_logit_bias(value: object) -> dict[int, float]:
    """Parses biases by token id, a string in JSON. Raises ValueError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object that maps token ids to numbers")
    parsed: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS):
            raise ValueError(f"{str(key)[:40]!r} is not a token id; use a decimal number")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of token {key} must be a number between -{MAX_BIAS:g} and {MAX_BIAS:g}")
        parsed[int(key)] = float(bias)
    return parsed


def parse_content(value: object) -> MessageContent:
    """Returns the content of a message: text, with its parts joined by newlines, or parts with images. Raises ValueError."""
    if value is None or isinstance(value, MixedContent):
        return value
    if isinstance(value, str):
        return valid_text(value)
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of parts")
    return content_of([_parse_part(part) for part in value])


def _parse_part(part: object) -> TextPart | ImagePart:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in IMAGE_TYPES:
        url = image_url(part)
        if url is None:
            raise ValueError(f'a part of type {kind} must have "image_url": {{"url": ...}}')
        return ImagePart(valid_text(url))
    text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise ValueError('every part must be {"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": ...}}')
    return TextPart(valid_text(text))


def parse_texts(value: object) -> list[str]:
    """Parses a text or a list of texts. Raises ValueError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a non-empty array of strings")
    return [valid_text(text) for text in texts]


def parse_documents(value: object) -> list[str]:
    """Parses texts, each a string or an object with `text`. Raises ValueError."""
    if isinstance(value, list):
        value = [item.get("text") if isinstance(item, dict) else item for item in value]
    return parse_texts(value)


def valid_text(value: str) -> str:
    """Returns `value`. Raises ValueError for lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("is not valid Unicode: it contains half of a surrogate pair; remove it") from error
    return value


_TEXTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPTS = {"anyOf": [*_TEXTS["anyOf"], _IDS, {"type": "array", "items": _IDS}]}


def _part(kind: str) -> dict[str, Any]:
    return {"type": "object", "required": ["type", kind], "properties": {"type": {"const": kind}, kind: {"type": "string"}}}


_IMAGE = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {"type": "object", "required": ["url"], "properties": {"url": {"type": "string"}}},
    },
}
_BIAS = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
_PARTS = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"anyOf": [_part("text"), _part("refusal"), _IMAGE]},
        },
        {"type": "null"},
    ]
}

Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts), WithJsonSchema(_PROMPTS)]
Stops = Annotated[list[str], PlainValidator(parse_stop), WithJsonSchema(_TEXTS)]
Texts = Annotated[list[str], PlainValidator(parse_texts), WithJsonSchema(_TEXTS)]
_DOCUMENT = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}]}
_DOCUMENTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _DOCUMENT}]}
Documents = Annotated[list[str], PlainValidator(parse_documents), WithJsonSchema(_DOCUMENTS)]
Content = Annotated[MessageContent, PlainValidator(parse_content), WithJsonSchema(_PARTS)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
LogitBias = Annotated[dict[int, float], PlainValidator(parse_logit_bias), WithJsonSchema(_BIAS)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = list[TokenId]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, le=INT32_MAX, allow_inf_nan=False)]
Priority = Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)]
Text = Annotated[str, AfterValidator(valid_text)]
ShortText = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(valid_text)]
UserId = Annotated[str, Field(max_length=512), AfterValidator(valid_text)]
TopCount = Annotated[int, Field(ge=0, le=20)]


# Responses that the routes' types do not describe.


class ErrorDetail(BaseModel):
    """An error: `message` for people, the other fields for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error, in OpenAI's form."""

    error: ErrorDetail


_RETRY_AFTER: dict[str, Any] = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait, with 429 and 503 if known."}
}
Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {
        "model": ErrorBody,
        "description": "The request is invalid, or refused for now (429).",
        "headers": _RETRY_AFTER,
    },
    "5XX": {"model": ErrorBody, "description": "The server failed, or cannot serve for now (503).", "headers": _RETRY_AFTER},
}
"""Errors of every route."""


class AnthropicErrorDetail(ErrorDetail):
    """An error of the Messages API. `param` and `code` are ours."""


class AnthropicErrorBody(BaseModel):
    """The body of every error of the Messages API."""

    type: Literal["error"]
    error: AnthropicErrorDetail


ANTHROPIC_RESPONSES: Responses = {status: {**response, "model": AnthropicErrorBody} for status, response in ERRORS.items()}
"""Errors of the routes of the Messages API."""
STREAMED: Responses = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "Complete, or streamed."}
}
"""Responses of routes that accept `stream`."""


class EmbeddingItem(BaseModel):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The body of /v1/embeddings, in the order of the inputs."""

    object: str
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class Score(BaseModel):
    """The similarity of a pair of texts: a cosine, or the score of a cross-encoder."""

    index: int
    object: str
    score: float


class ScoreList(BaseModel):
    """The body of /v1/score, in the order of `text_2`."""

    id: str
    object: str
    data: list[Score]
    model: str
    usage: EmbeddingUsage


class RankedText(BaseModel):
    """The text of a document."""

    text: str


class RankedDocument(BaseModel):
    """A document's place in the request, its text unless `return_documents` is false, and its similarity to the query."""

    index: int
    document: RankedText | None = None
    relevance_score: float


class Ranking(BaseModel):
    """The body of /v1/rerank, the most similar document first."""

    id: str
    results: list[RankedDocument]
    model: str
    usage: EmbeddingUsage


class ClassifiedText(BaseModel):
    """The likeliest class of one input, and the numbers of all classes: probabilities, or logits without activation."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(BaseModel):
    """The body of /v1/classify, in the order of the inputs."""

    id: str
    object: str
    created: int
    data: list[ClassifiedText]
    model: str
    usage: EmbeddingUsage


CLASSIFIED: Responses = {200: {"model": ClassList, "description": "A class for each input."}}
"""Responses of /v1/classify."""
SCORED: Responses = {200: {"model": ScoreList, "description": "A score for each pair."}}
"""Responses of /v1/score."""
RANKED: Responses = {200: {"model": Ranking, "description": "Documents by similarity."}}
"""Responses of /v1/rerank."""
EMBEDDED: Responses = {200: {"model": EmbeddingList, "description": "A vector for each input."}}
"""Responses of /v1/embeddings."""
EXPOSITION: Responses = {200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}, "description": "Metrics."}}
"""Responses of /metrics."""
