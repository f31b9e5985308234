"""Scores of Qwen3-Reranker over a scripted backend: two requests a pair, their prompt, its truncation."""

import math
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.limits import Limits
from phalanx_frontend.openai.embedding.judged import judged_scores
from tests.frontend.fakes import EMBEDDING, FakeBackend, tiny_assets, tiny_tokenizer_json
from tests.frontend.posting import client_of

JUDGE = wire.Embedding(size=EMBEDDING.size, pooling="last", reranker="qwen3")


def tokenizer_json(*words: str) -> bytes:
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json().decode())
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words])
    return tokenizer.to_str().encode()


TOKENIZER = Tokenizer.from_str(tokenizer_json("yes", "no").decode())
YES, NO = TOKENIZER.token_to_id("yes"), TOKENIZER.token_to_id("no")


def judge(request: wire.Request) -> list[Delta]:
    """Answers with a logprob that depends on the prompt."""
    [token] = request.sampling.allowed_token_ids or []
    logprob = -float(sum(request.prompt) % 7) - (token == YES)
    detail = wire.TokenDetail(logprob=logprob, rank=0, top_ids=[], top_logprobs=[])
    return [Delta(index=0, tokens=[token], finish="length", details=[detail])]


def backend_of(*words: str, max_model_len: int = 2048) -> FakeBackend:
    assets = tiny_assets(embedding=JUDGE, max_model_len=max_model_len)
    files = {**assets.files, "tokenizer.json": tokenizer_json(*words)}
    return FakeBackend(judge, wire.make_assets(files, assets.served_names, max_model_len, assets.eos_token_ids))


async def post(backend: FakeBackend, path: str = "/v1/score", **body: Any) -> httpx.Response:
    async with client_of(backend, Limits(max_inputs=4)) as client:
        return await client.post(path, json=body)


async def test_score_is_yes_against_no() -> None:
    backend = backend_of("yes", "no")
    answer = (await post(backend, text_1="once", text_2=["upon", "a time"])).json()
    asked = [request.sampling.allowed_token_ids for request in backend.requests]
    assert asked == [[YES], [NO]] * 2 and all(request.pooling is None for request in backend.requests)
    assert backend.requests[0].prompt == backend.requests[1].prompt != backend.requests[2].prompt
    assert [item["score"] for item in answer["data"]] == pytest.approx([1 / (1 + math.e)] * 2)
    assert answer["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in backend.requests[::2])


async def test_prompt_has_query_and_document_in_place() -> None:
    backend = backend_of("yes", "no")
    await post(backend, "/v1/rerank", query="once", documents=["upon"])
    text = TOKENIZER.decode(backend.requests[0].prompt)
    assert text.startswith("<|im_start|>system\nJudge whether") and text.endswith("<think>\n\n</think>\n\n")
    assert "\n<Query>: once\n<Document>: upon<|im_end|>\n<|im_start|>assistant" in text


async def test_only_the_document_is_cut() -> None:
    backend = backend_of("yes", "no")
    whole: dict[str, Any] = {"text_1": "once", "text_2": ["upon " * 50]}
    await post(backend, **whole)
    await post(backend, **whole, truncate_prompt_tokens=len(backend.requests[0].prompt) - 20)
    long, short = backend.requests[0].prompt, backend.requests[2].prompt
    assert len(short) == len(long) - 20 and short[:100] == long[:100] and short[-30:] == long[-30:]


@pytest.mark.parametrize(
    ("words", "limit", "code"),
    [((), 2048, "no_scores"), (("yes",), 2048, "no_scores"), (("yes", "no"), 64, "context_length_exceeded")],
)
async def test_what_cannot_be_judged_is_refused(words: tuple[str, ...], limit: int, code: str) -> None:
    backend = backend_of(*words, max_model_len=limit)
    answer = await post(backend, text_1="once", text_2=["upon"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code) and not backend.requests


def test_far_logprobs_give_finite_scores() -> None:
    from array import array

    far = [array("f", [-5000.0]), array("f", [0.0])]
    assert judged_scores([*far, *far[::-1]]) == pytest.approx([0.0, 1.0])
