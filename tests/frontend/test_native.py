"""The native API over scripts: /v1/generate, /v1/batch, /v1/metrics."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_frontend.errors import MAX_MESSAGE_CHARS
from phalanx_frontend.health import HealthTotals
from phalanx_frontend.native.routes import MAX_BATCH, metrics_document
from tests.frontend.fakes import FakeBackend, eos_id, text_script, token_ids
from tests.frontend.posting import FULL
from tests.frontend.serving import served
from tests.polling import until


def client_of(backend: FakeBackend, keys: list[ApiKey] | None = None) -> httpx.AsyncClient:
    app = create_app(backend, keys=ApiKeys(keys or []))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://api-server")


async def generate(backend: FakeBackend, **fields: Any) -> httpx.Response:
    async with client_of(backend) as client:
        return await client.post("/v1/generate", json=fields, headers={"x-request-id": "mine"})


async def batch(backend: FakeBackend, *entries: Any) -> httpx.Response:
    async with client_of(backend) as client:
        return await client.post("/v1/batch", json={"requests": entries}, headers={"x-request-id": "mine"})


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_generation_answers_text_and_tokens() -> None:
    backend = FakeBackend(text_script("once upon a time"))
    answer = await generate(
        backend, prompt="the fox", max_tokens=30, temperature=0.5, top_p=0.9, priority=-2, tenant="t", deadline_ms=5
    )
    body = answer.json()
    assert (answer.status_code, body["request_id"], answer.headers["x-request-id"]) == (200, "mine", "mine")
    assert set(body) == {
        "request_id", "prompt_tokens", "generated_tokens", "text", "token_ids", "latency_ms", "throughput_tokens_per_sec",
        "finish_reason",
    }  # fmt: skip
    tokens = token_ids("once upon a time")
    assert (body["text"], body["token_ids"], body["generated_tokens"]) == ("once upon a time", tokens, len(tokens))
    assert body["prompt_tokens"] == 1 + len(token_ids("the fox")) and body["finish_reason"] == "length"
    assert body["latency_ms"] > 0
    assert body["throughput_tokens_per_sec"] == pytest.approx(len(tokens) / body["latency_ms"] * 1000)
    received = backend.requests[0]
    assert (received.sampling.max_tokens, received.sampling.temperature, received.sampling.top_p) == (30, 0.5, 0.9)
    assert (received.priority, received.tenant, received.deadline_ms) == (-2, "t", 5)


async def test_token_ids_are_a_prompt_as_they_are() -> None:
    backend = FakeBackend()
    await generate(backend, prompt_tokens=token_ids("once"))
    assert backend.requests[0].prompt == token_ids("once")


async def test_a_stream_carries_each_piece_and_then_the_whole() -> None:
    tokens = token_ids("once upon a time")
    backend = FakeBackend(
        lambda request: [
            KeepAlive(),
            Delta(index=0, tokens=tokens[:2]),
            KeepAlive(),
            Delta(index=2, tokens=tokens[2:], finish="length"),
        ]
    )
    answer = await generate(backend, prompt="x", stream=True)
    *pieces, whole = events(answer)
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == "once upon a time"
    assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"] == tokens
    assert answer.text.count(": keep-alive\n") == 2
    assert whole["finish_reason"] == "length" and {piece["request_id"] for piece in pieces} == {"mine"}


async def test_a_stop_string_cuts_text_and_tokens() -> None:
    body = (await generate(FakeBackend(text_script("once STOP here")), prompt="x", stop="STOP")).json()
    assert body["text"] == "once " and body["finish_reason"] == "stop"
    assert len(body["token_ids"]) == body["generated_tokens"] < len(token_ids("once STOP here"))


async def test_eos_is_a_token_without_text() -> None:
    backend = FakeBackend(lambda request: [Delta(index=0, tokens=[*token_ids("ab"), eos_id()], finish="stop")])
    body = (await generate(backend, prompt="x")).json()
    assert (body["text"], body["token_ids"][-1], body["finish_reason"]) == ("ab", eos_id(), "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "prompt_tokens": [1]}, "prompt"),
        ({"prompt_tokens": []}, "prompt_tokens"),
        ({"prompt_tokens": [10**6]}, "prompt_tokens"),
        ({"prompt_tokens": [-1]}, "prompt_tokens[0]"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**6}, "prompt"),
        ({"prompt": "x", "deadline_ms": 0}, "deadline_ms"),
        ({"prompt": "x", "priority": 2**40}, "priority"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "tenant": "t" * 1000}, "tenant"),
        ({"prompt": "x", "y" * 5000: 1}, "y" * 197 + "..."),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_invalid_field_is_named_in_a_small_error(fields: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    answer = await generate(backend, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(answer.content) < MAX_MESSAGE_CHARS + 500
    assert not backend.requests


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_refusal_has_status_and_retry_after(is_streamed: bool) -> None:
    answer = await generate(FakeBackend(lambda request: [FULL]), prompt="x", stream=is_streamed)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    broken = BackendError(503, "group_restarting", "gone")
    backend = FakeBackend(lambda request: [Delta(index=0, tokens=token_ids("a")), broken])
    answer = await generate(backend, prompt="x", stream=True)
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    assert (answer.status_code, last["error"]["code"]) == (200, "group_restarting")


@pytest.mark.parametrize("script", [[ValueError("bug")], [Delta(index=0, tokens=[5])]], ids=["a bug", "no end"])
async def test_unexpected_failure_is_a_500(script: list[Any]) -> None:
    answer = await generate(FakeBackend(lambda request: script), prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate", {"prompt": "x", "max_tokens": 500}),
        ("/v1/generate", {"prompt": "x", "max_tokens": 500, "stream": True}),
        ("/v1/batch", {"requests": [{"prompt": "x", "max_tokens": 500}, {"prompt": "y", "max_tokens": 500}]}),
    ],
    ids=["whole", "streamed", "batch"],
)
async def test_disconnect_aborts_the_clients_requests(path: str, body: dict[str, Any]) -> None:
    backend = FakeBackend()
    async with served(create_app(backend)) as url, httpx.AsyncClient(base_url=url) as client:
        posting = asyncio.create_task(client.post(path, json=body))
        await until(lambda: len(backend.requests) == len(body.get("requests", "1")))
        posting.cancel()
        async with asyncio.timeout(30):
            for _ in backend.requests:
                await backend.aborts.get()


# Batch


async def test_batch_keeps_order_and_invalid_entry_fails_alone() -> None:
    backend = FakeBackend()
    good = {"prompt": "once", "max_tokens": 3}
    answer = await batch(backend, good, {"prompt": 1}, "text", {**good, "stream": True}, {**good, "prompt": "the fox"})
    body = answer.json()
    assert answer.status_code == 200 and body["total_latency_ms"] > 0
    assert body["request_ids"] == [f"mine-{position}" for position in range(5)]
    assert [response["request_id"] for response in body["responses"]] == body["request_ids"]
    errors = [response.get("error", {}).get("param") for response in body["responses"]]
    assert errors == [None, "prompt", "requests[2]", "stream", None]
    assert ["error" in response for response in body["responses"]] == [False, True, True, True, False]
    assert [request.prompt[1:] for request in backend.requests] == [token_ids("once"), token_ids("the fox")]
    alone = (await generate(FakeBackend(), prompt="the fox", max_tokens=3, temperature=0)).json()
    together = (await batch(FakeBackend(), *[{"prompt": "the fox", "max_tokens": 3, "temperature": 0}] * 2)).json()
    assert [response["token_ids"] for response in together["responses"]] == [alone["token_ids"]] * 2


@pytest.mark.parametrize("entry", [5, None, "text", []], ids=repr)
async def test_an_entry_that_is_no_object_is_named(entry: object) -> None:
    error = (await batch(FakeBackend(), {"prompt": "x"}, entry)).json()["responses"][1]["error"]
    assert (error["status"], error["param"]) == (400, "requests[1]")
    assert error["message"].startswith("requests[1]: ")


async def test_refused_batch_entry_contains_its_error() -> None:
    backend = FakeBackend(lambda request: [FULL] if request.id.endswith("1") else [Delta(index=0, tokens=[5], finish="length")])
    responses = (await batch(backend, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})).json()["responses"]
    assert [response.get("finish_reason") for response in responses] == ["length", None, "length"]
    assert (responses[1]["error"]["status"], responses[1]["error"]["retry_after_s"]) == (429, 2.2)


@pytest.mark.parametrize("entries", [[], [{"prompt": "x"}] * (MAX_BATCH + 1)], ids=["none", "too many"])
async def test_a_batch_has_bounds(entries: list[Any]) -> None:
    answer = await batch(FakeBackend(), *entries)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "requests")


async def test_batch_without_model_is_refused() -> None:
    backend = FakeBackend()
    backend.current_assets = None
    assert (await batch(backend, {"prompt": "x"})).status_code == 503


async def test_a_key_bounds_the_priority_here_too() -> None:
    backend = FakeBackend()
    async with client_of(backend, [ApiKey("alice", "sk", priority=0)]) as client:
        client.headers["authorization"] = "Bearer sk"
        refused = await client.post("/v1/generate", json={"prompt": "x", "priority": -1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
        assert (await client.post("/v1/generate", json={"prompt": "x", "tenant": "bob", "max_tokens": 1})).status_code == 200
    assert [request.tenant for request in backend.requests] == ["alice"]


# Metrics


async def test_metrics_sum_and_average_ended_requests() -> None:
    backend = FakeBackend(text_script("abc", cached_tokens=1))
    num_tokens = len(token_ids("abc"))
    async with client_of(backend) as client:
        assert (await client.get("/v1/metrics")).json() == {
            "total_requests": 0, "total_tokens_generated": 0, "avg_latency_ms": None, "avg_throughput_tokens_per_sec": None,
            "cache_hit_rate": None, "acceptance_rate": None, "kv_bytes_per_token": None,
            "cache": None, "memory": []
        }  # fmt: skip
        await client.post("/v1/generate", json={"prompt": "x"})
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/v1/batch", json={"requests": [{"prompt": "x"}] * 2})
        document = (await client.get("/v1/metrics")).json()
    assert (document["total_requests"], document["total_tokens_generated"]) == (4, 4 * num_tokens)
    assert document["cache_hit_rate"] == pytest.approx(4 / (4 * 2))
    assert document["avg_throughput_tokens_per_sec"] == pytest.approx(num_tokens / document["avg_latency_ms"] * 1000)


def test_memory_is_reported_per_rank() -> None:
    accounts = [
        MemoryAccount(
            rank=rank,
            weights_bytes=10,
            activations_bytes=2,
            logits_sampler_bytes=3,
            kv_pool_bytes=50,
            kv_bytes_per_token=4,
            total_bytes=100,
            graphs_bytes=5,
            graphs_s=1.5,
            kernels=23,
            kernels_compiled=2,
            kernels_s=2.5,
            window_tokens=4096,
            page_groups="every layer has a sliding window",
            kv_pool_tokens=12,
            window_pool_bytes=20,
            window_pool_tokens=6,
            state_bytes=21,
            host_cache_bytes=7,
        )
        for rank in range(2)
    ]
    assert metrics_document(HealthTotals(drafted=8, accepted=6), (), None)["acceptance_rate"] == 0.75
    document = metrics_document(HealthTotals(), accounts, 8)
    assert document["kv_bytes_per_token"] == 8
    assert document["memory"][1] == {
        "rank": 1, "weights_bytes": 10, "activations_bytes": 2, "logits_sampler_bytes": 3, "kv_pool_bytes": 50,
        "graphs_bytes": 5, "graphs_s": 1.5, "kernels": 23, "kernels_compiled": 2, "kernels_s": 2.5,
        "window_tokens": 4096, "page_groups": "every layer has a sliding window",
        "kv_pool_tokens": 12, "window_pool_bytes": 20, "window_pool_tokens": 6, "state_bytes": 21,
        "host_cache_bytes": 7, "total_bytes": 100
    }  # fmt: skip
