"""/v1/classify, and scores of cross-encoders, over a scripted backend: forms, activations, pairs, refusals."""

import math
import resource
import struct
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing, ByteLevel, RobertaProcessing, TemplateProcessing

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import Delta
from phalanx_frontend.limits import Limits
from phalanx_frontend.text.tokenizer import TextTokenizer, fitted_lengths
from tests.frontend.fakes import FakeBackend, tiny_assets, tiny_tokenizer_json, vector_of
from tests.frontend.posting import client_of

NONE = wire.Embedding(size=3, pooling="cls", obstacle="it is a classifier", is_encoder=True)
THREE = wire.Classification(labels=["bad", "good", "so-so"], activation="softmax")
CROSS = wire.Classification(labels=["LABEL_0"], activation="sigmoid")
PAIR = Tokenizer.from_str(tiny_tokenizer_json().decode())


def backend_of(classification: wire.Classification | None, **more: Any) -> FakeBackend:
    return FakeBackend(assets=tiny_assets(embedding=NONE, classification=classification, **more))


async def post(backend: FakeBackend, path: str, **body: Any) -> httpx.Response:
    async with client_of(backend, Limits(max_inputs=4)) as client:
        return await client.post(path, json=body)


def logits(backend: FakeBackend, count: int) -> list[list[float]]:
    return [list(struct.unpack("<8f", vector_of(request))[:count]) for request in backend.requests]


async def test_classes_have_the_form_of_vllm() -> None:
    backend = backend_of(THREE)
    answer = (await post(backend, "/v1/classify", input=["once", "upon"])).json()
    for index, (item, numbers) in enumerate(zip(answer["data"], logits(backend, 3), strict=True)):
        weights = [math.exp(number) for number in numbers]
        assert item["probs"] == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-6)
        assert item["label"] == THREE.labels[item["probs"].index(max(item["probs"]))]
        assert (item["index"], item["num_classes"]) == (index, 3)
    count = sum(len(request.prompt) for request in backend.requests)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert answer["object"] == "list" and answer["id"].startswith("classify-") and answer["created"] > 0 and answer["model"]


@pytest.mark.parametrize("name", ["use_activation", "activation"])
async def test_logits_are_returned_without_activation(name: str) -> None:
    backend = backend_of(THREE)
    [item] = (await post(backend, "/v1/classify", input=[5, 6], **{name: False})).json()["data"]
    assert item["probs"] == pytest.approx(logits(backend, 3)[0])


async def test_labels_that_exclude_nothing_have_sigmoids() -> None:
    several = wire.Classification(labels=["a", "b"], activation="sigmoid")
    backend = backend_of(several)
    [item] = (await post(backend, "/v1/classify", input="once")).json()["data"]
    assert item["probs"] == pytest.approx([1 / (1 + math.exp(-number)) for number in logits(backend, 2)[0]])


@pytest.mark.parametrize("name", ["use_activation", "activation"])
async def test_scores_are_logits_without_activation(name: str) -> None:
    backend = backend_of(CROSS)
    score = (await post(backend, "/v1/score", text_1="once", text_2="upon", **{name: False})).json()["data"][0]["score"]
    ranked = (await post(backend, "/v1/rerank", query="once", documents=["upon"], **{name: False})).json()["results"][0]
    assert [[score], [ranked["relevance_score"]]] == [pytest.approx(numbers) for numbers in logits(backend, 1)]


@pytest.mark.parametrize("large", [800.0, -800.0])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
async def test_large_logits_give_probabilities(activation: wire.Activation, large: float) -> None:
    delta = Delta(index=0, tokens=[], finish="stop", vector=struct.pack("<3f", large, 0, -large))
    classes = wire.Classification(labels=["a", "b", "c"], activation=activation)
    assets = tiny_assets(embedding=NONE, classification=classes)
    [item] = (await post(FakeBackend(lambda _: [delta], assets), "/v1/classify", input="once")).json()["data"]
    assert all(0 <= number <= 1 for number in item["probs"]) and max(item["probs"]) == pytest.approx(1)


@pytest.mark.parametrize("activation", ["sigmoid", "identity"])
async def test_cross_encoder_scores_both_texts_together(activation: wire.Activation) -> None:
    backend = backend_of(wire.Classification(labels=["x"], activation="sigmoid", score_activation=activation))
    answer = (await post(backend, "/v1/score", text_1="once", text_2=["upon", "a time"])).json()
    joined = [PAIR.encode("once", text) for text in ("upon", "a time")]
    assert [request.prompt for request in backend.requests] == [pair.ids for pair in joined]
    assert [request.pair_start for request in backend.requests] == [pair.type_ids.index(1) for pair in joined]
    raw = [numbers[0] for numbers in logits(backend, 1)]
    wanted = raw if activation == "identity" else [1 / (1 + math.exp(-number)) for number in raw]
    assert [item["score"] for item in answer["data"]] == pytest.approx(wanted)


async def test_cross_encoder_ranks_documents_by_score() -> None:
    backend = backend_of(CROSS)
    documents = ["upon", "a", "time"]
    results = (await post(backend, "/v1/rerank", query="once", documents=documents, top_n=2)).json()["results"]
    raw = [numbers[0] for numbers in logits(backend, 1)]
    order = sorted(range(3), key=lambda index: (-raw[index], index))[:2]
    assert [item["index"] for item in results] == order
    assert [item["document"]["text"] for item in results] == [documents[index] for index in order]


