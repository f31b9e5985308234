"""Requests with many texts or one shared query: bounds, one tokenization of the query, turns of other requests."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.limits import Limits
from phalanx_frontend.openai.embedding.inputs import in_turns
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import FakeBackend, tiny_assets
from tests.frontend.openai.judging import judge_backend
from tests.frontend.posting import client_of

MODELS = ["judge", "cross-encoder"]
MANY = [
    ("embeddings", "/v1/embeddings", {"input": ["once"] * 500}),
    ("cross-encoder", "/v1/classify", {"input": ["once"] * 500}),
    ("judge", "/v1/rerank", {"query": "once", "documents": ["upon"] * 500}),
    ("cross-encoder", "/v1/rerank", {"query": "once", "documents": ["upon"] * 500}),
]
JSON = (b"content-type", b"application/json")
SHARED = [("/v1/rerank", "query", "documents"), ("/v1/score", "text_1", "text_2")]


def backend_of(model: str) -> FakeBackend:
    if model == "judge":
        return judge_backend("yes", "no")
    if model == "embeddings":
        return FakeBackend()
    none = wire.Embedding(size=3, pooling="cls", obstacle="it is a classifier", is_encoder=True)
    classes = wire.Classification(labels=["LABEL_0"], activation="sigmoid")
    return FakeBackend(assets=tiny_assets(embedding=none, classification=classes, max_model_len=2048))


async def post(backend: FakeBackend, path: str, limits: Limits | None = None, **body: Any) -> httpx.Response:
    async with client_of(backend, limits or Limits()) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize(("path", "query", "texts"), SHARED)
@pytest.mark.parametrize("model", MODELS)
async def test_copies_of_a_query_are_bounded(model: str, path: str, query: str, texts: str) -> None:
    backend, limits = backend_of(model), Limits(max_body_bytes=1000)
    answer = await post(backend, path, limits, **{query: "x" * 300, texts: ["a"] * 4})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, texts) and "at most 3 texts" in error["message"]
    assert not backend.requests
    assert (await post(backend, path, limits, **{query: "x" * 300, texts: ["a"] * 3})).status_code == 200


@pytest.mark.parametrize("model", [*MODELS, "embeddings"])
async def test_a_query_for_each_text_is_not_bounded(model: str) -> None:
    texts = ["x" * 150] * 3
    answer = await post(backend_of(model), "/v1/score", Limits(max_body_bytes=1000), text_1=texts, text_2=texts)
    assert answer.status_code == 200


@pytest.mark.parametrize("model", MODELS)
async def test_shared_query_is_tokenized_once(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    with recorded(monkeypatch) as encoded:
        await post(backend_of(model), "/v1/rerank", query="a ship", documents=["once", "upon", "a time"])
    assert sum("a ship" in text for text in encoded) == 1
    assert [text.strip() for text in encoded[-3:]] == ["once", "upon", "a time"]


@pytest.mark.parametrize(("model", "path", "body"), MANY)
async def test_others_run_between_short_texts(
    monkeypatch: pytest.MonkeyPatch, model: str, path: str, body: dict[str, Any]
) -> None:
    with recorded(monkeypatch) as encoded:
        counts = list[int]()

        async def other() -> None:
            while True:
                counts.append(len(encoded))
                await asyncio.sleep(0)

        running = asyncio.create_task(other())
        assert (await post(backend_of(model), path, **body)).status_code == 200
        running.cancel()
    longest = max(after - before for before, after in pairwise(counts))
    assert len(encoded) >= 500 and longest <= 70, "each of 500 texts counts 64 characters and its own, of 4096 at once"


@pytest.mark.parametrize(("model", "path", "body"), MANY)
async def test_disconnect_ends_the_tokenizing(
    monkeypatch: pytest.MonkeyPatch, model: str, path: str, body: dict[str, Any]
) -> None:
    backend, received = backend_of(model), [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [JSON]}
    with recorded(monkeypatch) as encoded:
        await create_app(backend)(scope, receive, send)
    assert 0 < len(encoded) < 200 and not backend.requests


async def test_every_input_is_yielded_in_order() -> None:
    texts = ["", "a" * 5000, "b", "c" * 4000]
    assert [text async for text in in_turns(texts, len)] == texts


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the texts that a tokenizer encodes meanwhile."""
    encoded, encode = list[str](), TextTokenizer.encode

    def one(self: TextTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(TextTokenizer, "encode", one)
        yield encoded
