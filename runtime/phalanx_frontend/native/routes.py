"""Our own API: /v1/generate with text and token ids at once, /v1/batch of such requests, and /v1/metrics as one document."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.backend import BackendError
from phalanx_frontend.errors import ApiError, invalid, of_backend, of_validation
from phalanx_frontend.fields import STREAMED, Text, TokenIds
from phalanx_frontend.health import Totals, Vitals
from phalanx_frontend.metrics import RequestMeter
from phalanx_frontend.native.answers import BatchAnswer, Entry, Generation, NativeAnswer
from phalanx_frontend.openai.accept import names_of, wire_request
from phalanx_frontend.openai.context import Door
from phalanx_frontend.openai.routes import Asker
from phalanx_frontend.openai.sampling import check_fields, output_tokens, sampling_of
from phalanx_frontend.openai.schemas import CommonRequest, GenerationRequest
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.resume import begun_before, seed_of
from phalanx_frontend.text.detokenize import make_detokenizer

# Requests of our own API, /v1/generate and /v1/batch, as pydantic checks them. A field that is not here is refused.

MAX_BATCH = 256
"""Entries of one batch: more would hold one connection for very long, and one client could fill the queue at once."""


class GenerateRequest(CommonRequest):
    """POST /v1/generate: either `prompt` or `prompt_tokens`, and how to go on from there."""

    model_config = ConfigDict(extra="forbid")

    prompt: Text | None = None
    prompt_tokens: TokenIds | None = None

    def generation(self) -> GenerationRequest:
        """What it has in common with the OpenAI calls."""
        return GenerationRequest.model_validate({name: getattr(self, name) for name in CommonRequest.model_fields})


class BatchRequest(BaseModel):
    """POST /v1/batch. Each entry is a body of /v1/generate without `stream`; a bad one fails alone, in its place."""

    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_BATCH),
        WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_BATCH, "items": {}}),
    ]


GENERATE, BATCH = "/v1/generate", "/v1/batch"


def native_routes(door: Door, vitals: Vitals) -> APIRouter:
    """/v1/generate, /v1/batch, /v1/metrics."""
    routes = APIRouter(tags=["native"])

    @routes.post(GENERATE, response_model=None, responses=STREAMED)
    async def generate(body: GenerateRequest, caller: Asker) -> NativeAnswer:
        """Generates from a prompt or from token ids."""
        generation = await accept_native(door, body, caller, caller.request_id, door.seconds())
        return NativeAnswer(generation, door.metrics, GENERATE, bool(body.stream))

    @routes.post(BATCH, response_model=None)
    async def batch(body: BatchRequest, caller: Asker) -> BatchAnswer:
        """Generates for every entry, all at once."""
        arrived_s = door.seconds()
        await door.model()  # without one the whole batch is refused
        ids = [f"{caller.request_id}-{position}" for position in range(len(body.requests))]
        entries = [await _accept_entry(door, body.requests, position, caller, id, arrived_s) for position, id in enumerate(ids)]
        return BatchAnswer(ids, entries, door.metrics, BATCH, arrived_s, door.seconds)

    @routes.get("/v1/metrics")
    async def metrics() -> dict[str, Any]:
        """Counts since the start, and where the memory of each rank goes."""
        return metrics_document(vitals.totals(), vitals.memory(), vitals.kv_bytes_per_token())

    return routes


async def accept_native(door: Door, body: GenerateRequest, caller: Caller, id: str, arrived_s: float) -> Generation:
    """A generation that can be run. Raises ApiError, BackendError."""
    model = await door.model()
    name = model.name_for(body.model)
    fields = body.generation()
    check_fields(fields, door.limits)
    if (body.prompt is None) == (body.prompt_tokens is None):
        raise invalid("prompt", "either prompt or prompt_tokens must be given, and not both")
    if body.prompt is not None:
        prompt = await model.encode(body.prompt, True, "prompt")
    else:
        prompt = model.checked_ids(body.prompt_tokens or [], "prompt_tokens")
    if not prompt:
        raise invalid("prompt" if body.prompt is not None else "prompt_tokens", "the prompt has no tokens")
    max_tokens = output_tokens(fields, len(prompt), model.assets.max_model_len, model.defaults)
    id, stream, last = names_of(id, caller, bool(body.stream))
    seed = seed_of(stream, 0) if body.stream else door.draw_seed()
    sampling = sampling_of(fields, max_tokens, model.defaults, model.assets.eos_token_ids, seed)
    request, past = wire_request(stream, prompt, sampling, fields, caller), None
    if last is not None:
        [(request, past)] = await begun_before(door.backend, last, [request])
    reply = Reply(make_detokenizer(model.tokenizer, True), sampling, fields.stop, fields.stop_token_ids or ())

    def meter() -> RequestMeter:
        return door.metrics.meter(name, len(prompt), max_tokens, arrived_s, door.seconds)

    return Generation(id, request, past, reply, meter, door.backend, arrived_s, door.seconds)


async def _accept_entry(door: Door, entries: Sequence[object], position: int, caller: Caller, id: str, arrived_s: float) -> Entry:
    """A generation, or why this entry of a batch is none."""
    entry = entries[position]
    if not isinstance(entry, dict):
        return invalid(f"requests[{position}]", f"requests[{position}]: must be an object, as the body of {GENERATE} is")
    try:
        body = GenerateRequest.model_validate(entry)
        if body.stream:
            raise invalid("stream", "an entry of a batch cannot be streamed")
        return await accept_native(door, body, caller, id, arrived_s)
    except ValidationError as error:
        return of_validation(error.errors(), ())
    except BackendError as error:
        return of_backend(error)
    except ApiError as error:
        return error


def metrics_document(totals: Totals, memory: Sequence[MemoryAccount], kv_bytes_per_token: int | None) -> dict[str, Any]:
    """The body of /v1/metrics. Averages are null before there is anything to divide by: acceptance while nothing was proposed."""
    return {
        "total_requests": totals.requests,
        "total_tokens_generated": totals.generated_tokens,
        "avg_latency_ms": totals.latency_s * 1000 / totals.requests if totals.requests else None,
        "avg_throughput_tokens_per_sec": totals.generated_tokens / totals.latency_s if totals.latency_s else None,
        "cache_hit_rate": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else None,
        "acceptance_rate": totals.accepted / totals.proposed if totals.proposed else None,
        "kv_bytes_per_token": kv_bytes_per_token,
        "memory": [
            {
                "rank": account.rank,
                "weights_bytes": account.weights_bytes,
                "activations_bytes": account.activations_bytes,
                "logits_sampler_bytes": account.logits_sampler_bytes,
                "kv_pool_bytes": account.kv_pool_bytes,
                "total_bytes": account.total_bytes,
            }
            for account in memory
        ],
    }
