"""A program with a reasoning model: forms and forced calls follow the reasoning, with and without speculation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.frame.programs import Program
from tests.runtime.tiny import save_tiny
from tests.system.runtimes import metric_of, runtime

pytestmark = pytest.mark.system
MARKS = {"<think>": 300, "</think>": 301, "<tool_call>": 302, "</tool_call>": 303}
"""Added tokens that are not special, as those of Qwen."""
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.content }}</s>{% endfor %}{% if tools %}{{ tools | tojson }}<tool_call>"
    "{% endif %}<|assistant|>{% if thinking %}<think>\n{% elif thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
CALL = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
LETTERS = {str(ord(letter)): 60.0 for letter in "ab"}
ENDING = {str(MARKS["</think>"]): 57.0}
"""A thought of two letters, which ends after some of them."""


@pytest.fixture(scope="module")
def program(model: Path) -> Iterator[Program]:
    folder = save_tiny(model.parent / "reasoning", max_position_embeddings=2048)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    for mark, id in MARKS.items():
        del vocabulary[f"<unused{id}>"]
        vocabulary[mark] = id
        added.append({**added[0], "id": id, "content": mark, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    flags = ("--dtype", "float64", "--speculative-method", "ngram", "--speculative-control", "fixed", "--speculative-tokens", "3")
    with runtime("reasoning", folder, *flags) as one:
        yield one


def chat(program: Program, thinking: bool | None, **fields: Any) -> dict[str, Any]:
    """Returns the whole answer."""
    options = {} if thinking is None else {"chat_template_kwargs": {"thinking": thinking}}
    fixed: dict[str, Any] = {"messages": [{"role": "user", "content": "abab abba"}], "seed": 3, "max_tokens": 300, "n": 4}
    body = {**fixed, "logit_bias": {**LETTERS, **ENDING}, **options, **fields}
    answer = httpx.post(f"{program.base_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def messages(whole: dict[str, Any]) -> list[dict[str, Any]]:
    return [choice["message"] for choice in whole["choices"]]


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_forms_follow_the_reasoning(program: Program, method: str) -> None:
    whole = chat(program, True, **FORM, speculative={"method": method})
    thoughts = [message.get("reasoning_content", "") for message in messages(whole)]
    assert set("".join(thoughts)) == {"a", "b"} and max(map(len, thoughts)) > 8
    assert all(json.loads(message["content"])["a"] in ("x", "y") for message in messages(whole))
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop"] * 4
    assert whole["usage"]["completion_tokens"] > sum(map(len, thoughts))


def test_speculation_changes_no_answer(program: Program) -> None:
    """Drafts are accepted, in the reasoning too."""
    fields: dict[str, Any] = {**FORM, "logprobs": True}
    plain = chat(program, True, **fields, speculative={"method": "none"})
    before = metric_of(program, ACCEPTED)
    drafted = chat(program, True, **fields)
    assert [(choice["message"], choice["finish_reason"]) for choice in plain["choices"]] == [
        (choice["message"], choice["finish_reason"]) for choice in drafted["choices"]
    ]
    assert plain["usage"] == drafted["usage"]
    assert metric_of(program, ACCEPTED) > before
    entries = [choice["logprobs"]["content"] for choice in drafted["choices"]]
    assert sum(map(len, entries)) == drafted["usage"]["completion_tokens"]
    assert all("</think>" in [entry["token"] for entry in one] for one in entries)


def test_forced_calls_follow_the_reasoning(program: Program) -> None:
    for message in messages(chat(program, True, **CALL)):
        assert message["reasoning_content"] and not message["content"]
        function = message["tool_calls"][0]["function"]
        assert function["name"] == "f" and json.loads(function["arguments"])["a"] in ("x", "y")


def test_a_model_chooses_a_call_or_a_form(program: Program) -> None:
    bias = {**LETTERS, **ENDING, str(MARKS["<tool_call>"]): 1.0}
    fields: dict[str, Any] = {**FORM, **CALL, "tool_choice": "auto", "logit_bias": bias}
    called = 0
    for message in [message for seed in range(3) for message in messages(chat(program, True, **fields, seed=seed))]:
        assert message["reasoning_content"]
        calls = message.get("tool_calls", [])
        called += len(calls)
        assert json.loads(calls[0]["function"]["arguments"] if calls else message["content"])["a"] in ("x", "y")
    assert 0 < called < 12


def test_a_prompt_may_end_or_leave_out_the_reasoning(program: Program) -> None:
    """Where the prompt has no mark, the model chooses."""
    for message in messages(chat(program, False, **FORM)):
        assert "reasoning_content" not in message and json.loads(message["content"])
    bias = {**LETTERS, **ENDING, str(MARKS["<think>"]): 1.0}
    thoughts = [
        message.get("reasoning_content", "")
        for seed in range(3)
        for message in messages(chat(program, None, **FORM, seed=seed, logit_bias=bias))
    ]
    assert any(thoughts) and not all(thoughts)


def test_a_limit_in_the_reasoning_leaves_no_content(program: Program) -> None:
    whole = chat(program, True, **FORM, max_tokens=20, logit_bias={**LETTERS, str(MARKS["</think>"]): -100.0}, n=1)
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert len(choice["message"]["reasoning_content"]) == 20
