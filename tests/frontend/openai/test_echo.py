"""Echoes are made once for all choices, with tokens only where tokens are shown."""

from dataclasses import replace
from typing import Any, cast

import pytest

from phalanx_frontend.openai.accept import prompt_echoes
from phalanx_frontend.openai.prompt import ReadyPrompt
from phalanx_frontend.openai.sampling import shown_fields
from phalanx_frontend.openai.schemas import CompletionRequest
from phalanx_frontend.openai.served_model import load_model
from phalanx_frontend.stream.reply import NO_ECHO, Echo
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import tiny_assets, token_ids

MODEL = load_model(tiny_assets())
UNTOUCHED = replace(MODEL, tokenizer=cast(TextTokenizer, object()))
"""Fails when a token of it is read."""


def echoes(prompt: Any, model: Any = MODEL, **fields: Any) -> list[Echo]:
    body = CompletionRequest.model_validate({"prompt": prompt, "echo": True, **fields})
    prompts = [ReadyPrompt(token_ids(item) if isinstance(item, str) else item) for item in body.prompt]
    return list(prompt_echoes(body, model, prompts, shown_fields(body)))


def test_echo_is_absent_unless_requested() -> None:
    assert echoes(["a", "b"], UNTOUCHED, echo=False) == [NO_ECHO, NO_ECHO]


def test_text_prompt_is_echoed_without_tokenization() -> None:
    assert echoes(["once", "upon"], UNTOUCHED, n=3) == [Echo("once"), Echo("upon")]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}], ids=["text", "tokens"])
def test_ids_are_shown_as_they_spell(fields: dict[str, Any]) -> None:
    (echo,) = echoes(token_ids("once upon"), **fields)
    assert echo.text == "once upon"
    assert len(echo.starts) == (len(token_ids("once upon")) if fields else 0)


def test_tokens_of_written_text_start_where_its_pieces_do() -> None:
    (echo,) = echoes("once upon", logprobs=1, n=2)
    assert echo.text == "once upon"
    assert list(echo.starts) == sorted(echo.starts) and len(echo.starts) == len(token_ids("once upon"))
