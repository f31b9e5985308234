"""Parameters and outputs of the offline engine, with vLLM's names. The code of the API server validates them."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from pydantic import ValidationError

from phalanx_api import wire
from phalanx_frontend.errors import api_error_of_validation
from phalanx_frontend.openai.schemas import CompletionRequest
from phalanx_frontend.text.tokenizer import TextTokenizer
from phalanx_runtime.settings import ServeSettings, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on the output: exactly one field is set. `json` is a schema, `grammar` is Lark."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's defaults."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: unlimited."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Seed of sampling; random by default."""
    max_tokens: int | None = 16
    """Without it: up to the context length."""
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    """Number of most probable tokens, apart from the sampled one."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None


def make_body(prompt: str | Sequence[int], params: SamplingParams) -> CompletionRequest:
    """Returns the equivalent HTTP body. Raises ValueError."""
    body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    for field in fields(params):
        value = getattr(params, field.name)
        if isinstance(value, StructuredOutputsParams):
            constraints = {constraint.name: _plain(getattr(value, constraint.name)) for constraint in fields(value)}
            value = {name: item for name, item in constraints.items() if item is not None}
        if value is not None:
            body[field.name] = _plain(value)
    if params.logit_bias is not None:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    try:
        return CompletionRequest.model_validate(body)
    except ValidationError as error:
        raise ValueError(api_error_of_validation(error.errors(), ()).message) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def make_settings(model: str, options: Mapping[str, object], environment: Mapping[str, str]) -> ServeSettings:
    """Returns settings from flags of `serve` as keyword arguments. Raises ValueError."""
    arguments = ["serve", model]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            arguments += [f"--{flag}", json.dumps(value)]
        elif value is not None:
            arguments += [f"--{flag}", *(str(item) for item in (value if isinstance(value, list | tuple) else [value]))]
    settings = read_settings(arguments, environment, _RaisingParser)
    assert isinstance(settings, ServeSettings), "the command is serve"
    if settings.group.num_pods > 1:
        raise ValueError(f"nnodes is {settings.group.num_pods}, expected 1: all ranks are on one machine")
    return settings


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's logprob."""

    logprob: float
    rank: int
    """1 is the most probable token."""
    decoded_token: str


Logprobs = dict[int, Logprob]
"""By token id: the sampled token first, then the most probable ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the n outputs of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: wire.FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All outputs for one prompt."""

    request_id: str
    prompt: str | None
    """Absent for a prompt of token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    """Starts with `None`: the first token has no logprobs."""
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0


def token_logprobs(tokenizer: TextTokenizer, token: int, detail: wire.TokenDetail) -> Logprobs:
    """Returns the logprobs at one position."""

    def logprob_of(id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.decode([id], skip_special_tokens=False))

    best = zip(detail.top_ids, detail.top_logprobs, strict=True)
    tops = {id: logprob_of(id, logprob, rank) for rank, (id, logprob) in enumerate(best, 1)}
    return {token: logprob_of(token, detail.logprob, detail.rank + 1)} | {id: top for id, top in tops.items() if id != token}


def prompt_token_logprobs(
    tokenizer: TextTokenizer, prompt: Sequence[int], details: Sequence[wire.TokenDetail]
) -> list[Logprobs | None]:
    """Returns the logprobs of a prompt; `details` start at token 1."""
    return [None, *(token_logprobs(tokenizer, token, detail) for token, detail in zip(prompt[1:], details, strict=True))]
