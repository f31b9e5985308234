"""Sampling parameters of a request over the model's defaults."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from phalanx_api import wire
from phalanx_frontend.errors import ApiError
from phalanx_frontend.limits import Limits
from phalanx_frontend.openai.sampling import (
    NEUTRAL_VALUES,
    Defaults,
    build_sampling,
    check_fields,
    max_output_tokens,
    read_defaults,
)
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest

EOS = 7


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    ("body", "num_prompt", "model_max", "expected"),
    [
        (completion(), 10, None, 16),
        (completion(), 95, None, 5),
        (completion(max_tokens=90), 10, None, 90),
        (completion(), 10, 4, 4),
        (completion(max_tokens=9), 10, 4, 9),
        (chat(), 10, None, 90),
        (chat(), 10, 50, 50),
        (chat(max_tokens=3), 10, None, 3),
        (chat(max_tokens=3, max_completion_tokens=4), 10, None, 4),
    ],
    ids=[
        "completion default", "default cut to the room", "all that fits", "model's bound", "requested over the model's bound",
        "chat fills the context", "chat to the model's bound", "chat max_tokens", "newer name wins",
    ],
)  # fmt: skip
def test_output_is_bounded(body: GenerationRequest, num_prompt: int, model_max: int | None, expected: int) -> None:
    assert max_output_tokens(body, num_prompt, 100, Defaults(max_tokens=model_max)) == expected


@pytest.mark.parametrize(
    ("body", "num_prompt", "param"),
    [
        (completion(max_tokens=91), 10, "prompt"),
        (completion(), 100, "prompt"),
        (chat(max_completion_tokens=1), 100, "messages"),
    ],
    ids=["one too many", "prompt fills the context", "chat"],
)
def test_impossible_max_tokens_is_refused(body: GenerationRequest, num_prompt: int, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        max_output_tokens(body, num_prompt, 100, Defaults())
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", param)


@pytest.mark.parametrize(
    ("body", "num_prompt", "message"),
    [
        (completion(max_tokens=0, echo=True), 100, "101 tokens (100 in the prompt, at least 1 in the completion)"),
        (completion(), 100, "101 tokens (100 in the prompt, at least 1 in the completion)"),
        (completion(max_tokens=5), 97, "102 tokens (97 in the prompt, 5 in the completion)"),
    ],
    ids=["echo alone", "not said", "said"],
)
def test_the_tokens_that_were_too_many_add_up(body: GenerationRequest, num_prompt: int, message: str) -> None:
    with pytest.raises(ApiError, match=re.escape(message)):
        max_output_tokens(body, num_prompt, 100, Defaults())


def test_request_overrides_model_defaults_which_override_openai() -> None:
    defaults = read_defaults(b'{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 33}')
    assert defaults == Defaults(sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20}, max_tokens=33)
    silent = build_sampling(completion(), 16, defaults, [EOS], default_seed=5)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p, silent.seed) == (0.6, 0.9, 20, 0.0, 5)
    loud = build_sampling(completion(temperature=0, top_p=1, top_k=-1, min_p=0.1, seed=3), 16, defaults, [EOS], default_seed=5)
    assert (loud.temperature, loud.top_p, loud.top_k, loud.min_p, loud.seed) == (0.0, 1.0, None, 0.1, 3)
    plain = build_sampling(completion(), 16, read_defaults(None), [EOS], default_seed=5)
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, None)


@pytest.mark.parametrize("value", [-1, 0])
def test_unlimited_top_k_of_a_model_is_null(value: int) -> None:
    defaults = read_defaults(b'{"top_k": %d}' % value)
    assert build_sampling(completion(), 16, defaults, [], 0).top_k is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, [EOS]), ({"ignore_eos": True}, []), ({"stop_token_ids": [3]}, [3, EOS]), ({"stop_token_ids": [EOS]}, [EOS])],
    ids=["end of sequence", "ignored", "beside others", "named twice"],
)
def test_tokens_that_end_a_request(fields: dict[str, Any], expected: list[int]) -> None:
    assert build_sampling(completion(**fields), 16, Defaults(), [EOS], 0).stop_token_ids == expected


def test_a_negative_seed_is_as_good_as_another() -> None:
    assert 0 <= build_sampling(completion(seed=-5), 16, Defaults(), [], 0).seed < 2**63


def test_min_tokens_over_max_tokens_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        build_sampling(completion(min_tokens=17), 16, Defaults(), [], 0)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("name", [name for name in NEUTRAL_VALUES if name not in CompletionRequest.model_fields])
def test_unsupported_field_is_refused_unless_neutral(name: str) -> None:
    for neutral in NEUTRAL_VALUES[name]:
        check_fields(completion(**{name: neutral}), Limits())
    with pytest.raises(ApiError) as caught:
        check_fields(completion(**{name: {"unknown": "value"}}), Limits())
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("fields", [{"continue_final_message": 0}, {"use_beam_search": 0}, {"best_of": True}], ids=str)
def test_zero_and_false_are_not_the_same(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        check_fields(completion(**fields), Limits())


@pytest.mark.parametrize("fields", [{"user": "me"}, {"store": True}, {"metadata": {"a": "b"}}, {"no_such_field": 1}], ids=str)
def test_hints_and_unknown_fields_are_ignored(fields: dict[str, Any]) -> None:
    check_fields(completion(**fields), Limits())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
    ],
    ids=["options without a stream", "too many stops", "too long a stop"],
)
def test_fields_beyond_their_bounds_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_fields(completion(**fields), Limits())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1, 2], [3]], [[1, 2], [3]]), ([], [[]])],
    ids=["text", "ids", "texts", "lists of ids", "no ids"],
)
def test_a_prompt_is_text_or_ids(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", [1]]}, {"prompt": [[1], [True]]}, {"prompt": [1, "a"]}, {"prompt": [True]}, {"prompt": 3},
        {"prompt": None},
        {"prompt": "\ud800"}, {"stop": [1]}, {"stop": [""]}, {"stop": ["\ud800"]}, {"max_tokens": "3"}, {"max_tokens": True},
        {"temperature": float("nan")}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": -0.1}, {"seed": 2**63}, {"stream": 1},
        {"stop_token_ids": [-1]}, {"stream_options": {"continuous_usage_stats": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        completion(**fields)


@pytest.mark.parametrize(
    ("content", "expected"),
    [("a", "a"), (None, None), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb")],
    ids=["text", "nothing", "parts"],
)
def test_a_message_is_text_or_text_parts(content: object, expected: str | None) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages[0].content == expected


@pytest.mark.parametrize("content", [3, [{"type": "image_url", "image_url": {"uri": "x"}}], ["a"], [{"type": "text"}]], ids=str)
def test_a_message_of_another_kind_is_refused(content: object) -> None:
    with pytest.raises(ValidationError):
        chat(messages=[{"role": "user", "content": content}])


def test_every_wish_reaches_the_backend() -> None:
    body = completion(
        repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=0.5, logit_bias={"3": -100, "4": 1.5},
        allowed_token_ids=[3, 4], min_tokens=2,
    )  # fmt: skip
    grammar = wire.Grammar("regex", "a+")
    sampling = build_sampling(body, 16, Defaults(), [EOS], 0, [[1, 2]], grammar)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -2.0, 0.5)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({3: -100.0, 4: 1.5}, [3, 4])
    assert (sampling.bad_words, sampling.grammar, sampling.min_tokens) == ([[1, 2]], grammar, 2)


def test_the_model_s_repetition_penalty_is_the_default() -> None:
    defaults = read_defaults(b'{"repetition_penalty": 1.1}')
    assert build_sampling(completion(), 16, defaults, [], 0).repetition_penalty == 1.1
    assert build_sampling(completion(repetition_penalty=1), 16, defaults, [], 0).repetition_penalty == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": [1]}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": True}}, {"logit_bias": {"1": "2"}},
        {"logit_bias": {"1": float("nan")}}, {"presence_penalty": 2.01}, {"repetition_penalty": 0}, {"bad_words": [""]},
        {"bad_words": "word"}, {"priority": 2**31}, {"deadline_ms": -1}, {"cache_salt": ""}, {"tenant": "\ud800"},
        {"guided_choice": []}, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_wish_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        completion(**fields)
