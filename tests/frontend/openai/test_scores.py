"""Scores and rankings of texts are the cosines of their embeddings."""

import math
from array import array
from typing import Any

import httpx
import pytest

from phalanx_frontend.app import create_app
from phalanx_frontend.backend import Delta
from phalanx_frontend.openai.embedding.scores import cosine
from tests.frontend.fakes import FakeBackend

TEXTS = ["once upon a time", "a cat", "once upon a day", "a cat"]


async def post(path: str, backend: FakeBackend | None = None, **body: Any) -> httpx.Response:
    app = create_app(backend or FakeBackend())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:
        return await client.post(path, json=body)


async def vectors(texts: list[str]) -> list[list[float]]:
    return [item["embedding"] for item in (await post("/v1/embeddings", input=texts)).json()["data"]]


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


async def test_score_is_the_cosine_of_a_pair() -> None:
    query, *others = await vectors(["once", *TEXTS])
    expected = [dot(query, other) for other in others]
    named: list[dict[str, Any]] = [{"text_1": text_1, "text_2": TEXTS} for text_1 in ("once", ["once"], ["once"] * 4)]
    for body in [*named, {"queries": "once", "documents": TEXTS}]:
        answer = (await post("/v1/score", **body)).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-5)
        assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(4)]
    assert answer["object"] == "list" and answer["model"] and answer["usage"]["prompt_tokens"] > 0


async def test_documents_are_ranked_by_their_scores() -> None:
    query, *others = await vectors(["once", *TEXTS])
    scores = [dot(query, other) for other in others]
    whole = (await post("/v1/rerank", query="once", documents=TEXTS)).json()
    assert [item["relevance_score"] for item in whole["results"]] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    for item in whole["results"]:
        assert item["document"] == {"text": TEXTS[item["index"]]}
        assert item["relevance_score"] == pytest.approx(scores[item["index"]], abs=1e-5)
    order = [item["index"] for item in whole["results"]]
    assert order.index(1) < order.index(3), "equal documents keep their order"
    objects = (await post("/v1/rerank", query="once", documents=[{"text": text} for text in TEXTS], top_n=0)).json()
    assert objects["results"] == whole["results"]
    first = (await post("/v1/rerank", query="once", documents=TEXTS, top_n=2, return_documents=False)).json()["results"]
    assert [item["index"] for item in first] == order[:2] and "document" not in first[0]


async def test_score_of_an_equal_text_is_one() -> None:
    [item] = (await post("/v1/score", text_1="a cat", text_2="a cat")).json()["data"]
    assert item["score"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": [5]}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 3000}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents"),
        ("/v1/score", {"text_1": "", "text_2": ["a"]}, "text_1"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
    ],
)
async def test_wrong_texts_are_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    answer = await post(path, backend, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param) and not backend.requests


@pytest.mark.parametrize("extra", [{"input": "x"}, {"dimensions": "x"}, {"encoding_format": "weird"}])
async def test_fields_of_embeddings_have_no_effect(extra: dict[str, Any]) -> None:
    plain = (await post("/v1/rerank", query="a", documents=["b"])).json()
    assert (await post("/v1/rerank", query="a", documents=["b"], **extra)).json()["results"] == plain["results"]
    assert (await post("/v1/score", text_1="a", text_2="b", **extra)).status_code == 200


@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_vector_that_is_not_finite_is_an_error(number: float) -> None:
    size = len((await vectors(["a"]))[0])
    broken = Delta(index=0, tokens=[], finish="stop", vector=array("f", [number] + [1.0] * (size - 1)).tobytes())
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        answer = await post(path, FakeBackend(lambda request: [broken]), **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_cosine_without_direction_is_zero() -> None:
    assert cosine(array("f", [0.0, 0.0]), array("f", [1.0, 0.0])) == 0.0
    assert cosine(array("f", [3.0, 4.0]), array("f", [-3.0, -4.0])) == -1.0