@pytest.mark.parametrize(
    ("classification", "path", "body", "code"),
    [
        (None, "/v1/classify", {"input": "a"}, "no_classification"),
        (
            wire.Classification(labels=["a"], activation="sigmoid", obstacle="x"),
            "/v1/classify",
            {"input": "a"},
            "no_classification",
        ),
        (THREE, "/v1/score", {"text_1": "a", "text_2": "b"}, "no_scores"),
        (THREE, "/v1/rerank", {"query": "a", "documents": ["b"]}, "no_scores"),
        (THREE, "/v1/embeddings", {"input": "a"}, "no_embeddings"),
        (THREE, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "no_generation"),
        (THREE, "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, "no_generation"),
    ],
)
async def test_what_a_model_lacks_is_refused(
    classification: wire.Classification | None, path: str, body: dict[str, Any], code: str
) -> None:
    backend = backend_of(classification)
    answer = await post(backend, path, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code) and not backend.requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/classify", {"input": ["a"] * 5}, "input"),
        ("/v1/classify", {"input": ["a", ""]}, "input"),
        ("/v1/classify", {"input": "once " * 600}, "input"),
        ("/v1/classify", {"input": "a", "use_activation": "x"}, "use_activation"),
        ("/v1/classify", {"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 5}, "text_2"),
        ("/v1/score", {"text_1": "once " * 300, "text_2": ["once " * 300]}, "text_2"),
    ],
)
async def test_wrong_inputs_are_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    backend = backend_of(CROSS)
    answer = await post(backend, path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].partition(".")[0] == param and not backend.requests


async def test_vector_of_another_model_is_an_error() -> None:
    """A group of another revision may have the same tokenizer."""
    delta = Delta(index=0, tokens=[], finish="stop", vector=struct.pack("<2f", 1, 2))
    assets = tiny_assets(embedding=NONE, classification=THREE)
    answer = await post(FakeBackend(lambda _: [delta], assets), "/v1/classify", input="once")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "embeddings_unavailable")


async def test_long_inputs_of_encoders_lose_their_end() -> None:
    backend = FakeBackend(assets=tiny_assets(embedding=wire.Embedding(size=8, pooling="cls", is_encoder=True)))
    whole = PAIR.encode("once upon a time").ids
    await post(backend, "/v1/embeddings", input="once upon a time", truncate_prompt_tokens=3)
    await post(backend, "/v1/embeddings", input=whole, truncate_prompt_tokens=3)
    assert [request.prompt for request in backend.requests] == [whole[:3]] * 2, "with the special token at the start"


async def test_longer_text_of_a_pair_is_cut() -> None:
    backend = backend_of(CROSS)
    await post(backend, "/v1/score", text_1="once", text_2=["upon a time " * 200], truncate_prompt_tokens=-1)
    [request] = backend.requests
    query = PAIR.encode("once").ids
    assert len(request.prompt) == 512 and request.prompt[: len(query)] == query and request.pair_start == len(query)


async def test_pairs_are_cut_at_their_ends_only() -> None:
    answer = await post(backend_of(CROSS), "/v1/score", text_1="a", text_2="b", truncation_side="left")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncation_side")


async def test_schema_names_the_endpoint() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(FakeBackend())), base_url="http://api") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert "post" in paths["/v1/classify"]


@pytest.mark.parametrize(
    ("lengths", "room", "fitted"),
    [
        ([5], 3, [3]), ([5], -1, [0]), ([2, 3], 5, [2, 3]), ([2, 9], 6, [2, 4]), ([9, 2], 6, [4, 2]),
        ([9, 8], 7, [4, 3]), ([8, 9], 7, [3, 4]), ([5, 5], 1, [1, 0]), ([5, 5], -2, [0, 0]),
    ],
)  # fmt: skip
def test_longer_text_loses_tokens_first(lengths: list[int], room: int, fitted: list[int]) -> None:
    assert fitted_lengths(lengths, room) == fitted


PROCESSORS = {
    "none": None,
    "template": TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", [("<s>", 1), ("</s>", 2)]),
    "bert": BertProcessing(("</s>", 2), ("<s>", 1)),
    "roberta": RobertaProcessing(("</s>", 2), ("<s>", 1)),
    "bytes": ByteLevel(),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_texts_are_joined_as_the_library_does(name: str) -> None:
    library = Tokenizer.from_str(tiny_tokenizer_json().decode())
    if PROCESSORS[name] is not None:
        library.post_processor = PROCESSORS[name]
    tokenizer = TextTokenizer(library.to_str().encode())
    for second in (None, "upon", ""):
        for has_special in (True, False):
            whole = library.encode("once", second, add_special_tokens=has_special)
            ids, start = tokenizer.encode_texts("once", second, has_special)
            assert ids == whole.ids and start == (whole.type_ids.index(1) if 1 in whole.type_ids else 0)
            known = tokenizer.encode("once upon", False)
            for limit in (4, 3, None):
                alone = tokenizer.encode_texts("once upon", second, has_special, limit)
                assert tokenizer.encode_texts("once upon", second, has_special, limit, known) == alone


def test_long_texts_that_are_cut_take_little_memory() -> None:
    """The library joins each piece that a cut of one text leaves with each piece of the other."""
    tokenizer, before = TextTokenizer(tiny_tokenizer_json()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids, _ = tokenizer.encode_texts("once " * 1500, "upon " * 1500, True, 7)
    assert len(ids) == 7 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"
