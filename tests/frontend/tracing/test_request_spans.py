"""The span of an HTTP request: what it describes, and which request has one."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.trace import Trace
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import BackendError, Delta, KeepAlive, ResumableStream
from phalanx_frontend.logs import JsonFormatter
from phalanx_frontend.tracing.tracer import SamplingRules, Tracer
from tests.frontend.fakes import FakeBackend, text_script, tiny_assets, token_deltas, token_ids, vector_of
from tests.frontend.posting import FULL, scripted
from tests.frontend.tool_chat import TOOLS_TEMPLATE
from tests.frontend.tracing.span_list import SpanList
from tests.polling import until

LEAVING = BackendError(503, "router_leaving", "the router shuts down", can_resume=True)
COMPLETION = {"prompt": "a secret", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9}
BEGAN = Trace(trace_id="a" * 32, span_id="b" * 16, arrived_s=1.0, is_sampled=True)


class Spans(SpanList):
    """The spans of an API server that traces each request."""

    @asynccontextmanager
    async def client(
        self, backend: FakeBackend, ratio: float = 1.0, keys: ApiKeys | None = None
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(backend, keys=keys or ApiKeys(()), tracer=Tracer(self, SamplingRules(ratio)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
            yield client


async def test_span_describes_request_and_response_without_text() -> None:
    spans = Spans()
    async with spans.client(FakeBackend(text_script("hidden"))) as client:
        answer = await client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "r1"})
    [span] = spans.spans
    model, usage = answer.json()["model"], answer.json()["usage"]
    assert (span.name, span.kind, span.error) == (f"text_completion {model}", "server", "")
    assert answer.headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert {name: value for name, value in span.attributes.items() if name != "phalanx.time_to_first_token"} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "phalanx",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": ["length"],
        "phalanx.request_id": "r1",
        "http.request.method": "POST",
        "http.response.status_code": 200,
    }


async def test_span_of_a_batch_sums_its_entries() -> None:
    spans = Spans()
    entries = [{"prompt": f"prompt {number}", "max_tokens": 5, "temperature": number / 10} for number in range(3)]
    async with spans.client(FakeBackend(text_script("hidden"))) as client:
        answer = await client.post("/v1/batch", json={"requests": [*entries, {"prompt": 1}]})
    [span] = spans.spans
    used = answer.json()["responses"][:3]
    assert {name: value for name, value in span.attributes.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "phalanx",
        "gen_ai.request.model": span.name.removeprefix("text_completion "),
        "gen_ai.request.choice.count": 3,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": sum(entry["prompt_tokens"] for entry in used),
        "gen_ai.usage.output_tokens": sum(entry["generated_tokens"] for entry in used),
        "gen_ai.response.finish_reasons": ["length"] * 3,
    }, "the temperatures differ, and one entry is invalid"


async def test_span_in_the_background_ends_with_its_response() -> None:
    spans, gate = Spans(), asyncio.Event()
    backend = FakeBackend(
        lambda request: [gate, *token_deltas(token_ids("a b"), "stop")], tiny_assets(chat_template=TOOLS_TEMPLATE)
    )
    async with spans.client(backend) as client:
        id = (await client.post("/v1/responses", json={"input": "x", "background": True})).json()["id"]
        assert not spans.spans
        gate.set()
        await until(lambda: bool(spans.spans))
        usage = (await client.get(f"/v1/responses/{id}")).json()["usage"]
    [span] = spans.spans
    counted = [span.attributes[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens")]
    assert counted == [usage["input_tokens"], usage["output_tokens"]] and span.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize("is_streamed", [False, True], ids=["polled", "streamed"])
async def test_background_response_of_a_leaving_router_has_its_span(is_streamed: bool) -> None:
    """No client resumes it at another router, as one could a stream that ends in the same way."""
    spans, assets = Spans(), tiny_assets(chat_template=TOOLS_TEMPLATE)
    backend = FakeBackend(lambda request: [Delta(index=0, tokens=token_ids("a")), LEAVING], assets)
    async with spans.client(backend) as client:
        body = {"input": "x", "background": True, "stream": is_streamed}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        await until(lambda: bool(spans.spans))
    [span] = spans.spans
    assert (span.error, span.attributes["error.type"]) == ("router_leaving", "router_leaving")


async def test_refusal_by_load_is_described_and_not_exported() -> None:
    spans = Spans()
    async with spans.client(scripted(FULL), ratio=0.0) as client:
        await client.post("/v1/completions", json=COMPLETION)
    assert not spans.spans
    async with spans.client(scripted(FULL)) as client:
        await client.post("/v1/completions", json=COMPLETION)
    [span] = spans.spans
    assert (span.attributes["error.type"], span.attributes["http.response.status_code"], span.error) == ("queue_full", 429, "")


async def test_failure_of_the_server_is_exported() -> None:
    spans = Spans()
    async with spans.client(scripted(RuntimeError("a bug")), ratio=0.0) as client:
        await client.post("/v1/completions", json=COMPLETION)
    [span] = spans.spans
    assert (span.error, span.attributes["error.type"]) == ("internal_error", "internal_error")


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_request_that_no_client_resumes_has_its_span(is_streamed: bool) -> None:
    spans = Spans()
    async with spans.client(scripted(LEAVING)) as client:
        assert (await client.post("/v1/completions", json={**COMPLETION, "stream": is_streamed})).status_code == 503
    [span] = spans.spans
    assert span.error == "router_leaving"


async def test_stream_that_can_be_resumed_leaves_its_span() -> None:
    spans = Spans()
    async with spans.client(scripted(Delta(index=0, tokens=token_ids("a")), LEAVING)) as client:
        assert (await client.post("/v1/completions", json={**COMPLETION, "stream": True})).status_code == 200
    assert not spans.spans


async def test_refused_resume_leaves_the_trace_of_its_stream() -> None:
    backend, spans = FakeBackend(text_script("abc"), tiny_assets()), Spans()
    async with spans.client(backend) as client:
        whole = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
        last = next(line for line in whole.text.splitlines() if line.startswith("id: ")).removeprefix("id: ")
        known = msgspec.structs.replace(backend.requests[0], delivered=token_ids("abc")[:1], trace=BEGAN)
        backend.resumable = {known.id: ResumableStream(known, has_lost_router=True)}
        changed = {**COMPLETION, "stream": True, "max_tokens": 4}
        assert (await client.post("/v1/completions", json=changed, headers={"last-event-id": last})).status_code == 400
    assert BEGAN.span_id not in {span.span_id for span in spans.spans} and BEGAN.trace_id not in {s.trace_id for s in spans.spans}


async def test_request_without_a_key_is_not_traced() -> None:
    spans = Spans()
    sampled = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    async with spans.client(scripted(FULL), keys=ApiKeys([ApiKey("alice", "sk-1")])) as client:
        refused = await client.post("/v1/completions", json=COMPLETION, headers=sampled)
        assert (refused.status_code, "traceparent" in refused.headers, spans.spans) == (401, False, [])
        await client.post("/v1/completions", json=COMPLETION, headers=sampled | {"authorization": "Bearer sk-1"})
    assert [span.trace_id for span in spans.spans] == ["a" * 32]


async def test_span_of_embeddings_has_tokens_and_id() -> None:
    spans, backend = Spans(), FakeBackend(lambda request: [Delta(index=0, tokens=[], finish="stop", vector=vector_of(request))])
    async with spans.client(backend) as client:
        answer = await client.post("/v1/embeddings", json={"input": ["a", "bc"]}, headers={"x-request-id": "r1"})
    [span] = spans.spans
    assert span.name == "embeddings tiny" and span.attributes["gen_ai.response.id"] == "embd-r1"
    assert span.attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]


async def test_error_of_embeddings_has_its_code() -> None:
    spans = Spans()
    async with spans.client(scripted(LEAVING), ratio=0.0) as client:
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 503
    [span] = spans.spans
    assert (span.error, span.attributes["error.type"]) == ("router_leaving", "router_leaving")


class Lines(logging.Handler):
    """The lines of the API server's loggers."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(JsonFormatter().format(record)))


class LoggingBackend(FakeBackend):
    """Logs a line for each request."""

    async def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        logging.getLogger("phalanx_frontend").info("computing")
        async for item in super().generate(request):
            yield item


async def test_lines_of_a_traced_request_have_its_trace_id() -> None:
    spans, handler, logger = Spans(), Lines(), logging.getLogger("phalanx_frontend")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with spans.client(LoggingBackend(text_script("hi"))) as client:
            await client.post("/v1/completions", json=COMPLETION)
            await client.get("/v1/models")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    [span] = spans.spans
    ids = [(line["message"], line.get("trace_id")) for line in handler.lines]
    assert ids == [("computing", span.trace_id), ("request ended", span.trace_id), ("request ended", None)]
