"""An adapter is a model name in every request that generates or embeds."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.openai.served_model import ModelCache
from tests.frontend.fakes import FakeBackend, tiny_assets
from tests.frontend.posting import client_of
from tests.polling import until

ADAPTER = wire.Adapter("fine", "hash of fine")
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["x", "y"], "n": 2, "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/generate": {"prompt": "x", "max_tokens": 2},
    "/v1/batch": {"requests": [{"prompt": "x", "max_tokens": 2}]},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
}


def adapted() -> FakeBackend:
    return FakeBackend(assets=wire.with_adapters(tiny_assets(), [ADAPTER]))


def body_for(path: str, model: str | None) -> dict[str, Any]:
    body = dict(BODIES[path])
    if path == "/v1/batch":
        return {"requests": [{**one, "model": model} for one in body["requests"]]}
    return body if model is None else {**body, "model": model}


@pytest.mark.parametrize("path", BODIES)
async def test_an_adapter_is_chosen_by_the_model_name(path: str) -> None:
    backend = adapted()
    async with client_of(backend) as client:
        answer = await client.post(path, json=body_for(path, "fine"))
        assert answer.status_code == 200
        assert backend.requests and {request.adapter for request in backend.requests} == {ADAPTER}
        if path not in ("/v1/generate", "/v1/batch", "/v1/rerank", "/v1/score"):
            assert answer.json()["model"] == "fine"
        backend.requests.clear()
        await client.post(path, json=body_for(path, "tiny"))
        assert backend.requests and {request.adapter for request in backend.requests} == {None}


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/batch"])
async def test_unknown_names_get_404(path: str) -> None:
    backend = adapted()
    async with client_of(backend) as client:
        assert (await client.post(path, json=body_for(path, "coarse"))).status_code == 404
    assert not backend.requests


async def test_batch_entries_wait_alone_for_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, may_load = adapted(), asyncio.Event()

    async def wait_for_assets(name: str = "") -> None:
        if name == "fine":
            await may_load.wait()

    monkeypatch.setattr(backend, "wait_for_assets", wait_for_assets)
    entries = [{"prompt": "x", "max_tokens": 2, "model": model} for model in ("fine", "tiny")]
    async with client_of(backend) as client:
        answering = asyncio.create_task(client.post("/v1/batch", json={"requests": entries}))
        await until(lambda: backend.requests)
        assert [request.adapter for request in backend.requests] == [None]
        may_load.set()
        responses = (await answering).json()["responses"]
        assert [response["finish_reason"] for response in responses] == ["length", "length"]


async def test_adapters_are_listed_with_their_parent() -> None:
    async with client_of(adapted()) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            ("tiny", "tiny", None),
            ("fine", "tiny", "tiny"),
        ]
        assert (await client.get("/v1/models/fine")).json()["parent"] == "tiny"


async def test_keys_allow_adapters_by_name() -> None:
    keys = ApiKeys([ApiKey(name="user", key="sk-a", models=("fine",))])
    app = create_app(adapted(), registry=CollectorRegistry(), keys=keys)
    headers = {"authorization": "Bearer sk-a"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server", headers=headers) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["fine"]
        for name, status in (("fine", 200), ("tiny", 404)):
            assert (await client.post("/v1/completions", json=body_for("/v1/completions", name))).status_code == status


async def test_names_of_the_base_model_come_first() -> None:
    """A router may have another name for the model than the group that loaded an adapter."""
    backend = FakeBackend(assets=wire.with_adapters(tiny_assets(names=["fine"]), [ADAPTER]))
    async with client_of(backend) as client:
        assert (await client.post("/v1/completions", json=body_for("/v1/completions", "fine"))).status_code == 200
    assert {request.adapter for request in backend.requests} == {None}


async def test_assets_with_other_adapters_share_a_parsed_model() -> None:
    cache, plain = ModelCache(), tiny_assets()
    first = await cache.get(plain)
    changed = wire.with_adapters(plain, [ADAPTER])
    second = await cache.get(changed)
    assert second.tokenizer is first.tokenizer and second.assets is changed
    assert changed.content_hash != plain.content_hash == wire.with_adapters(changed, []).content_hash


async def test_series_of_removed_adapters_end() -> None:
    """Those of an adapter with a request stay until the next change after its end."""
    backend, registry, hold = FakeBackend(), CollectorRegistry(), asyncio.Event()

    def use(number: int) -> dict[str, Any]:
        backend.current_assets = wire.with_adapters(tiny_assets(), [wire.Adapter(f"fine-{number}", f"hash of {number}")])
        return body_for("/v1/completions", f"fine-{number}")

    transport = httpx.ASGITransport(create_app(backend, registry=registry))
    async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
        for number in range(5):
            assert (await client.post("/v1/completions", json=use(number))).status_code == 200
        assert models_in(registry) == {"fine-4"}
        backend.script = lambda request: [hold, Delta(index=0, tokens=[1], finish="length")]
        held = asyncio.create_task(client.post("/v1/completions", json=use(5)))
        await until(lambda: len(backend.requests) == 6 * 4)  # choices of each call
        backend.script = lambda request: [Delta(index=0, tokens=[1], finish="length")]
        assert (await client.post("/v1/completions", json=use(6))).status_code == 200
        assert models_in(registry) == {"fine-5", "fine-6"}
        hold.set()
        assert (await held).status_code == 200
        assert (await client.post("/v1/completions", json=use(7))).status_code == 200
        assert models_in(registry) == {"fine-7"}


def models_in(registry: CollectorRegistry) -> set[str]:
    """Names of models with series."""
    samples = (sample for family in registry.collect() for sample in family.samples)
    return {sample.labels["model_name"] for sample in samples if "model_name" in sample.labels}


class LoadingBackend(FakeBackend):
    """Declares an adapter and loads it once a request waits for it, unless it is refused."""

    def __init__(self, refusal: BackendError | None = None, base: wire.Assets | None = None) -> None:
        self.base = base or tiny_assets()
        super().__init__(assets=wire.with_adapters(self.base, [wire.Adapter("fine", "")]))
        self.refusal = refusal
        self.waited: list[str] = []

    async def wait_for_assets(self, name: str = "") -> None:
        if name != "fine":
            return
        self.waited.append(name)
        await asyncio.sleep(0.03)
        if self.refusal is not None:
            raise self.refusal
        self.current_assets = wire.with_adapters(self.base, [ADAPTER])


@pytest.mark.parametrize("path", BODIES)
async def test_requests_wait_until_their_adapter_is_loaded(path: str) -> None:
    backend = LoadingBackend()
    async with client_of(backend) as client:
        assert (await client.post(path, json=body_for(path, "tiny"))).status_code == 200
        assert not backend.waited
        assert (await client.post(path, json=body_for(path, "fine"))).status_code == 200
        assert backend.waited and backend.requests[-1].adapter == ADAPTER


@pytest.mark.parametrize("path", ["/v1/classify", "/v1/score"])
async def test_classifiers_wait_until_their_adapter_is_loaded(path: str) -> None:
    embedding = wire.Embedding(size=1, pooling="cls", obstacle="it is a classifier", is_encoder=True)
    base = tiny_assets(embedding=embedding, classification=wire.Classification(labels=["fits"], activation="sigmoid"))
    backend = LoadingBackend(base=base)
    async with client_of(backend) as client:
        body = {"input": "x"} if path == "/v1/classify" else BODIES[path]
        assert (await client.post(path, json={**body, "model": "fine"})).status_code == 200
    assert backend.waited and backend.requests[-1].adapter == ADAPTER


async def test_streams_stay_open_while_their_adapter_is_loaded() -> None:
    body = {"model": "fine", "prompt": "x", "max_tokens": 2, "stream": True}
    for refusal, end in ((None, "data: [DONE]"), (BackendError(400, "adapter_refused", "its rank is 64"), "its rank is 64")):
        app = create_app(LoadingBackend(refusal), keep_alive_s=0.01)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.text.startswith(": keep-alive\n") and end in answer.text


async def test_refused_adapters_answer_with_the_reason() -> None:
    backend = LoadingBackend(BackendError(400, "adapter_refused", "its rank is 64"))
    async with client_of(backend) as client:
        for stream in (False, True):
            answer = await client.post("/v1/completions", json=body_for("/v1/completions", "fine") | {"stream": stream})
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "its rank is 64")


async def test_keys_without_the_adapter_load_nothing() -> None:
    keys, backend = ApiKeys([ApiKey(name="user", key="sk-a", models=("tiny",))]), LoadingBackend()
    headers = {"authorization": "Bearer sk-a"}
    app = create_app(backend, registry=CollectorRegistry(), keys=keys)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server", headers=headers) as client:
        assert (await client.post("/v1/completions", json=body_for("/v1/completions", "fine"))).status_code == 404
    assert not backend.waited


async def test_adapters_that_no_group_has_loaded_compute_nothing() -> None:
    """Page keys and stored responses need the hash."""
    backend = FakeBackend(assets=wire.with_adapters(tiny_assets(), [wire.Adapter("fine", "")]))
    async with client_of(backend) as client:
        answer = await client.post("/v1/completions", json=body_for("/v1/completions", "fine"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_unavailable")
    assert not backend.requests
