"""POST /v1/embeddings, and what other endpoints compute of embeddings: each input is a pooled request of its own."""

import asyncio
import base64
import logging
import math
import sys
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.backend import Backend, BackendError, Delta
from phalanx_frontend.errors import ApiError, api_error_of_backend, error_response, internal_error, invalid
from phalanx_frontend.metrics import ApiMetrics, RequestMeter
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.embedding.inputs import TokenizedInput, pooled_requests, tokenized_inputs
from phalanx_frontend.openai.sampling import refuse_unsupported
from phalanx_frontend.openai.schemas import EmbeddingRequest, PooledRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.stream.answer import run_while_connected
from phalanx_frontend.tracing.gen_ai import describe_error, describe_request, describe_response
from phalanx_frontend.tracing.tracer import RequestTrace

log = logging.getLogger(__name__)

ROUTE = "/v1/embeddings"
Vector: TypeAlias = "array[float]"  # not subscriptable before Python 3.12
Tokenize: TypeAlias = Callable[[], Awaitable[Sequence[TokenizedInput]]]


@dataclass(frozen=True, slots=True)
class EmbeddingEndpoint:
    """Differences between endpoints that embed. `field`: of the inputs, in errors."""

    route: str
    id_prefix: str
    field: str
    document: Callable[["EmbeddingJob", Sequence[Vector]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class VectorForm:
    """What becomes of the states of a model."""

    pooling: wire.Pooling
    size: int
    """Numbers of each vector."""
    is_normalised: bool = False
    is_base64: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """The inputs of one answer and the form of their vectors."""

    endpoint: EmbeddingEndpoint
    id: str
    model: str
    requests: Sequence[wire.Request]
    meters: Sequence[RequestMeter]
    form: VectorForm
    requests_per_input: int
    max_concurrent: int
    trace: RequestTrace | None = None

    def document(self, vectors: Sequence[bytes]) -> bytes:
        """Returns the endpoint's response. Raises ApiError 500 for numbers that are not finite."""
        numbers = [shaped(vector, self.form.size, self.form.is_normalised) for vector in vectors]
        if not all(math.isfinite(sum(vector)) for vector in numbers):
            log.error("an embedding has numbers that are not finite", extra={"request_id": self.id})
            raise internal_error()
        return msgspec.json.encode({**self.endpoint.document(self, numbers), "model": self.model})

    def usage(self) -> dict[str, int]:
        """Returns token counts over all inputs."""
        count = sum(len(request.prompt) for request in self.requests[:: self.requests_per_input])
        return {"prompt_tokens": count, "total_tokens": count}


def embedding_list(job: EmbeddingJob, vectors: Sequence[Vector]) -> dict[str, Any]:
    """Returns OpenAI's response."""

    def shown(vector: Vector) -> str | list[float]:
        return base64.b64encode(_little_endian(vector).tobytes()).decode("ascii") if job.form.is_base64 else vector.tolist()

    data = [{"object": "embedding", "index": index, "embedding": shown(vector)} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "usage": job.usage()}


EMBEDDINGS = EmbeddingEndpoint(ROUTE, "embd-", "input", embedding_list)


def shaped(vector: bytes, size: int, is_normalised: bool) -> Vector:
    """Returns the first `size` numbers of `wire.Finished.vector` as float32, to length 1 if normalised."""
    numbers = array("f", vector[: 4 * size])
    numbers = _little_endian(numbers)
    length = math.sqrt(math.fsum(number * number for number in numbers)) if is_normalised else 1.0
    return numbers if length in (0.0, 1.0) else array("f", (number / length for number in numbers))


def _little_endian(numbers: Vector) -> Vector:
    """Swaps the bytes of a copy on big-endian machines."""
    if sys.byteorder == "big":
        numbers = array("f", numbers)
        numbers.byteswap()
    return numbers


class EmbeddingAnswer(Response):
    """Tokenizes and computes the vectors while the client is connected. `make_job`: may raise ApiError."""

    def __init__(self, make_job: Callable[[], Awaitable[EmbeddingJob]], backend: Backend, metrics: ApiMetrics) -> None:
        super().__init__()
        self._make_job = make_job
        self._backend = backend
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, unless the client disconnects, which aborts the requests. Raises ApiError."""
        await run_while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        job = await self._make_job()  # the app answers its errors
        objectives = self._metrics.objectives
        try:
            vectors = await self._vectors(job)
            response = Response(await asyncio.to_thread(job.document, vectors), media_type="application/json")
            objectives.answered()
        except ApiError as error:
            response = error_response(error)
            objectives.failed(error.status, error.code)
        self._metrics.responses.labels(job.endpoint.route, str(response.status_code)).inc()
        await response(scope, receive, send)

    async def _vectors(self, job: EmbeddingJob) -> list[bytes]:
        outcome, deltas = "abort", list[Delta]()
        for meter in job.meters:
            meter.start()
        try:
            deltas = await embed(self._backend, job.requests, job.max_concurrent)
            if any(len(delta.vector) < 4 * job.form.size for delta in deltas):
                raise BackendError(503, "embeddings_unavailable", "a group of another revision answered with its model; retry")
        except BackendError as error:
            outcome = "error"
            describe_error(job.trace, error.status, error.code)
            raise api_error_of_backend(error) from error
        except Exception as error:
            outcome = "error"
            describe_error(job.trace, 500, "internal_error")
            log.exception("request failed", extra={"request_id": job.id})
            raise internal_error() from error
        finally:
            describe_response(job.trace, job.id, sum(len(request.prompt) for request in job.requests), 0, [])
            cached = [delta.cached_tokens for delta in deltas] or [0] * len(job.meters)
            for meter, cached_tokens in zip(job.meters, cached, strict=True):
                meter.end("stop" if deltas else outcome, cached_tokens)
        return [delta.vector for delta in deltas]


async def embed(backend: Backend, requests: Sequence[wire.Request], max_concurrent: int) -> list[Delta]:
    """Returns the last delta of each pooled request, which has its vector. The first failure aborts all. Raises BackendError."""
    slots = asyncio.Semaphore(max_concurrent)

    async def one(request: wire.Request) -> Delta:
        async with slots:
            return await embed_one(backend, request)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def embed_one(backend: Backend, request: wire.Request) -> Delta:
    """Returns the last delta of a pooled request, which has its vector: that of another one is its token's logprob.

    Raises BackendError.
    """
    async with aclosing(backend.generate(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            if isinstance(delta, Delta) and delta.finish is not None:
                if request.pooling is None and delta.details and delta.details[0] is not None:
                    return msgspec.structs.replace(delta, vector=array("f", [delta.details[0].logprob]).tobytes())
                if not delta.vector:
                    raise BackendError(503, "embeddings_unavailable", "the group's version computes no embeddings")
                return delta
    raise AssertionError("the last delta of a request has a finish reason")


async def accept_embeddings(
    server: ServerContext, endpoint: EmbeddingEndpoint, body: EmbeddingRequest, caller: Caller
) -> EmbeddingAnswer:
    """Returns the answer to a valid request. Raises ApiError, BackendError."""
    arrived_s = server.seconds()
    model = await server.model(body.model, caller)
    model.name_for(body.model, caller)
    embedding = model.embedding()
    refuse_unsupported(body.model_extra or {})
    check_count(server, len(body.input), endpoint.field)
    if body.dimensions is not None and body.dimensions > embedding.size:
        raise invalid("dimensions", f"dimensions must be between 1 and {embedding.size}, the size of the model's embeddings")
    inputs = partial(tokenized_inputs, body, body.input, model, endpoint.field)
    is_normalised = embedding.is_normalised if body.use_activation is None else body.use_activation
    form = VectorForm(embedding.pooling, body.dimensions or embedding.size, is_normalised, body.encoding_format == "base64")
    return make_answer(server, endpoint, body, caller, model=model, inputs=inputs, form=form, arrived_s=arrived_s)


def check_count(server: ServerContext, num_inputs: int, field: str) -> None:
    """Raises ApiError 400 for more inputs than a request may have."""
    if num_inputs > server.limits.max_inputs:
        raise invalid(field, f"one request may have at most {server.limits.max_inputs} inputs")


def make_answer(
    server: ServerContext,
    endpoint: EmbeddingEndpoint,
    body: PooledRequest,
    caller: Caller,
    *,
    model: ServedModel,
    inputs: Tokenize,
    form: VectorForm,
    arrived_s: float,
    requests_per_input: int = 1,
) -> EmbeddingAnswer:
    """Returns the answer that computes a vector of each of `inputs`, of which several may be of one input of the client."""

    async def make_job() -> EmbeddingJob:
        return _job(
            server,
            endpoint,
            body,
            caller,
            model=model,
            inputs=await inputs(),
            form=form,
            arrived_s=arrived_s,
            requests_per_input=requests_per_input,
        )

    return EmbeddingAnswer(make_job, server.backend, server.metrics)


def _job(
    server: ServerContext,
    endpoint: EmbeddingEndpoint,
    body: PooledRequest,
    caller: Caller,
    *,
    model: ServedModel,
    inputs: Sequence[TokenizedInput],
    form: VectorForm,
    arrived_s: float,
    requests_per_input: int,
) -> EmbeddingJob:
    """Raises ApiError."""
    id, name = f"{endpoint.id_prefix}{caller.request_id}", model.name_for(body.model, caller)
    requests = pooled_requests(id, inputs, form.pooling, body, caller, adapter=model.adapter(name))
    describe_request(caller.trace, endpoint.route, name, requests)
    tenant, clock = caller.tenant(body.tenant, body.user), server.seconds
    meters = [server.metrics.meter(name, len(one.tokens), 0, arrived_s, clock, tenant=tenant) for one in inputs]
    return EmbeddingJob(
        endpoint=endpoint,
        id=id,
        model=name,
        requests=requests,
        meters=meters,
        form=form,
        requests_per_input=requests_per_input,
        max_concurrent=server.limits.max_concurrent_inputs,
        trace=caller.trace,
    )
