"""The OpenAI routes: from a checked body to a job for the backend."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends

from phalanx_api import wire
from phalanx_frontend.backend import Backend, BackendError
from phalanx_frontend.caller import Caller, caller_of
from phalanx_frontend.draw import draw_seed
from phalanx_frontend.errors import invalid
from phalanx_frontend.formats import ChatFormat, CompletionFormat, Format
from phalanx_frontend.limits import Limits
from phalanx_frontend.metrics import Clock, DoorMetrics
from phalanx_frontend.model import DoorModel, Models
from phalanx_frontend.prompt import bad_word_ids, chat_prompts, completion_prompts, tokenize_prompt
from phalanx_frontend.reply import Reply
from phalanx_frontend.sampling import check_fields, output_tokens, sampling_of
from phalanx_frontend.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from phalanx_frontend.sse import Answer, Job
from phalanx_frontend.structured import grammar_of
from phalanx_frontend.text.detokenize import make_detokenizer

Body = TypeVar("Body", bound=GenerationRequest)
Asker = Annotated[Caller, Depends(caller_of)]


@dataclass(frozen=True, slots=True)
class Door:
    """What the routes stand on. `seconds` is a monotonic clock, `unix_s` the time of day."""

    backend: Backend
    metrics: DoorMetrics
    limits: Limits
    models: Models = field(default_factory=Models)
    seconds: Clock = time.perf_counter
    unix_s: Clock = time.time
    draw_seed: Callable[[], int] = draw_seed

    async def model(self) -> DoorModel:
        """The model that is served now. Raises BackendError 503 while none is known."""
        return await self.models.get(self.backend.assets())

    async def warm(self) -> None:
        """Loads the model if one is known, so that no request waits for it. A router may be ready before it knows any."""
        try:
            assets = self.backend.assets()
        except BackendError:
            return
        await self.models.get(assets)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """Where completions and chat differ: how the prompt is made and how the answer is written."""

    route: str
    id_prefix: str
    prompts: Callable[[Body, DoorModel], Awaitable[list[list[int]]]]
    format: Callable[[str, int, str, bool], Format]


COMPLETIONS: Endpoint[CompletionRequest] = Endpoint("/v1/completions", "cmpl-", completion_prompts, CompletionFormat)
CHAT: Endpoint[ChatRequest] = Endpoint("/v1/chat/completions", "chatcmpl-", chat_prompts, ChatFormat)


def openai_routes(door: Door) -> APIRouter:
    """/v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize."""
    routes = APIRouter(tags=["openai"])

    @routes.post(COMPLETIONS.route, response_model=None)
    async def completions(body: CompletionRequest, caller: Asker) -> Answer:
        """Completes a prompt."""
        return await accept(door, COMPLETIONS, body, caller)

    @routes.post(CHAT.route, response_model=None)
    async def chat_completions(body: ChatRequest, caller: Asker) -> Answer:
        """Answers a conversation."""
        return await accept(door, CHAT, body, caller)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The names that requests may use."""
        assets = door.backend.assets()
        return {"object": "list", "data": [model_card(door, assets, name) for name in assets.served_names]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of these names."""
        model = await door.model()
        return model_card(door, model.assets, model.name_for(name))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a prompt or of messages."""
        model = await door.model()
        model.name_for(body.model)
        ids = await tokenize_prompt(body, model)
        tokens = [model.tokenizer.token(id) for id in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": model.assets.max_model_len, "tokens": ids, "token_strs": tokens}

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Text of token ids, special tokens included."""
        model = await door.model()
        model.name_for(body.model)
        return {"prompt": model.tokenizer.decode(model.checked_ids(body.tokens, "tokens"), skip_special_tokens=False)}

    return routes


async def accept(door: Door, endpoint: Endpoint[Body], body: Body, caller: Caller) -> Answer:
    """The answer to a request that can be served. Raises ApiError, BackendError."""
    arrived_s = door.seconds()
    model = await door.model()
    name = model.name_for(body.model)
    check_fields(body, door.limits)
    prompts = await endpoint.prompts(body, model)
    if len(prompts) > 1:
        raise invalid("prompt", "several prompts in one request are not supported yet; send one request for each")
    [prompt] = prompts
    assets = model.assets
    max_tokens = output_tokens(body, len(prompt), assets.max_model_len, model.defaults)
    changes = await changed_scores(body, model)
    sampling = sampling_of(body, max_tokens, model.defaults, assets.eos_token_ids, door.draw_seed(), *changes)
    id = endpoint.id_prefix + caller.request_id
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    job = Job(
        wire_request(id, prompt, sampling, body, caller),
        make_reply(body, model, sampling),
        endpoint.format(id, int(door.unix_s()), name, has_usage),
        is_streamed=bool(body.stream),
        has_usage=has_usage,
    )
    meter = door.metrics.meter(name, len(prompt), max_tokens, arrived_s, door.seconds)
    return Answer(job, door.backend, meter, door.metrics, endpoint.route)


async def changed_scores(body: GenerationRequest, model: DoorModel) -> tuple[list[list[int]], wire.Grammar | None]:
    """Sequences of `bad_words` and the grammar, checked against the model, as are all token ids. Raises ApiError 400."""
    model.checked_ids(list(body.logit_bias), "logit_bias")
    model.checked_ids(body.allowed_token_ids or [], "allowed_token_ids")
    asked = grammar_of(body)
    if asked is not None:
        await model.grammars.check(*asked)
    return await bad_word_ids(body.bad_words or [], model), None if asked is None else asked[1]


def wire_request(id: str, prompt: list[int], sampling: wire.Sampling, body: GenerationRequest, caller: Caller) -> wire.Request:
    """What the backend is asked: with the caller's tenant and a priority that the caller may have."""
    return wire.Request(
        id,
        0,
        prompt,
        [],
        sampling,
        priority=caller.priority(body.priority),
        tenant=caller.tenant(body.tenant, body.user),
        cache_salt=body.cache_salt or "",
        ttft_target_ms=body.ttft_target_ms,
        tpot_target_ms=body.tpot_target_ms,
        deadline_ms=body.deadline_ms,
    )


def make_reply(body: GenerationRequest, model: DoorModel, sampling: wire.Sampling) -> Reply:
    """An empty reply that ends where the request says."""
    detokenizer = make_detokenizer(model.tokenizer, body.skip_special_tokens is not False)
    return Reply(detokenizer, sampling, body.stop, body.stop_token_ids or (), bool(body.include_stop_str_in_output))


def model_card(door: Door, assets: wire.Assets, name: str) -> dict[str, Any]:
    """One entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": int(door.unix_s()),
        "owned_by": "phalanx",
        "root": assets.served_names[0],
        "parent": None,
        "max_model_len": assets.max_model_len,
    }
