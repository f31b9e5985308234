"""The API server and its model: assets, health, tokenization, metrics."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_frontend.app import create_app, create_health_app
from phalanx_frontend.health import Health
from phalanx_frontend.limits import Limits
from phalanx_frontend.metrics import ApiMetrics, response_counter
from phalanx_frontend.objectives import ObjectiveCounter
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.routes import model_card
from phalanx_frontend.openai.served_model import MAX_CACHED_MODELS, ModelCache, load_model
from phalanx_frontend.stream.response_cache import NoResponseCache
from phalanx_frontend.text.tokenizer import RecentEncodings
from tests.frontend.fakes import (
    CHAT_TEMPLATE,
    FakeBackend,
    text_script,
    tiny_assets,
    tiny_tokenizer,
    tiny_tokenizer_json,
    token_ids,
)
from tests.frontend.posting import FULL, client_of
from tests.polling import until


async def test_missing_model_is_reported_with_the_reason() -> None:
    backend = FakeBackend(not_ready="no group serves")
    backend.current_assets = None
    async with client_of(backend) as client:
        for path in ("/v1/completions", "/v1/models", "/readyz"):
            answer = await (client.post(path, json={"prompt": "x"}) if "compl" in path else client.get(path))
            assert answer.status_code == 503
        error = (await client.get("/readyz")).json()["error"]
        assert (error["code"], error["message"]) == ("not_ready", "no group serves")
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/v1/models")).headers["retry-after"] == "2"


async def test_a_model_that_cannot_be_read_is_not_ready() -> None:
    async with client_of(FakeBackend(assets=tiny_assets(without=["tokenizer.json"]))) as client:
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_broken")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", b"{", "Expecting"),
        ("tokenizer.json", b"{}", "Model missing"),
        ("tokenizer.json", b"[" * 100_000, "recursion"),
        ("tokenizer.json", tiny_tokenizer_json().replace(b'"version": "1.0"', b'"version": "\xff"'), "utf-8"),
        ("tokenizer.json", tiny_tokenizer_json().replace(b'"merges": [', b'"merges": 5, "x": ['), "untagged"),
        ("generation_config.json", b"[]", "must have a JSON object"),
        ("generation_config.json", b'{"temperature": "hot"}', "temperature"),
        ("generation_config.json", b'{"temperature": NaN}', "temperature"),
        ("generation_config.json", b'{"top_k": 1e400}', "top_k"),
        ("generation_config.json", b'{"max_new_tokens": "many"}', "max_tokens"),
    ],
)
async def test_model_with_a_broken_file_names_it(name: str, content: bytes, why: str) -> None:
    whole = tiny_assets()
    assets = wire.make_assets({**whole.files, name: content}, ["tiny"], 512, [1], None)
    async with client_of(FakeBackend(assets=assets)) as client:
        answer = await client.get("/readyz")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "model_broken")
    assert f"the model's {name} cannot be read" in error["message"] and why in error["message"]


async def test_backend_may_be_ready_without_a_model() -> None:
    backend = FakeBackend()
    backend.current_assets = None
    async with client_of(backend) as client:
        assert (await client.get("/readyz")).status_code == 200


async def test_api_server_follows_the_served_model() -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        assert (await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).json()["model"] == "tiny"
        backend.current_assets = tiny_assets(names=["org/next", "next"])
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.post("/v1/completions", json={"prompt": "x"})).json()["model"] == "org/next"
        assert (await client.post("/v1/completions", json={"model": "next", "prompt": "x"})).json()["model"] == "next"
        assert (await client.get("/v1/models/org/next")).json()["id"] == "org/next"
        assert (await client.get("/v1/models/tiny")).status_code == 404
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["org/next", "next"]


async def test_model_created_time_is_its_first_appearance() -> None:
    backend, times = FakeBackend(), iter(range(100, 200))
    registry = CollectorRegistry()
    metrics = ApiMetrics(registry, response_counter(registry, "phalanx"), "phalanx", ObjectiveCounter(registry, "phalanx"))
    server = ServerContext(backend=backend, metrics=metrics, limits=Limits(), unix_s=lambda: next(times))
    first, again = model_card(server, server.assets(), "tiny"), model_card(server, (await server.model()).assets, "tiny")
    assert first["created"] == again["created"] == 100
    backend.current_assets = tiny_assets(names=["next"])
    await server.warm()
    assert model_card(server, server.assets(), "next")["created"] == 101


async def test_tokens_of_messages_count_their_tools() -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city"}}
    template = CHAT_TEMPLATE + "{% for tool in tools %}<tool_call>{{ tool | tojson }}</tool_call>{% endfor %}"
    body = {"messages": [{"role": "user", "content": "once"}]}
    backend = FakeBackend(assets=tiny_assets(chat_template=template))
    async with client_of(backend) as client:
        bare = (await client.post("/tokenize", json=body)).json()["tokens"]
        tokenized = (await client.post("/tokenize", json={**body, "tools": [tool]})).json()["tokens"]
        await client.post("/v1/chat/completions", json={**body, "tools": [tool], "max_tokens": 1})
        assert backend.requests[0].prompt == tokenized and len(tokenized) > len(bare)
        twice = await client.post("/tokenize", json={**body, "tools": [tool, tool]})
        assert (twice.status_code, twice.json()["error"]["param"]) == (400, "tools[1].function.name")
        alone = await client.post("/tokenize", json={"prompt": "once", "tools": [tool]})
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": [{"type": "refusal", "refusal": "I will not"}]}, "I will not"),
        ({"content": None, "refusal": "I will not"}, ""),
        ({"content": "yes", "refusal": None}, "yes"),
    ],
    ids=["part", "field", "null"],
)
async def test_past_refusal_is_text_or_ignored(message: dict[str, object], shown: str) -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        messages = [{"role": "user", "content": "once"}, {"role": "assistant", **message}]
        answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200
        broken = {"role": "assistant", "content": [{"type": "refusal", "text": "I will not"}]}
        assert (await client.post("/v1/chat/completions", json={"messages": [broken]})).status_code == 400
    assert tiny_tokenizer().decode(backend.requests[0].prompt).endswith(f"<|assistant|>{shown}\n<|assistant|>")


async def test_models_load_once_and_least_recent_is_evicted() -> None:
    models = ModelCache()
    every = [tiny_assets(names=[f"m{number}"]) for number in range(MAX_CACHED_MODELS + 1)]
    first, again = await asyncio.gather(models.get(every[0]), models.get(every[0]))
    assert first is again
    for assets in every[1:MAX_CACHED_MODELS]:
        await models.get(assets)
    await models.get(every[0])
    await models.get(every[MAX_CACHED_MODELS])
    assert await models.get(every[0]) is first


async def test_recent_texts_are_recalled_for_their_owner() -> None:
    model, text = load_model(tiny_assets()), "once upon a time " * 100
    recent = RecentEncodings(max_bytes=200_000)
    first, second = (model.recalling(recent, *owner) for owner in (("team", "a b"), ("team a", "b")))
    expected = await model.encode(text, True, "prompt")
    assert [await first.encode(text, True, "prompt") for _ in range(2)] == [expected] * 2 and len(recent) == 1
    assert await second.encode(text, True, "prompt") == expected and len(recent) == 2, "another tenant learns nothing of its time"
    assert await first.encode(text[:100], True, "prompt") == await model.encode(text[:100], True, "prompt") and len(recent) == 2
    for number in range(50):
        await first.encode(f"{text} {number}", True, "prompt")
    assert 0 < recent.num_bytes <= 200_000 and len(recent) < 50
    recent.clear()
    assert (recent.num_bytes, len(recent)) == (0, 0)


async def test_texts_are_kept_unless_a_request_forbids_it() -> None:
    class Enabled(NoResponseCache):
        is_enabled, encodings = True, RecentEncodings()

    cache, body = Enabled(), {"prompt": "once upon a time " * 40, "max_tokens": 1}
    transport = httpx.ASGITransport(create_app(FakeBackend(text_script("a")), cache=cache))
    async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
        kept = []
        for fields, headers in (({"cache": "no-store"}, {}), ({}, {"cache-control": "no-store"}), ({}, {})):
            answer = await client.post("/v1/completions", json=body | fields, headers=headers)
            kept.append((answer.status_code, len(cache.encodings)))
    assert kept == [(200, 0), (200, 0), (200, 1)]


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with client_of(FakeBackend()) as client:
        tokenized = (await client.post("/tokenize", json={"prompt": "once upon", "return_token_strs": True})).json()
        assert tokenized["tokens"] == [0, *token_ids("once upon")] and tokenized["max_model_len"] == 512
        assert tokenized["token_strs"][0] == "<bos>" and tokenized["count"] == len(tokenized["tokens"])
        assert (await client.post("/detokenize", json={"tokens": tokenized["tokens"]})).json() == {"prompt": "<bos>once upon"}
        chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        assert chat["tokens"] == [0, *token_ids("<|user|>hi\n<|assistant|>")] and chat["token_strs"] is None


@pytest.mark.parametrize("prefix", ["phalanx", "phalanx_router"])
async def test_metrics_count_exactly_under_the_caller_s_prefix(prefix: str) -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    backend = FakeBackend(text_script("abc", cached_tokens=1))
    num_tokens = len(token_ids("abc"))
    transport = httpx.ASGITransport(create_app(backend, registry=registry, metrics_prefix=prefix))
    async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
        for is_streamed in (False, True):
            await client.post("/v1/completions", json={"prompt": "x", "stream": is_streamed})
        backend.script = lambda request: [FULL]
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/v1/completions", json={"prompt": 1})
        await client.get("/nothing")
        page = (await client.get("/metrics")).text
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
    assert f'{prefix}_requests_finished_total{{finished_reason="length",model_name="tiny"}} 2.0' in page
    families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert families and all(family.startswith(f"{prefix}_") for family in families)


async def test_tokens_of_open_requests_are_counted() -> None:
    """A rate over whole requests would show nothing of a long answer, and then all of it at once."""
    registry, backend = CollectorRegistry(), FakeBackend()
    transport = httpx.ASGITransport(create_app(backend, registry=registry))
    async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
        posting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 201}))
        await until(lambda: registry.get_sample_value("phalanx_generation_tokens_total", {"model_name": "tiny"}) == 5)
        assert registry.get_sample_value("phalanx_requests_in_progress", {"model_name": "tiny"}) == 1
        posting.cancel()
        await asyncio.wait_for(backend.aborts.get(), 30)
        assert registry.get_sample_value("phalanx_generation_tokens_total", {"model_name": "tiny"}) == 5, "not twice"


async def test_worker_pod_reports_health() -> None:
    reason: list[str | None] = ["ranks load"]
    app = create_health_app(lambda: Health(not_ready=reason[0]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pod") as client:
        assert (await client.get("/readyz")).status_code == 503
        reason[0] = None
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/v1/completions", json={})).status_code == 404


def test_api_server_never_imports_torch_or_transformers() -> None:
    code = "import sys, phalanx_frontend.app; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / folder) for folder in ("crds", "runtime"))
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr
