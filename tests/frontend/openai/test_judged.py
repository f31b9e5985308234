"""Scores of Qwen3-Reranker over a scripted backend: two requests a pair, their prompt, its truncation."""

import math
import struct
from typing import Any

import httpx
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from phalanx_frontend.limits import Limits
from phalanx_frontend.openai.embedding.judged import INSTRUCTION, judged_scores
from tests.frontend.fakes import FakeBackend, vector_of
from tests.frontend.openai.judging import NO, ONE_LABEL, TOKENIZER, YES, judge_backend
from tests.frontend.posting import client_of


def qwen_like() -> Tokenizer:
    """Returns a small tokenizer with Qwen's normalizer and rule for words, and many merges over the borders of the prompt."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|im_end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        [f"<Document>: {word}\n\n  : >: >" for word in ("upon", "once", "\n", "> :", "7")] * 50, trainer
    )
    return tokenizer


QWEN = qwen_like()


async def post(backend: FakeBackend, path: str = "/v1/score", **body: Any) -> httpx.Response:
    async with client_of(backend, Limits(max_inputs=4)) as client:
        return await client.post(path, json=body)


async def test_score_is_yes_against_no() -> None:
    backend = judge_backend("yes", "no")
    answer = (await post(backend, text_1="once", text_2=["upon", "a time"])).json()
    asked = [request.sampling.allowed_token_ids for request in backend.requests]
    assert asked == [[YES], [NO]] * 2 and all(request.pooling is None for request in backend.requests)
    assert backend.requests[0].prompt == backend.requests[1].prompt != backend.requests[2].prompt
    assert [item["score"] for item in answer["data"]] == pytest.approx([1 / (1 + math.e)] * 2)
    assert answer["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in backend.requests[::2])


async def test_raw_score_is_the_difference_of_logits() -> None:
    answer = await post(judge_backend("yes", "no"), "/v1/rerank", query="once", documents=["upon"], use_activation=False)
    assert answer.json()["results"][0]["relevance_score"] == pytest.approx(-1)


async def test_prompt_has_query_and_document_in_place() -> None:
    backend = judge_backend("yes", "no")
    await post(backend, "/v1/rerank", query="once", documents=["upon"])
    text = TOKENIZER.decode(backend.requests[0].prompt)
    assert text.startswith("<|im_start|>system\nJudge whether") and text.endswith("<think>\n\n</think>\n\n")
    assert "\n<Query>: once\n<Document>: upon<|im_end|>\n<|im_start|>assistant" in text


async def test_converted_reranker_needs_one_vector_a_pair() -> None:
    plain, converted = judge_backend("yes", "no"), judge_backend("yes", "no", classes=ONE_LABEL)
    await post(plain, text_1="once", text_2=["upon", "a time"])
    answer = (await post(converted, text_1="once", text_2=["upon", "a time"])).json()
    assert [request.prompt for request in converted.requests] == [request.prompt for request in plain.requests[::2]]
    assert {request.pooling for request in converted.requests} == {"last"}
    logits = [struct.unpack("<f", vector_of(request)[:4])[0] for request in converted.requests]
    assert [item["score"] for item in answer["data"]] == pytest.approx([1 / (1 + math.exp(-logit)) for logit in logits])


async def test_only_the_document_is_cut() -> None:
    backend = judge_backend("yes", "no")
    whole: dict[str, Any] = {"text_1": "once", "text_2": ["upon " * 50]}
    await post(backend, **whole)
    await post(backend, **whole, truncate_prompt_tokens=len(backend.requests[0].prompt) - 20)
    long, short = backend.requests[0].prompt, backend.requests[2].prompt
    assert len(short) == len(long) - 20 and short[:100] == long[:100] and short[-30:] == long[-30:]


async def test_cut_that_leaves_no_document_is_refused() -> None:
    backend = judge_backend("yes", "no")
    whole: dict[str, Any] = {"text_1": "once", "text_2": ["a"]}
    await post(backend, **whole)
    [one, _] = backend.requests
    answer = await post(backend, **whole, truncate_prompt_tokens=len(one.prompt) - 2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    least = int(answer.json()["error"]["message"].partition("at least ")[2].partition(":")[0])
    assert (await post(backend, **whole, truncate_prompt_tokens=least)).status_code == 200
    assert (await post(backend, **whole, truncate_prompt_tokens=least - 1)).status_code == 400


async def test_query_without_room_exceeds_the_context() -> None:
    answer = await post(judge_backend("yes", "no", max_model_len=64), text_1="once", text_2=["upon"], truncate_prompt_tokens=-1)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("document", ["upon a time", " upon", "\nupon", "\n\n", ": upon", ">", "\u0301a", "7", "<|im_end|>"])
def test_parts_have_the_tokens_of_the_whole(document: str) -> None:
    """As Qwen's tokenizer splits text; its normalizer is NFC."""
    for query in ("once!", "once ", "once"):
        head = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>:"
        whole = QWEN.encode(f"{head} {document}").ids
        assert QWEN.encode(head).ids + QWEN.encode(f" {document}").ids == whole


@pytest.mark.parametrize(
    ("words", "limit", "code"),
    [((), 2048, "no_scores"), (("yes",), 2048, "no_scores"), (("yes", "no"), 64, "context_length_exceeded")],
)
async def test_what_cannot_be_judged_is_refused(words: tuple[str, ...], limit: int, code: str) -> None:
    backend = judge_backend(*words, max_model_len=limit)
    answer = await post(backend, text_1="once", text_2=["upon"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code) and not backend.requests


def test_far_logprobs_give_finite_scores() -> None:
    from array import array

    far = [array("f", [-5000.0]), array("f", [0.0])]
    assert judged_scores([*far, *far[::-1]]) == pytest.approx([0.0, 1.0])
