"""Pydantic schemas of requests, with strict types. Null is the default; unknown fields are in `model_extra`."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from phalanx_api.speculation import MAX_DEPTH, MAX_WIDTH, Method, TreeShape
from phalanx_frontend.fields import (
    INT32_MAX,
    INT64_MAX,
    Content,
    Documents,
    LogitBias,
    Milliseconds,
    Penalty,
    Priority,
    Prompts,
    Share,
    ShortText,
    Stops,
    Text,
    Texts,
    TokenIds,
    TopCount,
    UserId,
)
from phalanx_frontend.openai.tools import PastCall, ToolChoice, Tools

MAX_CHOICES = 128
"""OpenAI's bound of `n`."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Strict):
    """Options of a stream. `continuous_usage_stats` adds the token counts so far to each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(_Strict):
    """The `json_schema` of a response_format. Every schema is enforced, whatever `strict` is."""

    name: ShortText
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of the output. `schema` is llama.cpp's place of the schema, for both types of JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class StructuredOutputs(_Strict):
    """vLLM's `structured_outputs`; exactly one field may be set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: Text | None = None
    json_object: bool | None = None


class SpeculativeTree(BaseModel):
    """Tree of draft tokens: `widths` is the maximum number of branches per level, `shape` how branches are chosen."""

    model_config = ConfigDict(strict=True, extra="forbid")

    widths: list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = Field(max_length=MAX_DEPTH)
    shape: TreeShape = "best_first"


class Speculative(BaseModel):
    """Speculation settings: method and maximum draft tokens per step. They change latency, never tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    method: Method | None = None
    num_tokens: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    tree: SpeculativeTree | None = None


class CommonRequest(_Strict):
    """Fields of every generating request. `deadline_ms` counts from its arrival. `cache` keeps it out of the response cache."""

    model: Text | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: Share | None = None
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-INT64_MAX - 1, le=INT64_MAX)
    stop: Stops = []
    stop_token_ids: TokenIds | None = Field(default=None, max_length=128)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    stream: bool | None = None
    tenant: ShortText | None = None
    priority: Priority | None = None
    deadline_ms: Milliseconds | None = None
    cache: Literal["no-store"] | None = None
    speculative: Speculative | None = None


class GenerationRequest(CommonRequest):
    """Fields of completions and chat: sampling, output constraints, latency targets, response form.

    `regex`, `ebnf` and `json_schema` are SGLang's names of the constraints.
    """

    clamps_max_tokens: ClassVar[bool] = False
    """Whether `max_tokens` may exceed the context."""

    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2, allow_inf_nan=False)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = {}
    allowed_token_ids: TokenIds | None = Field(default=None, min_length=1)
    bad_words: list[ShortText] | None = Field(default=None, max_length=256)
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = Field(default=None, min_length=1, max_length=1024)
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    json_schema: dict[str, Any] | str | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: TopCount | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_gaps: bool | None = None
    stream_options: StreamOptions | None = None
    user: UserId | None = None
    cache_salt: ShortText | None = None
    ttft_target_ms: Milliseconds | None = None
    tpot_target_ms: Milliseconds | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `max_tokens` may be 0 with `echo`, to return only the prompt."""

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: TopCount | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class Message(_Strict):
    """One message of a conversation. Other fields do not reach the template."""

    role: Text = Field(min_length=1)
    content: Content = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """vLLM's name; `reasoning_content` has precedence unless it is empty."""
    tool_calls: list[PastCall] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _read_reasoning(self) -> Self:
        if self.reasoning and not self.reasoning_content:
            self.reasoning_content = self.reasoning
        return self


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. `chat_template_kwargs` are further variables of the template, `include_reasoning` false drops
    reasoning from the answer, as in vLLM."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class PooledRequest(_Strict):
    """Fields of every request that embeds.

    `truncate_prompt_tokens` keeps the first tokens of longer inputs, with `truncation_side` left the last; -1: as many as the
    model takes. `use_activation`, of which `activation` is an older name: probabilities, not logits, of classes and scores, and
    vectors of length 1; default: as the model says.
    """

    model: Text | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    truncation_side: Literal["left", "right"] | None = None
    user: UserId | None = None
    add_special_tokens: bool | None = None
    tenant: ShortText | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation"))


class EmbeddingRequest(PooledRequest):
    """POST /v1/embeddings. `dimensions` keeps the first numbers of each vector, normalised again if the model's vectors are.
    `normalize` is an older name of `use_activation`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=INT32_MAX)
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation", "normalize"))


class ClassifyRequest(PooledRequest):
    """POST /v1/classify."""

    input: Prompts


class ScoreRequest(PooledRequest):
    """POST /v1/score: similarities of `text_1`, one text or as many as `text_2`, and the texts of `text_2`."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents"))


class RerankRequest(PooledRequest):
    """POST /v1/rerank: `documents` by their similarity to `query`, the first `top_n`; 0: all."""

    query: Text
    documents: Documents
    top_n: int | None = Field(default=None, ge=0, le=INT32_MAX)
    return_documents: bool | None = None


class TokenizeRequest(_Strict):
    """POST /tokenize: a prompt, or messages rendered by the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds
