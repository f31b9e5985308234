"""Sampling parameters: from the request, else generation_config.json, else OpenAI's defaults."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from phalanx_api import wire
from phalanx_frontend.errors import ApiError, api_error_of_validation, invalid
from phalanx_frontend.fields import INT64_MAX
from phalanx_frontend.limits import Limits
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from phalanx_frontend.stream.reply import TEXT_ONLY, ShownFields

# Unimplemented fields of OpenAI, vLLM and SGLang, with the values that have no effect; others are refused. Hints and undefined
# fields are ignored, as in vLLM.

_OFF = (None, False)
_ON = (None, True)
_EMPTY_LIST: tuple[object, ...] = (None, [])
_EMPTY_OBJECT: tuple[object, ...] = (None, {})

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    # OpenAI, both endpoints
    "service_tier": (None, "auto", "default"),
    # OpenAI completions
    "best_of": (None, 1),
    "suffix": (None, ""),
    # OpenAI chat
    "functions": _EMPTY_LIST,
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "moderation": (None,),
    # vLLM
    "length_penalty": (None, 1, 1.0),
    "use_beam_search": _OFF,
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "guided_json_object": _OFF,
    "structural_tag": (None,),
    "guided_whitespace_pattern": (None,),
    "continue_final_message": _OFF,
    "chat_template": (None,),
    "documents": _EMPTY_LIST,
    "echo": _OFF,  # of a chat; completions have it
    "thinking_token_budget": (None,),
    "logprob_token_ids": _EMPTY_LIST,
    "logits_processors": _EMPTY_LIST,
    "repetition_detection": (None,),
    "mm_processor_kwargs": _EMPTY_OBJECT,
    "kv_transfer_params": _EMPTY_OBJECT,
    "vllm_xargs": _EMPTY_OBJECT,
    # vLLM, pooled requests
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "padding": _OFF,
    # Cohere, rankings
    "max_tokens_per_doc": (None,),
    "max_chunks_per_doc": (None,),
    "rank_fields": (None, ["text"]),
    # SGLang
    "lora_path": (None,),
    "stop_regex": (None, "", []),
    "no_stop_trim": _OFF,
    "custom_logit_processor": (None, ""),
    "custom_params": _EMPTY_OBJECT,
    "separate_reasoning": _ON,
    "return_hidden_states": _OFF,
    "session_params": _EMPTY_OBJECT,
}
FORMS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"regex", "ebnf", "json_schema"}
)
"""Fields of completions and chats that set the form of the output."""


def refuse_unsupported(extra: Mapping[str, object]) -> None:
    """Raises ApiError 400 for an unsupported field with an effect."""
    for name, value in extra.items():
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is not None and not any(_is_equal(value, known) for known in neutral):
            raise invalid(name, f"{name} is not supported yet; leave it out", "unsupported_parameter")


def refuse_fields_of_chats(extra: Mapping[str, object]) -> None:
    """Raises ApiError 400 for fields that set the form of a chat's output, and unsupported ones, in a body of another API."""
    for name in sorted(FORMS):
        if extra.get(name) is not None:
            raise invalid(name, f"{name} is a field of chats, not of this API; leave it out", "unsupported_parameter")
    refuse_unsupported(extra)


def _is_equal(value: object, known: object) -> bool:
    """Compares values; False differs from 0, which requests logprobs."""
    return isinstance(value, bool) == isinstance(known, bool) and value == known


COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion."""


COMPUTED_FIELDS = frozenset(
    {"max_tokens", "min_tokens", "seed", "stop_token_ids", "bad_words", "grammar", "logprobs", "prompt_logprobs", "return_gaps"}
)
"""Fields of `wire.Sampling` with rules of their own in `build_sampling`."""
COPIED_FIELDS = tuple(name for name in wire.Sampling.__struct_fields__ if name not in COMPUTED_FIELDS)
"""The other fields: a request has them under the same name, or gets the default."""
GENERATION_CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Copied fields that a model's generation_config.json may set, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults from generation_config.json."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Values of copied fields; of the others `wire.Sampling` has the default."""
    max_tokens: int | None = None


def read_defaults(generation_config: bytes | None) -> Defaults:
    """Reads the defaults; they have the bounds of a request's fields. Raises ValueError."""
    config = json.loads(generation_config) if generation_config else {}
    if not isinstance(config, dict):
        raise ValueError("it must have a JSON object")
    named = {name: config.get(name) for name in GENERATION_CONFIG_FIELDS} | {"max_tokens": config.get("max_new_tokens")}
    values = {name: value for name, value in named.items() if value is not None}
    try:
        GenerationRequest.model_validate(values)
    except ValidationError as error:
        raise ValueError(api_error_of_validation(error.errors(), ()).message) from error
    max_tokens = values.pop("max_tokens", None)
    return Defaults(
        sampling={name: value if name == "top_k" else float(value) for name, value in values.items()}, max_tokens=max_tokens
    )


