"""The door over scripts: what its backend is asked, how failures look, what is measured."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_frontend.app import create_app, create_health_app
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_frontend.limits import Limits
from phalanx_frontend.model import KEPT_MODELS, Models
from phalanx_frontend.vitals import Health
from tests.frontend.fakes import FakeBackend, Step, eos_id, one_by_one, saying, tiny_assets, token_ids
from tests.frontend.openai_target import Target, raw_request
from tests.frontend.serving import served

FULL = BackendError(429, "queue_full", "too many requests wait", retry_after_s=2.2)
PATIENCE_S = 30


@asynccontextmanager
async def client_of(backend: FakeBackend, limits: Limits | None = None) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, limits=limits), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        yield client


async def post(backend: FakeBackend, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    async with client_of(backend) as client:
        # Written here and not by the client, which refuses to send half a character.
        body = json.dumps({"prompt": "x", **fields} if path == "/v1/completions" else fields)
        return await client.post(path, content=body, headers={"content-type": "application/json"})


def scripted(*steps: Step) -> FakeBackend:
    return FakeBackend(lambda request: steps)


def events(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


# What the backend is asked


async def test_each_request_gets_an_id_and_a_seed_of_its_own() -> None:
    backend = FakeBackend()
    for _ in range(3):
        await post(backend)
    assert len({request.id for request in backend.requests}) == 3
    assert len({request.sampling.seed for request in backend.requests}) == 3
    for request in backend.requests:
        assert request.id.startswith("cmpl-") and len(request.id) == len("cmpl-") + 32
        assert 0 <= request.sampling.seed < 2**63
        assert (request.epoch, request.delivered) == (0, [])


async def test_a_text_gets_special_tokens_and_ids_do_not() -> None:
    backend = FakeBackend()
    await post(backend, prompt="once")
    await post(backend, prompt="once", add_special_tokens=False)
    await post(backend, prompt=token_ids("once"))
    assert [request.prompt for request in backend.requests] == [[0, *token_ids("once")], token_ids("once"), token_ids("once")]


async def test_a_long_text_is_tokenised_like_a_short_one() -> None:
    backend = FakeBackend(assets=tiny_assets(max_model_len=10_000))
    await post(backend, prompt="a " * 4000)
    assert backend.requests[0].prompt == [0, *token_ids("a " * 4000)]


async def test_a_conversation_is_asked_through_its_template() -> None:
    backend = FakeBackend()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": "me"}]
    answer = await post(backend, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer.status_code == 200
    text = "<|system|>be brief\n<|user|>hi\n<|assistant|>"
    assert backend.requests[0].prompt == [0, *token_ids(text)]


async def test_a_template_hears_of_its_options() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].reasoning_content }}"
    backend = FakeBackend(assets=tiny_assets(chat_template=template))
    message = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    options = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 1}
    await post(backend, "/v1/chat/completions", messages=[message], **options)
    assert backend.requests[0].prompt == token_ids("False low hm")


async def test_the_model_s_own_sampling_is_the_default() -> None:
    backend = FakeBackend(assets=tiny_assets(generation_config={"temperature": 0.5, "top_k": 7}))
    await post(backend)
    assert (backend.requests[0].sampling.temperature, backend.requests[0].sampling.top_k) == (0.5, 7)
    assert backend.requests[0].sampling.stop_token_ids == [eos_id()]


# What the client gets


async def test_tokens_that_come_together_leave_together() -> None:
    tokens = token_ids("once upon a time")
    answer = await post(scripted(Delta(0, tokens[:2]), Delta(2, tokens[2:], "length")), stream=True)
    texts = [json.loads(event)["choices"][0]["text"] for event in events(answer)[:-1]]
    assert len(texts) == 2 and "".join(texts) == "once upon a time"


async def test_a_piece_that_waits_for_its_rest_sends_nothing() -> None:
    fox = token_ids("🦊")
    answer = await post(scripted(*one_by_one(fox, "length")), stream=True)
    assert len(fox) > 1
    assert [json.loads(event)["choices"][0]["text"] for event in events(answer)[:-1]] == ["🦊"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_counts_what_was_cached_and_generated(path: str) -> None:
    backend = FakeBackend(lambda request: one_by_one([*token_ids("ab"), eos_id()], "stop", cached_tokens=4))
    fields = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    whole = (await post(backend, path, **fields)).json()
    streamed = await post(backend, path, **fields, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(event) for event in events(streamed)[:-1]]
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["completion_tokens"] == 3
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 3
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_a_kept_alive_stream_carries_comments() -> None:
    backend = scripted(KeepAlive(), Delta(0, token_ids("a")), KeepAlive(), Delta(1, token_ids("b"), "length"))
    streamed = await post(backend, stream=True)
    assert streamed.text.count(": keep-alive\n\n") == 2 and streamed.text.startswith(": keep-alive\n\n")
    assert (await post(backend)).json()["choices"][0]["text"] == "ab"


async def test_a_stop_string_aborts_the_rest() -> None:
    backend = FakeBackend(saying("once upon a time"))
    answer = (await post(backend, stop=" time", max_tokens=50)).json()
    assert answer["choices"][0] == {
        "index": 0, "text": "once upon a", "logprobs": None, "finish_reason": "stop", "stop_reason": " time"
    }  # fmt: skip
    assert backend.aborts.empty(), "the stop string was complete with the last token"
    assert (await post(backend, stop="upon", stream=True)).status_code == 200
    assert await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) == backend.requests[1].id


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("has_begun", [False, True], ids=["before the first token", "after it"])
async def test_a_client_that_leaves_aborts_its_request(is_streamed: bool, has_begun: bool) -> None:
    reached = asyncio.Event()

    def script(request: wire.Request) -> Sequence[Step]:
        reached.set()
        return [*([Delta(0, token_ids("a"))] if has_begun else []), asyncio.Event()]

    backend = FakeBackend(script)
    async with served(create_app(backend)) as url:
        async with raw_request(Target(url, "tiny"), {"stream": is_streamed}):
            await asyncio.wait_for(reached.wait(), PATIENCE_S)
        assert await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) == backend.requests[0].id


async def test_a_finished_request_is_not_aborted() -> None:
    backend = FakeBackend()
    await post(backend)
    await post(backend, stream=True)
    assert backend.aborts.empty()


# Failures


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_refusal_before_the_first_token_has_its_status(is_streamed: bool) -> None:
    answer = await post(scripted(FULL), stream=is_streamed)
    assert answer.status_code == 429
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2200")
    assert answer.json()["error"] == {
        "message": "too many requests wait", "type": "rate_limit_error", "param": None, "code": "queue_full"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([Delta(0, token_ids("a")), FULL], "queue_full"),
        ([Delta(0, token_ids("a")), RuntimeError("a bug")], "internal_error"),
        ([Delta(0, token_ids("a"))], "internal_error"),
        ([Delta(0, token_ids("a")), Delta(2, token_ids("b"), "length")], "internal_error"),
        ([KeepAlive(), FULL], "queue_full"),
    ],
    ids=["refusal", "bug", "end without a reason", "a token is missing", "refusal after a comment"],
)
async def test_a_failure_after_the_first_byte_is_the_last_event(steps: list[Step], code: str) -> None:
    answer = await post(scripted(*steps), stream=True)
    assert answer.status_code == 200
    assert json.loads(events(answer)[-1])["error"]["code"] == code


async def test_a_bug_of_the_backend_is_a_500() -> None:
    answer = await post(scripted(Delta(0, token_ids("a")), RuntimeError("a bug")))
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_a_bug_outside_the_answer_is_a_500_too() -> None:
    class Broken(FakeBackend):
        def assets(self) -> wire.Assets:
            raise RuntimeError("a bug")

    answer = await post(Broken())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
    ids=lambda value: str(value),
)
async def test_a_bad_field_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    answer = await post(backend, path, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not backend.requests


@pytest.mark.parametrize(
    ("template", "code"),
    [(None, "no_chat_template"), ("{% if %}", "no_chat_template"), ("{{ raise_exception('no') }}", None), ("", None)],
    ids=["none", "broken", "refuses", "empty prompt"],
)
async def test_a_conversation_without_a_working_template_is_refused(template: str | None, code: str | None) -> None:
    backend = FakeBackend(assets=tiny_assets(chat_template=template))
    answer = await post(backend, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_a_body_over_the_limit_is_refused() -> None:
    async with client_of(FakeBackend(), Limits(max_body_bytes=100)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x" * 100})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize(
    "content", ["prompt=x", '{"prompt": "x"}', "\xff", ""], ids=["form", "JSON as text", "no text", "nothing"]
)
async def test_a_body_that_is_no_json_is_refused(content: str) -> None:
    async with client_of(FakeBackend()) as client:
        answer = await client.post("/v1/completions", content=content.encode("latin-1"), headers={"content-type": "text/plain"})
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
        broken = await client.post("/v1/completions", content=b"\xff", headers={"content-type": "application/json"})
        assert broken.status_code == 400


# The model, health, metrics


async def test_without_a_model_nothing_is_served_and_the_reason_is_told() -> None:
    backend = FakeBackend(not_ready="no group serves")
    backend.current_assets = None
    async with client_of(backend) as client:
        for path in ("/v1/completions", "/v1/models", "/readyz"):
            answer = await (client.post(path, json={"prompt": "x"}) if "compl" in path else client.get(path))
            assert answer.status_code == 503
        assert (await client.get("/readyz")).json()["error"]["message"] == "no group serves"
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/v1/models")).headers["retry-after"] == "2"


async def test_a_model_that_cannot_be_read_is_not_ready() -> None:
    async with client_of(FakeBackend(assets=tiny_assets(without=["tokenizer.json"]))) as client:
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_broken")


async def test_a_backend_may_be_ready_before_it_knows_a_model() -> None:
    backend = FakeBackend()
    backend.current_assets = None
    async with client_of(backend) as client:
        assert (await client.get("/readyz")).status_code == 200


async def test_the_door_follows_the_model_that_is_served() -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        assert (await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).json()["model"] == "tiny"
        backend.current_assets = tiny_assets(names=["org/next", "next"])
        gone = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.post("/v1/completions", json={"prompt": "x"})).json()["model"] == "org/next"
        assert (await client.post("/v1/completions", json={"model": "next", "prompt": "x"})).json()["model"] == "next"
        assert (await client.get("/v1/models/org/next")).json()["id"] == "org/next"
        assert (await client.get("/v1/models/tiny")).status_code == 404
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["org/next", "next"]


async def test_a_model_is_loaded_once_and_the_longest_unused_is_forgotten() -> None:
    models = Models()
    every = [tiny_assets(names=[f"m{number}"]) for number in range(KEPT_MODELS + 1)]
    first, again = await asyncio.gather(models.get(every[0]), models.get(every[0]))
    assert first is again
    for assets in every[1:KEPT_MODELS]:
        await models.get(assets)
    await models.get(every[0])
    await models.get(every[KEPT_MODELS])
    assert await models.get(every[0]) is first


async def test_tokens_and_text_are_told_both_ways() -> None:
    async with client_of(FakeBackend()) as client:
        told = (await client.post("/tokenize", json={"prompt": "once upon", "return_token_strs": True})).json()
        assert told["tokens"] == [0, *token_ids("once upon")] and told["max_model_len"] == 512
        assert told["token_strs"][0] == "<bos>" and told["count"] == len(told["tokens"])
        assert (await client.post("/detokenize", json={"tokens": told["tokens"]})).json() == {"prompt": "<bos>once upon"}
        chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        assert chat["tokens"] == [0, *token_ids("<|user|>hi\n<|assistant|>")] and chat["token_strs"] is None


@pytest.mark.parametrize("prefix", ["phalanx", "phalanx_router"])
async def test_metrics_count_exactly_under_the_caller_s_prefix(prefix: str) -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    backend = FakeBackend(saying("abc", cached_tokens=1))
    num_tokens = len(token_ids("abc"))
    transport = httpx.ASGITransport(create_app(backend, registry=registry, metrics_prefix=prefix))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        for is_streamed in (False, True):
            await client.post("/v1/completions", json={"prompt": "x", "stream": is_streamed})
        backend.script = lambda request: [FULL]
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/v1/completions", json={"prompt": 1})
        await client.get("/nothing")
        told = (await client.get("/metrics")).text
    model = {"model_name": "tiny"}
    assert value(f"{prefix}_requests_finished_total", **model, finished_reason="length") == 2
    assert value(f"{prefix}_requests_finished_total", **model, finished_reason="error") == 1
    assert value(f"{prefix}_prompt_tokens_total", **model) == 3 * 2
    assert value(f"{prefix}_generation_tokens_total", **model) == 2 * num_tokens
    assert value(f"{prefix}_prompt_tokens_cached_total", **model) == 2
    assert value(f"{prefix}_time_to_first_token_seconds_count", **model) == 2
    assert value(f"{prefix}_inter_token_latency_seconds_count", **model) == 2 * (num_tokens - 1)
    assert value(f"{prefix}_request_duration_seconds_count", **model) == 3
    assert value(f"{prefix}_request_duration_seconds_bucket", **model, le="+Inf") == 3
    assert value(f"{prefix}_requests_in_progress", **model) == 0
    for route, status, count in (("/v1/completions", "200", 2), ("/v1/completions", "429", 1), ("/v1/completions", "400", 1)):
        assert value(f"{prefix}_http_responses_total", route=route, status=status) == count
    assert value(f"{prefix}_http_responses_total", route="unknown", status="404") == 1
    assert f'{prefix}_requests_finished_total{{finished_reason="length",model_name="tiny"}} 2.0' in told
    families = [line.split()[2] for line in told.splitlines() if line.startswith("# TYPE")]
    assert families and all(family.startswith(f"{prefix}_") for family in families)


async def test_a_pod_without_a_door_has_its_health() -> None:
    reason: list[str | None] = ["ranks load"]
    app = create_health_app(lambda: Health(not_ready=reason[0]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pod") as client:
        assert (await client.get("/readyz")).status_code == 503
        reason[0] = None
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/v1/completions", json={})).status_code == 404


def test_the_door_never_imports_torch_or_transformers() -> None:
    code = "import sys, phalanx_frontend.app; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / folder) for folder in ("crds", "runtime"))
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


@pytest.mark.parametrize("prompt", [[1, 40], "Once upon a time"], ids=["ids", "text"])
async def test_a_token_without_an_embedding_is_refused_before_it_reaches_a_rank(prompt: Any) -> None:
    backend = FakeBackend(assets=tiny_assets(vocab_size=2))
    response = await post(backend, prompt=prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert not backend.requests


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": [2**70]}, {"stop_token_ids": [1] * 129}, {"top_k": 2**70}],
    ids=["stop id too large", "too many stop ids", "top_k too large"],
)
async def test_numbers_that_no_frame_can_carry_are_refused(fields: dict[str, Any]) -> None:
    backend = FakeBackend()
    response = await post(backend, **fields)
    assert (response.status_code, response.json()["error"]["param"].partition("[")[0]) == (400, next(iter(fields)))
    assert not backend.requests
