"""Converts a validated body to an answer job."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

import msgspec

from phalanx_api import wire
from phalanx_api.speculation import Speculation, Tree
from phalanx_api.wire.router import choice_seed
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import invalid
from phalanx_frontend.fields import Prompt
from phalanx_frontend.ids import STREAM_NAME_SEPARATOR, EventId, choice_id
from phalanx_frontend.openai.answer_parts import checked_grammar, read_tokens
from phalanx_frontend.openai.chat_format import chat_format
from phalanx_frontend.openai.completion_format import CompletionFormat
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.pictures import check_copies, has_images
from phalanx_frontend.openai.prompt import (
    ReadyPrompt,
    bad_word_ids,
    chat_prompts,
    completion_prompts,
    fitted_prompts,
    least_tokens,
)
from phalanx_frontend.openai.question import question_of
from phalanx_frontend.openai.sampling import build_sampling, check_fields, max_output_tokens, shown_fields
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.stream.answer import Answer, AnswerJob, Choice
from phalanx_frontend.stream.formats import AnswerFormat, ChunkHeader
from phalanx_frontend.stream.logprobs import Spelling
from phalanx_frontend.stream.reply import NO_ECHO, Echo, Reply, ShownFields
from phalanx_frontend.stream.response_cache import CacheQuery, Question
from phalanx_frontend.stream.resume import ResumePoint, find_resumable, parse_last_event_id, stream_seed
from phalanx_frontend.text.detokenize import NO_IDS, make_detokenizer
from phalanx_frontend.tracing.gen_ai import describe_request

Body = TypeVar("Body", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """Differences between completions and chat."""

    route: str
    id_prefix: str
    prompts: Callable[[Body, ServedModel], Awaitable[list[ReadyPrompt]]]
    format: Callable[[ChunkHeader, Body, ServedModel], AnswerFormat]


COMPLETIONS: Endpoint[CompletionRequest] = Endpoint(
    "/v1/completions", "cmpl-", completion_prompts, lambda head, body, model: CompletionFormat(head)
)
CHAT: Endpoint[ChatRequest] = Endpoint("/v1/chat/completions", "chatcmpl-", chat_prompts, chat_format)


async def accept(server: ServerContext, endpoint: Endpoint[Body], body: Body, caller: Caller) -> Answer:
    """Returns the answer to a valid request. Raises ApiError, BackendError."""
    arrived_s = server.seconds()
    model, name, adapter = await requested_model(server, body.model, caller, bool(body.stream))
    model = _recalling(model, server, body, caller)
    check_fields(body, server.limits)
    id, stream, last = stream_identity(endpoint.id_prefix + caller.request_id, caller, bool(body.stream))
    prompts = await _prompts(server, endpoint, body, caller, model, is_resumed=last is not None)
    per_prompt = body.n or 1
    if len(prompts) * per_prompt > server.limits.max_choices:
        raise invalid("n" if len(prompts) == 1 else "prompt", f"one request may have at most {server.limits.max_choices} choices")
    shown = shown_fields(body)
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    has_running_usage = has_usage and body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
    prompt_seed = partial(stream_seed, stream) if body.stream else lambda prompt: server.random_seed()
    requests = await backend_requests(prompt_seed, body, caller, model, prompts, id=stream, adapter=adapter)
    describe_request(caller.trace, endpoint.route, name, requests)
    resume_points: list[ResumePoint | None] = [None] * len(requests)
    if last is not None:
        resumed = await find_resumable(server.backend, last, requests, caller.trace)
        requests, resume_points = [request for request, _ in resumed], [point for _, point in resumed]
    head = ChunkHeader(
        id=id,
        created=int(server.unix_s()),
        model=name,
        has_usage=has_usage,
        spelling=Spelling(model.tokenizer, shown.as_ids),
        shown=shown,
    )
    format, echoes, choices = endpoint.format(head, body, model), prompt_echoes(body, model, prompts, shown), []
    for index, request in enumerate(requests):
        reply = make_reply(body, model, request, shown)
        num_prompt, max_tokens, clock = len(request.prompt), request.sampling.max_tokens, server.seconds
        meter = server.metrics.meter(name, num_prompt, max_tokens, arrived_s, clock, tenant=request.tenant, trace=caller.trace)
        choice_format = format.choice(index, request.prompt, echoes[index // per_prompt], reply)
        choices.append(Choice(request=request, reply=reply, format=choice_format, meter=meter, resume_point=resume_points[index]))
    question = partial(_question, body, model, requests, prompts)
    job = AnswerJob(
        id=id,
        stream=stream,
        choices=choices,
        per_prompt=per_prompt,
        format=format,
        is_streamed=bool(body.stream),
        has_usage=has_usage,
        has_running_usage=has_running_usage,
        cache_use=server.cache_use(cache_query(body, caller, model, requests, question)),
        trace=caller.trace,
    )
    return Answer(job, server.backend, server.metrics, endpoint.route)


async def requested_model(
    server: ServerContext, requested: str | None, caller: Caller, is_streamed: bool
) -> tuple[ServedModel, str, wire.Adapter | None]:
    """Returns the model of a request with the name of the response and the adapter. Raises ApiError, BackendError.

    A client that resumes waits for no adapter: its stream may run on in a group that has unloaded it. `find_resumable` knows
    the content.
    """
    if is_streamed and caller.last_event_id and requested is not None and caller.may_use(requested):
        model = await server.model()
        return model, requested, None if requested in model.assets.served_names else wire.Adapter(requested, "")
    model = await server.model(requested, caller)
    name = model.name_for(requested, caller)
    return model, name, model.adapter(name)


async def _prompts(
    server: ServerContext, endpoint: Endpoint[Body], body: Body, caller: Caller, model: ServedModel, *, is_resumed: bool
) -> list[ReadyPrompt]:
    """Returns the prompts. A request over quota is refused before its images are read. Raises ApiError, BackendError.

    is_resumed: the quota has counted the stream at its start.
    """
    if isinstance(body, ChatRequest) and has_images(body.messages) and not is_resumed:
        num_tokens = await least_tokens(body, model, can_drop=endpoint.prompts is fitted_prompts)
        server.backend.check_quota(caller.tenant(body.tenant, body.user), num_tokens)
    return await endpoint.prompts(body, model)


def stream_identity(id: str, caller: Caller, is_streamed: bool) -> tuple[str, str, EventId | None]:
    """Returns the answer's id, its stream name and the client's position. Raises ApiError 404."""
    if not is_streamed:
        return id, id, None
    if not caller.last_event_id:
        return id, caller.stream_name(id), None
    last = parse_last_event_id(caller.last_event_id)
    return last.request.partition(STREAM_NAME_SEPARATOR)[0], last.request, last


async def backend_requests(
    prompt_seed: Callable[[int], int],
    body: GenerationRequest,
    caller: Caller,
    model: ServedModel,
    prompts: Sequence[ReadyPrompt],
    id: str,
    adapter: wire.Adapter | None = None,
) -> list[wire.Request]:
    """Returns one request per prompt and choice. Raises ApiError."""
    bad_words, grammar = await output_constraints(body, caller, model, prompts[0].tokens)
    shown, per_prompt = shown_fields(body), body.n or 1
    requests: list[wire.Request] = []
    for position, prompt in enumerate(prompts):
        check_copies(prompt.images, per_prompt, model)
        max_tokens = max_output_tokens(body, len(prompt.tokens), model.assets.max_model_len, model.defaults)
        eos, seed = model.assets.eos_token_ids, prompt_seed(position)
        sampling = build_sampling(body, max_tokens, model.defaults, eos, seed, bad_words=bad_words, grammar=grammar, shown=shown)
        for choice in range(per_prompt):
            choice_sampling = msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, choice))
            name = choice_id(id, len(requests), len(prompts) * per_prompt)
            requests.append(wire_request(name, prompt, choice_sampling, body, caller, adapter=adapter))
    return requests


async def output_constraints(
    body: GenerationRequest, caller: Caller, model: ServedModel, prompt: Sequence[int]
) -> tuple[list[list[int]], wire.Grammar | None]:
    """Returns the tokens of `bad_words` and the grammar. `prompt`: the only one of a chat. Raises ApiError 400."""
    model.checked_ids(list(body.logit_bias), "logit_bias")
    model.checked_ids(body.allowed_token_ids or [], "allowed_token_ids")
    grammar = await checked_grammar(body, model, prompt, caller.tenant(body.tenant, body.user))
    return await bad_word_ids(body.bad_words or [], model), grammar


def wire_request(
    id: str,
    prompt: ReadyPrompt,
    sampling: wire.Sampling,
    body: GenerationRequest,
    caller: Caller,
    *,
    adapter: wire.Adapter | None = None,
) -> wire.Request:
    """Builds a backend request. Raises ApiError 403 for its priority."""
    return wire.Request(
        id=id,
        epoch=0,
        prompt=prompt.tokens,
        images=prompt.images,
        delivered=[],
        sampling=sampling,
        priority=caller.priority(body.priority),
        tenant=caller.tenant(body.tenant, body.user),
        cache_salt=body.cache_salt or "",
        ttft_target_ms=body.ttft_target_ms,
        tpot_target_ms=body.tpot_target_ms,
        deadline_ms=body.deadline_ms,
        can_resume=bool(body.stream),
        speculation=speculation_of(body),
        trace=None if caller.trace is None else caller.trace.identity,
        adapter=adapter,
    )


def _question(
    body: GenerationRequest, model: ServedModel, requests: Sequence[wire.Request], prompts: Sequence[ReadyPrompt]
) -> Question | None:
    [written] = body.prompt if isinstance(body, CompletionRequest) else [None]
    return question_of(body, written if isinstance(written, str) else None, model, requests[0], prompts[0])


def cache_query(
    body: GenerationRequest,
    caller: Caller,
    model: ServedModel,
    requests: Sequence[wire.Request],
    question: Callable[[], Question | None],
) -> CacheQuery | None:
    """Returns the query of a request with one deterministic choice; null if it forbids storing, resumes a stream or needs more.

    `question`: returns what other requests may resemble. Tools are excluded, because their calls have effects, details of
    tokens, because only tokens are stored, and images.
    """
    forbids = _forbids_storing(body, caller) or bool(caller.last_event_id)
    has_effects = isinstance(body, ChatRequest) and bool(body.tools)
    if forbids or has_effects or len(requests) != 1 or body.max_tokens == 0:
        return None
    (request,) = requests
    sampling = request.sampling
    if request.images or (sampling.temperature > 0 and body.seed is None):
        return None
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None or sampling.return_gaps:
        return None
    return CacheQuery(request, (model.tokenizer.content_hash, *_ending(body)), question)


def _recalling(model: ServedModel, server: ServerContext, body: GenerationRequest, caller: Caller) -> ServedModel:
    """Returns the model that finds recent texts of the tenant, where a hit would spend most of its time in the tokenizer."""
    if not server.cache.is_enabled or _forbids_storing(body, caller):
        return model
    return model.recalling(server.cache.encodings, caller.tenant(body.tenant, body.user), body.cache_salt or "")


def _forbids_storing(body: GenerationRequest, caller: Caller) -> bool:
    return body.cache == "no-store" or caller.no_store


def _ending(body: GenerationRequest) -> tuple[str, ...]:
    """What decides where stop strings end the text: the strings, and how tokens become text."""
    if not body.stop:
        return ()
    form = "completion" if _continues_prompt(body) else "other"
    return (form, str(body.skip_special_tokens is not False), *sorted(set(body.stop)))


def speculation_of(body: GenerationRequest) -> Speculation:
    """Returns the speculation settings of the request."""
    requested = body.speculative
    if requested is None:
        return Speculation()
    tree = None if requested.tree is None else Tree(requested.tree.widths, requested.tree.shape)
    return Speculation(requested.method, requested.num_tokens, tree)


def make_reply(body: GenerationRequest, model: ServedModel, request: wire.Request, shown: ShownFields) -> Reply:
    """Returns an empty reply."""
    after = request.prompt if _continues_prompt(body) else ()
    kept = read_tokens(body, model) if isinstance(body, ChatRequest) else NO_IDS
    return Reply(
        make_detokenizer(model.tokenizer, body.skip_special_tokens is not False, after, kept),
        request.sampling,
        body.stop,
        body.stop_token_ids or (),
        include_stop=bool(body.include_stop_str_in_output),
        shown=shown,
        is_silent=body.max_tokens == 0,
    )


def _continues_prompt(body: GenerationRequest) -> bool:
    """Whether the text continues that of the prompt."""
    return isinstance(body, CompletionRequest) or (isinstance(body, ChatRequest) and bool(body.continue_final_message))


def prompt_echoes(body: GenerationRequest, model: ServedModel, prompts: Sequence[ReadyPrompt], shown: ShownFields) -> list[Echo]:
    """Returns the echo of each prompt."""
    if not (isinstance(body, CompletionRequest) and body.echo):
        return [NO_ECHO] * len(prompts)
    skip = body.skip_special_tokens is not False
    return [_echo(written, prompt.tokens, model, skip, shown) for written, prompt in zip(body.prompt, prompts, strict=True)]


def _echo(written: Prompt, prompt: list[int], model: ServedModel, skip_special_tokens: bool, shown: ShownFields) -> Echo:
    """Echoes the prompt, with token positions for logprobs."""
    if isinstance(written, str) and shown.logprobs is None:
        return Echo(written)
    detokenizer = make_detokenizer(model.tokenizer, skip_special_tokens)
    pieces = [detokenizer.feed(token) for token in prompt]
    text = written if isinstance(written, str) else "".join(pieces) + detokenizer.end()
    starts = accumulate((len(piece) for piece in pieces[:-1]), initial=0)
    return Echo(text, [min(start, len(text)) for start in starts] if shown.logprobs is not None else ())