def check_fields(body: GenerationRequest, limits: Limits) -> None:
    """Raises ApiError 400 for contradictory, excessive or unimplemented fields."""
    refuse_unsupported(body.model_extra or {})
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not available when stream is true")
    if isinstance(body, CompletionRequest) and body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens may only be 0 with echo; set echo or at least 1")
    if isinstance(body, ChatRequest) and body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    if len(body.stop) > limits.max_stops:
        raise invalid("stop", f"at most {limits.max_stops} stop strings are allowed")
    if any(len(stop) > limits.max_stop_chars for stop in body.stop):
        raise invalid("stop", f"a stop string may have at most {limits.max_stop_chars} characters")


def max_output_tokens(body: GenerationRequest, num_prompt_tokens: int, max_model_len: int, defaults: Defaults) -> int:
    """Returns the maximum number of output tokens. Raises ApiError 400 if prompt and output exceed the context.

    `core.admission.check_length` of the runtime checks again: a group may have a shorter context than the API server knows.
    """
    free_tokens = max_model_len - num_prompt_tokens
    is_chat = isinstance(body, ChatRequest)
    requested = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        requested = body.max_completion_tokens
    if body.clamps_max_tokens and requested is not None and free_tokens > 0:
        return min(requested, free_tokens)
    if free_tokens < 1 or (requested is not None and requested > free_tokens):
        raise context_exceeded(max_model_len, num_prompt_tokens, requested, "messages" if is_chat else "prompt")
    if requested is not None:
        return max(requested, 1)  # an echo with max_tokens 0 generates one token, not shown
    bound = free_tokens if is_chat else min(free_tokens, COMPLETION_TOKENS)
    return bound if defaults.max_tokens is None else min(bound, defaults.max_tokens)


def context_exceeded(max_model_len: int, num_prompt_tokens: int, requested: int | None, param: str) -> ApiError:
    """Returns the 400 `context_length_exceeded`, which clients recognise."""
    request = f"{num_prompt_tokens} in the {param}, {requested or 'at least 1'} in the completion"
    total = num_prompt_tokens + (requested or 1)
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {total} tokens ({request})."
        f" Please reduce the length of the {param} or the completion."
    )
    return invalid(param, message, "context_length_exceeded")


def build_sampling(
    body: GenerationRequest,
    max_tokens: int,
    defaults: Defaults,
    eos_token_ids: list[int],
    default_seed: int,
    bad_words: Sequence[list[int]] = (),
    grammar: wire.Grammar | None = None,
    shown: ShownFields = TEXT_ONLY,
) -> wire.Sampling:
    """Builds the sampling parameters. Raises ApiError 400."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {min_tokens}, but at most {max_tokens} tokens may be generated")
    stop_token_ids = list(body.stop_token_ids or [])
    if not body.ignore_eos:
        stop_token_ids += [id for id in eos_token_ids if id not in stop_token_ids]
    return wire.Sampling(
        max_tokens=max_tokens,
        # The mask keeps 63 bits.
        seed=default_seed if body.seed is None else body.seed & INT64_MAX,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        bad_words=list(bad_words),
        grammar=grammar,
        logprobs=0 if shown.logprobs is None and shown.gaps else shown.logprobs,
        prompt_logprobs=num_prompt_logprobs(body, shown),
        return_gaps=shown.gaps,
        **_copied_fields(body, defaults),
    )


def _copied_fields(body: GenerationRequest, defaults: Defaults) -> dict[str, Any]:
    requested = {name: value for name in COPIED_FIELDS if (value := getattr(body, name)) is not None}
    values = {**defaults.sampling, **requested}
    if values.get("top_k", 1) < 1:
        values["top_k"] = None  # vLLM's 0 and -1: unlimited
    return values


def shown_fields(body: GenerationRequest) -> ShownFields:
    """Returns the token fields that the response shows."""
    logprobs = None
    if isinstance(body, CompletionRequest):
        logprobs = body.logprobs
    elif isinstance(body, ChatRequest) and body.logprobs:
        logprobs = body.top_logprobs or 0
    return ShownFields(
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        gaps=bool(body.return_gaps),
        token_ids=bool(body.return_token_ids),
        as_ids=bool(body.return_tokens_as_token_ids),
    )


def num_prompt_logprobs(body: GenerationRequest, shown: ShownFields) -> int | None:
    """Returns the number of logprobs per prompt token."""
    echoed = shown.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    requested = [count for count in (echoed, shown.prompt_logprobs) if count is not None]
    return max(requested, default=None)
