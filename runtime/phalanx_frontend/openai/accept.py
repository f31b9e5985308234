"""From a checked body to a job for the backend: prompts, sampling, and one choice of the answer for each sequence."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

import msgspec

from phalanx_api import wire
from phalanx_api.speculation import Speculation, Tree
from phalanx_api.wire.router import mix
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import invalid
from phalanx_frontend.fields import Prompt
from phalanx_frontend.ids import NAME_END, EventId
from phalanx_frontend.openai.chat_format import chat_format
from phalanx_frontend.openai.completion_format import CompletionFormat
from phalanx_frontend.openai.context import Door
from phalanx_frontend.openai.prompt import bad_word_ids, chat_prompts, completion_prompts
from phalanx_frontend.openai.sampling import check_fields, output_tokens, sampling_of, wants_of
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from phalanx_frontend.openai.served_model import DoorModel
from phalanx_frontend.openai.structured import Asked, grammar_of, only_one
from phalanx_frontend.openai.tools import forced_calls
from phalanx_frontend.stream.answer import Answer, Choice, Job
from phalanx_frontend.stream.formats import AnswerFormat, Head
from phalanx_frontend.stream.logprobs import Spelling
from phalanx_frontend.stream.reply import Echo, Reply, Wants
from phalanx_frontend.stream.resume import Past, begun_before, read_last_event_id, seed_of
from phalanx_frontend.text.detokenize import make_detokenizer

Body = TypeVar("Body", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """Where completions and chat differ: how prompts are made and how the answer is written."""

    route: str
    id_prefix: str
    prompts: Callable[[Body, DoorModel], Awaitable[list[list[int]]]]
    format: Callable[[Head, Body, DoorModel], AnswerFormat]


COMPLETIONS: Endpoint[CompletionRequest] = Endpoint(
    "/v1/completions", "cmpl-", completion_prompts, lambda head, body, model: CompletionFormat(head)
)
CHAT: Endpoint[ChatRequest] = Endpoint("/v1/chat/completions", "chatcmpl-", chat_prompts, chat_format)


async def accept(door: Door, endpoint: Endpoint[Body], body: Body, caller: Caller) -> Answer:
    """The answer to a request that can be served. Raises ApiError, BackendError."""
    arrived_s = door.seconds()
    model = await door.model()
    name = model.name_for(body.model)
    check_fields(body, door.limits)
    prompts = await endpoint.prompts(body, model)
    per_prompt = body.n or 1
    if len(prompts) * per_prompt > door.limits.max_choices:
        raise invalid("n" if len(prompts) == 1 else "prompt", f"one request may have at most {door.limits.max_choices} choices")
    wants = wants_of(body)
    id, stream, last = names_of(endpoint.id_prefix + caller.request_id, caller, bool(body.stream))
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    has_running_usage = has_usage and body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
    draw_seed = partial(seed_of, stream) if body.stream else lambda prompt: door.draw_seed()
    requests = await requests_of(draw_seed, body, caller, model, prompts, stream)
    pasts: list[Past | None] = [None] * len(requests)
    if last is not None:
        resumed = await begun_before(door.backend, last, requests)
        requests, pasts = [request for request, _ in resumed], [past for _, past in resumed]
    head = Head(id, int(door.unix_s()), name, has_usage, Spelling(model.tokenizer, wants.as_ids), wants)
    format = endpoint.format(head, body, model)
    echoes = echoes_of(body, model, prompts, wants)
    choices = []
    for index, request in enumerate(requests):
        reply = make_reply(body, model, request, wants)
        meter = door.metrics.meter(name, len(request.prompt), request.sampling.max_tokens, arrived_s, door.seconds)
        written = format.choice(index, request.prompt, echoes[index // per_prompt], reply)
        choices.append(Choice(request, reply, written, meter, pasts[index]))
    job = Job(id, stream, choices, per_prompt, format, bool(body.stream), has_usage, has_running_usage)
    return Answer(job, door.backend, door.metrics, endpoint.route)


def names_of(id: str, caller: Caller, is_streamed: bool) -> tuple[str, str, EventId | None]:
    """The answer's id, its stream's name, and up to where the client has it. Those of a resumed stream are those it had.

    Raises ApiError 404 for an id to resume from that is none.
    """
    if not is_streamed:
        return id, id, None
    if not caller.last_event_id:
        return id, caller.stream_name(id), None
    last = read_last_event_id(caller.last_event_id)
    return last.request.partition(NAME_END)[0], last.request, last


async def requests_of(
    draw_seed: Callable[[int], int],
    body: GenerationRequest,
    caller: Caller,
    model: DoorModel,
    prompts: list[list[int]],
    id: str,
) -> list[wire.Request]:
    """What the backend is asked: for each prompt its choices, which differ in their seeds. Raises ApiError."""
    bad_words, grammar = await changed_scores(body, model)
    wants, per_prompt = wants_of(body), body.n or 1
    requests: list[wire.Request] = []
    for position, prompt in enumerate(prompts):
        max_tokens = output_tokens(body, len(prompt), model.assets.max_model_len, model.defaults)
        eos, seed = model.assets.eos_token_ids, draw_seed(position)
        sampling = sampling_of(body, max_tokens, model.defaults, eos, seed, bad_words, grammar, wants)
        for choice in range(per_prompt):
            own = msgspec.structs.replace(sampling, seed=mix(sampling.seed, choice))
            name = id if len(prompts) * per_prompt == 1 else f"{id}-{len(requests)}"
            requests.append(wire_request(name, prompt, own, body, caller))
    return requests


async def changed_scores(body: GenerationRequest, model: DoorModel) -> tuple[list[list[int]], wire.Grammar | None]:
    """Sequences of `bad_words` and the grammar, checked against the model, as are all token ids. Raises ApiError 400."""
    model.checked_ids(list(body.logit_bias), "logit_bias")
    model.checked_ids(body.allowed_token_ids or [], "allowed_token_ids")
    asked = only_one([grammar_of(body), forced_by_tools(body, model)])
    if asked is not None:
        await model.grammars.check(*asked)
    return await bad_word_ids(body.bad_words or [], model), None if asked is None else asked[1]


def forced_by_tools(body: GenerationRequest, model: DoorModel) -> Asked | None:
    """The grammar of calls that a chat must make."""
    if not isinstance(body, ChatRequest) or not body.tools or isinstance(model.template, str):
        return None
    format, parallel = model.template.tool_format, body.parallel_tool_calls is not False
    forced = forced_calls(format, body.tools, body.tool_choice, parallel) if format is not None else None
    return None if forced is None else ("tool_choice", forced)


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
        can_resume=bool(body.stream),
        speculation=speculation_of(body),
    )


def speculation_of(body: GenerationRequest) -> Speculation:
    """What the request wants of speculation."""
    asked = body.speculative
    if asked is None:
        return Speculation()
    tree = None if asked.tree is None else Tree(asked.tree.widths, asked.tree.shape)
    return Speculation(asked.method, asked.num_tokens, tree)


def make_reply(body: GenerationRequest, model: DoorModel, request: wire.Request, wants: Wants) -> Reply:
    """An empty reply that ends where the request says. The text of a completion goes on from its prompt's."""
    is_completion = isinstance(body, CompletionRequest)
    return Reply(
        make_detokenizer(model.tokenizer, body.skip_special_tokens is not False, request.prompt if is_completion else ()),
        request.sampling,
        body.stop,
        body.stop_token_ids or (),
        bool(body.include_stop_str_in_output),
        wants,
        is_silent=body.max_tokens == 0,
    )


def echoes_of(body: GenerationRequest, model: DoorModel, prompts: Sequence[list[int]], wants: Wants) -> list[Echo | None]:
    """Each prompt as it is shown again before all its choices, or None where it is not."""
    if not (isinstance(body, CompletionRequest) and body.echo):
        return [None] * len(prompts)
    skip = body.skip_special_tokens is not False
    return [_echo(written, prompt, model, skip, wants) for written, prompt in zip(body.prompt, prompts, strict=True)]


def _echo(written: Prompt, prompt: list[int], model: DoorModel, skip_special_tokens: bool, wants: Wants) -> Echo:
    """As it was written, or as its ids spell. Its pieces are made only where something of them is shown."""
    if isinstance(written, str) and wants.logprobs is None:
        return Echo(written)
    detokenizer = make_detokenizer(model.tokenizer, skip_special_tokens)
    pieces = [detokenizer.feed(token) for token in prompt]
    text = written if isinstance(written, str) else "".join(pieces) + detokenizer.end()
    starts = accumulate((len(piece) for piece in pieces[:-1]), initial=0)
    return Echo(text, [min(start, len(text)) for start in starts] if wants.logprobs is not None else ())
