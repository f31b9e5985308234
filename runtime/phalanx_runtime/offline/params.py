"""Parameters of the offline engine, with vLLM's names.

They are converted to the body of an HTTP request and validated by the API server's code, so that both have one meaning.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from pydantic import ValidationError

from phalanx_frontend.errors import api_error_of_validation
from phalanx_frontend.openai.schemas import CompletionRequest
from phalanx_runtime.settings import ServeSettings, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on the output, exactly one of: JSON schema, regex, list of choices, Lark grammar, any JSON object."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names and defaults.

    `top_k` 0 or -1: no limit. `max_tokens` None: up to the context length. `seed` None: random. `logprobs` k: logprobs of the
    output token and of the k most probable tokens; `prompt_logprobs`: the same for the prompt.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None


def make_body(prompt: str | Sequence[int], params: SamplingParams) -> CompletionRequest:
    """The equivalent HTTP body. Raises ValueError with the name of the invalid field."""
    body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    for field in fields(params):
        value = getattr(params, field.name)
        if isinstance(value, StructuredOutputsParams):
            given = {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
            value = {name: item for name, item in given.items() if item is not None}
        if value is not None:
            body[field.name] = _plain(value)
    if params.logit_bias is not None:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    try:
        return CompletionRequest.model_validate(body)
    except ValidationError as error:
        raise ValueError(api_error_of_validation(error.errors(), ()).message) from error


def _plain(value: Any) -> Any:
    """Lists for sequences and dicts for mappings, as in JSON."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


# Options of the offline engine: the flags of `phalanx-runtime serve` as keyword arguments.


class _Raising(argparse.ArgumentParser):
    """A parser that raises on errors."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(message)


def make_settings(model: str, options: Mapping[str, object], environment: Mapping[str, str]) -> ServeSettings:
    """Settings from the options; missing or None options have the flags' defaults. Raises ValueError."""
    arguments = ["serve", model]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", *(str(item) for item in (value if isinstance(value, list | tuple) else [value]))]
    settings = read_settings(arguments, environment, _Raising)
    assert isinstance(settings, ServeSettings), "the command is serve"
    if settings.group.num_pods > 1:
        raise ValueError(f"nnodes is {settings.group.num_pods}; here all ranks are on one machine")
    return settings
