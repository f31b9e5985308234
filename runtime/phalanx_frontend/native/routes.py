"""The native API, with the same `Answer` as the OpenAI routes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx_api.cache_curve import HOST_SIZE_NAMES, SIZE_NAMES, CacheCurve, TierCurve
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.backend import BackendError
from phalanx_frontend.errors import ApiError, api_error_of_backend, api_error_of_validation, error_detail, invalid
from phalanx_frontend.fields import STREAMED, Text, TokenIds
from phalanx_frontend.health import HealthSource, HealthTotals
from phalanx_frontend.native.generation_format import TOKEN_IDS, GenerationFormat
from phalanx_frontend.openai.accept import cache_query, requested_model, stream_identity, wire_request
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.prompt import ReadyPrompt
from phalanx_frontend.openai.question import question_of
from phalanx_frontend.openai.routes import CurrentCaller
from phalanx_frontend.openai.sampling import build_sampling, check_fields, max_output_tokens
from phalanx_frontend.openai.schemas import CommonRequest, GenerationRequest
from phalanx_frontend.stream.answer import Answer, AnswerJob, Choice, run_while_connected
from phalanx_frontend.stream.reply import NO_ECHO, Reply
from phalanx_frontend.stream.resume import find_resumable, stream_seed
from phalanx_frontend.text.detokenize import make_detokenizer
from phalanx_frontend.tracing.gen_ai import describe_request

MAX_BATCH = 256
"""Maximum entries of a batch."""


class GenerateRequest(CommonRequest):
    """POST /v1/generate. Exactly one of `prompt` and `prompt_tokens` must be set."""

    model_config = ConfigDict(extra="forbid")

    prompt: Text | None = None
    prompt_tokens: TokenIds | None = None

    def generation(self) -> GenerationRequest:
        """Returns the fields that the OpenAI routes share."""
        return GenerationRequest.model_validate({name: getattr(self, name) for name in CommonRequest.model_fields})


class BatchRequest(BaseModel):
    """POST /v1/batch. Each entry is a body of /v1/generate without `stream`; an invalid entry fails alone."""

    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_BATCH),
        WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_BATCH, "items": {}}),
    ]


GENERATE, BATCH = "/v1/generate", "/v1/batch"


def native_routes(server: ServerContext, health_source: HealthSource) -> APIRouter:
    """Builds /v1/generate, /v1/batch and /v1/metrics."""
    routes = APIRouter(tags=["native"])

    @routes.post(GENERATE, response_model=None, responses=STREAMED)
    async def generate(body: GenerateRequest, caller: CurrentCaller) -> Answer:
        """Generates from a prompt or from token ids."""
        return await accept_native(server, body, caller, caller.request_id, server.seconds())

    @routes.post(BATCH, response_model=None)
    async def batch(body: BatchRequest, caller: CurrentCaller) -> BatchAnswer:
        """Generates for all entries concurrently. The response has their results in order."""
        arrived_s = server.seconds()
        await server.model()  # without a model the whole batch is refused
        ids = [f"{caller.request_id}-{position}" for position in range(len(body.requests))]
        entries = [
            partial(_accept_entry, server, body.requests, position=position, caller=caller, id=id, arrived_s=arrived_s)
            for position, id in enumerate(ids)
        ]
        return BatchAnswer(server, ids, entries, arrived_s)

    @routes.get("/v1/metrics")
    async def metrics() -> dict[str, Any]:
        """Counts since the start, and the memory use of each rank."""
        return metrics_document(health_source.totals(), health_source.memory(), health_source.kv_bytes_per_token())

    return routes


async def accept_native(server: ServerContext, body: GenerateRequest, caller: Caller, id: str, arrived_s: float) -> Answer:
    """Returns the answer to a valid request. Raises ApiError, BackendError."""
    model, name, adapter = await requested_model(server, body.model, caller, bool(body.stream))
    fields = body.generation()
    check_fields(fields, server.limits)
    if (body.prompt is None) == (body.prompt_tokens is None):
        raise invalid("prompt", "exactly one of prompt and prompt_tokens must be given")
    if body.prompt is not None:
        prompt = await model.encode(body.prompt, True, "prompt")
    else:
        prompt = model.checked_ids(body.prompt_tokens or [], "prompt_tokens")
    if not prompt:
        raise invalid("prompt" if body.prompt is not None else "prompt_tokens", "the prompt has no tokens")
    max_tokens = max_output_tokens(fields, len(prompt), model.assets.max_model_len, model.defaults)
    id, stream, last = stream_identity(id, caller, bool(body.stream))
    seed = stream_seed(stream, 0) if body.stream else server.random_seed()
    sampling = build_sampling(fields, max_tokens, model.defaults, model.assets.eos_token_ids, seed)
    request, resume_point = wire_request(stream, ReadyPrompt(prompt), sampling, fields, caller, adapter=adapter), None
    describe_request(caller.trace, GENERATE, name, [request])
    if last is not None:
        [(request, resume_point)] = await find_resumable(server.backend, last, [request], caller.trace)
    reply = Reply(make_detokenizer(model.tokenizer, True), sampling, fields.stop, fields.stop_token_ids or (), shown=TOKEN_IDS)
    metrics, clock = server.metrics, server.seconds
    meter = metrics.meter(name, len(prompt), max_tokens, arrived_s, clock, tenant=request.tenant, trace=caller.trace)
    format = GenerationFormat(id, arrived_s, server.seconds)
    question = partial(question_of, fields, body.prompt, model, request, prompt=ReadyPrompt(prompt))
    job = AnswerJob(
        id=id,
        stream=stream,
        choices=[
            Choice(
                request=request,
                reply=reply,
                format=format.choice(0, prompt, NO_ECHO, reply),
                meter=meter,
                resume_point=resume_point,
            )
        ],
        per_prompt=1,
        format=format,
        is_streamed=bool(body.stream),
        has_usage=False,
        has_running_usage=False,
        cache_use=server.cache_use(cache_query(fields, caller, model, [request], question)),
        trace=caller.trace,
    )
    return Answer(job, server.backend, server.metrics, GENERATE)


AcceptEntry = Callable[[], Awaitable[Answer | ApiError]]
"""Accepts an entry: returns its answer, or its error. An adapter that it waits for keeps no other entry waiting."""


class BatchAnswer(Response):
    """Response of /v1/batch: the entries' documents, in order."""

    def __init__(self, server: ServerContext, ids: list[str], entries: Sequence[AcceptEntry], arrived_s: float) -> None:
        super().__init__()
        self._server = server
        self._ids = ids
        self._entries = entries
        self._arrived_s = arrived_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response after all entries; a disconnect aborts them."""

        async def work() -> None:
            documents = map(_document_of, self._ids, self._entries)
            document = {
                "request_ids": self._ids,
                "responses": await asyncio.gather(*documents),
                "total_latency_ms": (self._server.seconds() - self._arrived_s) * 1000,
            }
            self._server.metrics.responses.labels(BATCH, "200").inc()
            await Response(orjson.dumps(document), media_type="application/json")(scope, receive, send)

        await run_while_connected(receive, work())


async def _document_of(id: str, accept: AcceptEntry) -> dict[str, Any]:
    """Returns the document of an entry, or its error."""
    try:
        entry = await accept()
        if isinstance(entry, ApiError):
            raise entry
        [document] = await entry.documents()
        return document
    except ApiError as error:
        return {"request_id": id, "error": {**error_detail(error), "status": error.status, "retry_after_s": error.retry_after_s}}


async def _accept_entry(
    server: ServerContext, entries: Sequence[object], position: int, caller: Caller, id: str, arrived_s: float
) -> Answer | ApiError:
    """Returns the answer of an entry, or its error."""
    entry = entries[position]
    if not isinstance(entry, dict):
        return invalid(f"requests[{position}]", f"requests[{position}]: must be an object, as the body of {GENERATE}")
    try:
        body = GenerateRequest.model_validate(entry)
        if body.stream:
            raise invalid("stream", "an entry of a batch cannot be streamed; leave stream out")
        return await accept_native(server, body, caller, id, arrived_s)
    except ValidationError as error:
        return api_error_of_validation(error.errors(), ())
    except BackendError as error:
        server.metrics.objectives.failed(error.status, error.code)
        return api_error_of_backend(error)
    except ApiError as error:
        return error


def _cache_document(curve: CacheCurve) -> dict[str, Any] | None:
    """Hit rates of the prefix cache with half, all, twice and four times the pages, and with the tiers; null without lookups."""
    if not curve.hit_rates:
        return None
    return {
        "lookups": curve.lookups,
        "hit_rate": dict(zip(SIZE_NAMES, curve.hit_rates, strict=True)),
        "tiers": _tiers_document(curve.tiers) if curve.tiers.hit_rates else None,
    }


def _tiers_document(tiers: TierCurve) -> dict[str, Any]:
    """Hit rates with the present tiers, null without one, and with other sizes of the host tier, whose `pages` are full size."""
    rates = dict(zip(HOST_SIZE_NAMES, tiers.hit_rates, strict=False))
    return {"host": tiers.host, "disk": tiers.disk, "pages": tiers.pages, "hit_rate": rates}


def metrics_document(totals: HealthTotals, memory: Sequence[MemoryAccount], kv_bytes_per_token: int | None) -> dict[str, Any]:
    """Returns the body of /v1/metrics. Averages are null without data."""
    return {
        "total_requests": totals.requests,
        "total_tokens_generated": totals.generated_tokens,
        "avg_latency_ms": totals.latency_s * 1000 / totals.requests if totals.requests else None,
        "avg_throughput_tokens_per_sec": totals.generated_tokens / totals.latency_s if totals.latency_s else None,
        "cache_hit_rate": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else None,
        "acceptance_rate": totals.accepted / totals.drafted if totals.drafted else None,
        "kv_bytes_per_token": kv_bytes_per_token,
        "cache": _cache_document(totals.cache_curve),
        "memory": [
            {
                "rank": account.rank,
                "weights_bytes": account.weights_bytes,
                "activations_bytes": account.activations_bytes,
                "logits_sampler_bytes": account.logits_sampler_bytes,
                "kv_pool_bytes": account.kv_pool_bytes,
                "graphs_bytes": account.graphs_bytes,
                "graphs_s": account.graphs_s,
                "kernels": account.kernels,
                "kernels_compiled": account.kernels_compiled,
                "kernels_s": account.kernels_s,
                "host_cache_bytes": account.host_cache_bytes,
                "window_tokens": account.window_tokens,
                "page_groups": account.page_groups,
                "kv_pool_tokens": account.kv_pool_tokens,
                "window_pool_bytes": account.window_pool_bytes,
                "window_pool_tokens": account.window_pool_tokens,
                "state_bytes": account.state_bytes,
                "total_bytes": account.total_bytes,
            }
            for account in memory
        ],
    }
