"""/v1/embeddings over a scripted backend: bad requests, failures, and what the backend gets."""

import asyncio
import math
import struct
from typing import Any

import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.limits import Limits
from tests.frontend.fakes import EMBEDDING, FakeBackend, tiny_assets, token_ids, vector_of
from tests.frontend.posting import FULL, client_of, post, scripted

PATH = "/v1/embeddings"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", ""]}, "input", None),
        ({"input": [[1], []]}, "input", None),
        ({"input": [[1], ["a"]]}, "input", None),
        ({"input": 5}, "input", None),
        ({}, "input", None),
        ({"input": [10**6]}, "input", None),
        ({"input": [1] * 513}, "input", "context_length_exceeded"),
        ({"input": ["a", "once " * 600]}, "input", "context_length_exceeded"),
        ({"input": ["a"] * 5}, "input", None),
        ({"input": "a", "dimensions": 0}, "dimensions", None),
        ({"input": "a", "dimensions": 9}, "dimensions", None),
        ({"input": "a", "dimensions": "8"}, "dimensions", None),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", None),
        ({"input": "a", "user": 5}, "user", None),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", None),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", None),
    ],
)
async def test_bad_requests_get_400_with_their_field(fields: dict[str, Any], param: str, code: str | None) -> None:
    backend = FakeBackend()
    async with client_of(backend, Limits(max_inputs=4)) as client:
        answer = await client.post(PATH, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", code)
    assert error["param"].partition("[")[0] == param
    assert not backend.requests


async def test_unknown_model_is_not_found() -> None:
    answer = await post(FakeBackend(), PATH, input="a", model="other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "embedding", [None, wire.Embedding(size=8, pooling="mean", obstacle="its module Dense is not supported")]
)
async def test_model_without_embeddings_is_refused(embedding: wire.Embedding | None) -> None:
    answer = await post(FakeBackend(assets=tiny_assets(embedding=embedding)), PATH, input="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_embeddings")
    assert embedding is None or embedding.obstacle in answer.json()["error"]["message"]


async def test_each_input_is_a_pooled_request() -> None:
    backend = FakeBackend(assets=tiny_assets(embedding=wire.Embedding(size=8, pooling="cls")))
    answer = await post(backend, PATH, input=["once", "STOP"], user="alice", priority=3, add_special_tokens=False)
    assert answer.status_code == 200
    assert [request.prompt for request in backend.requests] == [token_ids("once"), token_ids("STOP")]
    assert {(one.pooling, one.sampling.max_tokens, one.tenant, one.priority) for one in backend.requests} == {
        ("cls", 0, "alice", 3)
    }
    assert not any(request.can_resume for request in backend.requests)
    assert len({request.id for request in backend.requests}) == 2


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize(("kept", "lengths"), [(-1, [512, 3]), (2, [2, 2]), (512, [512, 3])])
async def test_long_inputs_are_cut_at_one_side(kept: int, lengths: list[int], side: str | None) -> None:
    backend = FakeBackend()
    inputs = [[*range(50, 300), *range(50, 313)], [5, 6, 7]]
    answer = await post(backend, PATH, input=inputs, truncate_prompt_tokens=kept, truncation_side=side)
    assert answer.status_code == 200, answer.text
    assert [request.prompt for request in backend.requests] == [
        tokens[-length:] if side == "left" else tokens[:length] for tokens, length in zip(inputs, lengths, strict=True)
    ]
    assert answer.json()["usage"]["prompt_tokens"] == sum(lengths)


async def test_cut_texts_keep_special_tokens() -> None:
    backend = FakeBackend()
    whole = [0, *token_ids("once upon a time")]
    for fields in ({}, {"truncation_side": "left"}, {"add_special_tokens": False}):
        await post(backend, PATH, input="once upon a time", truncate_prompt_tokens=3, **fields)
    assert [request.prompt for request in backend.requests] == [whole[:3], whole[-3:], whole[1:4]]


async def test_input_of_the_whole_context_is_accepted() -> None:
    assert (await post(FakeBackend(), PATH, input=[1] * 512)).status_code == 200


@pytest.mark.parametrize("is_normalised", [False, True])
async def test_vectors_are_normalised_if_the_model_says_so(is_normalised: bool) -> None:
    assets = tiny_assets(embedding=wire.Embedding(size=8, pooling="mean", is_normalised=is_normalised))
    backend = FakeBackend(assets=assets)
    [item] = (await post(backend, PATH, input="once", dimensions=5)).json()["data"]
    raw = struct.unpack("<8f", vector_of(backend.requests[0]))[:5]
    length = math.sqrt(sum(number**2 for number in raw)) if is_normalised else 1
    assert item["embedding"] == pytest.approx([number / length for number in raw], abs=1e-6)


@pytest.mark.parametrize("name", ["use_activation", "activation", "normalize"])
@pytest.mark.parametrize("is_normalised", [False, True])
async def test_requests_choose_the_length_of_vectors(name: str, is_normalised: bool) -> None:
    backend = FakeBackend(assets=tiny_assets(embedding=wire.Embedding(size=8, pooling="mean", is_normalised=not is_normalised)))
    [item] = (await post(backend, PATH, input="once", **{name: is_normalised})).json()["data"]
    raw = struct.unpack("<8f", vector_of(backend.requests[0]))
    length = math.hypot(*raw) if is_normalised else 1
    assert item["embedding"] == pytest.approx([number / length for number in raw], abs=1e-6)


@pytest.mark.parametrize("fields", [{"embed_dtype": "float16"}, {"endianness": "big"}, {"padding": True}], ids=str)
async def test_other_numbers_than_float32_are_refused(fields: dict[str, Any]) -> None:
    answer = await post(FakeBackend(), PATH, input="once", encoding_format="base64", **fields)
    [name] = fields
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    plain = {"embed_dtype": "float32", "endianness": "little", "padding": False}
    assert (await post(FakeBackend(), PATH, input="once", **plain)).status_code == 200


async def test_vector_of_zeros_stays_as_it_is() -> None:
    zeros = bytes(4 * EMBEDDING.size)
    answer = await post(scripted(Delta(index=0, tokens=[], finish="stop", vector=zeros)), PATH, input="once")
    assert answer.json()["data"][0]["embedding"] == [0.0] * EMBEDDING.size


@pytest.mark.parametrize(
    ("step", "status", "code"),
    [
        (FULL, 429, "queue_full"),
        (RuntimeError("a bug"), 500, "internal_error"),
        (Delta(index=0, tokens=[], finish="length"), 503, "embeddings_unavailable"),
        (BackendError(400, "context_length_exceeded", "a group has less"), 400, "context_length_exceeded"),
    ],
    ids=["refusal", "bug", "end without a vector", "shorter context"],
)
async def test_failure_of_one_input_aborts_the_others(step: Any, status: int, code: str) -> None:
    backend = FakeBackend(lambda request: [asyncio.Event() if request.prompt[-1] == 7 else step])
    answer = await post(backend, PATH, input=[[7], [8], [7]])
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert {backend.aborts.get_nowait()[-2:] for _ in range(2)} == {"-0", "-2"}


async def test_inputs_are_computed_at_once_within_a_bound() -> None:
    release = asyncio.Event()
    backend = FakeBackend(lambda request: [release, Delta(index=0, tokens=[], finish="stop", vector=vector_of(request))])
    async with client_of(backend, Limits(max_concurrent_inputs=3)) as client:
        posting = asyncio.create_task(client.post(PATH, json={"input": [[n] for n in range(2, 9)]}))
        while len(backend.requests) < 3:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(backend.requests) == 3
        release.set()
        answer = await posting
    assert len(answer.json()["data"]) == 7 == len(backend.requests)
