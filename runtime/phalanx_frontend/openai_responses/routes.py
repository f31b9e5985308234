"""The routes of OpenAI's Responses API."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import RESPONSES_PATH, ApiError, invalid
from phalanx_frontend.fields import INT32_MAX, STREAMED
from phalanx_frontend.ids import random_id
from phalanx_frontend.openai.accept import Endpoint, accept
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.prompt import ReadyPrompt, chat_prompts, fitted_prompts
from phalanx_frontend.openai.routes import CurrentCaller
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.openai_responses.background import BackgroundResponse, EventLog, stored_events
from phalanx_frontend.openai_responses.conversation import Conversation, chat_request, named_by_client
from phalanx_frontend.openai_responses.conversation_store import Conversations, KeptResponse
from phalanx_frontend.openai_responses.history import History, stored_items
from phalanx_frontend.openai_responses.output_items import RESPONSE_PREFIX, echoed_fields
from phalanx_frontend.openai_responses.response_format import UNSTARTED_ERRORS, ResponsesFormat, ResponseTerms
from phalanx_frontend.openai_responses.schemas import CountInputRequest, ResponsesRequest
from phalanx_frontend.stream.answer import Answer
from phalanx_frontend.stream.held import HeldAnswer

AnswerMaker = Callable[[], Awaitable[Answer]]
PromptMaker = Callable[[ChatRequest, ServedModel], Awaitable[list[ReadyPrompt]]]


def openai_responses_routes(server: ServerContext, conversations: Conversations) -> APIRouter:
    """Builds the routes of the Responses API."""
    routes = APIRouter(tags=["responses"])

    @routes.post(RESPONSES_PATH, response_model=None, responses=STREAMED)
    async def create(body: ResponsesRequest, caller: CurrentCaller) -> Response:
        """Answers a conversation in the form of OpenAI's Responses API."""
        history = history_of(conversations, caller)
        make_answer: Callable[[], Awaitable[Response]] = partial(background_answer, server, history, body, caller)
        if not body.background:
            make_answer = await answer_maker(server, history, body, caller)
        if body.stream and server.lacks_model(body.model):
            return HeldAnswer(make_answer, server.keep_alive_s, server.metrics.objectives, UNSTARTED_ERRORS)
        return await make_answer()

    @routes.post(f"{RESPONSES_PATH}/input_tokens")
    async def count_input(body: CountInputRequest, caller: CurrentCaller) -> dict[str, Any]:
        """Number of prompt tokens that the same request for a response would have."""
        model = await server.model()
        model.name_for(body.model, caller)
        chat = chat_request(body, await history_of(conversations, caller).conversation(body))
        try:
            [prompt] = await _prompts_of(body)(chat, model)
        except ApiError as error:
            raise named_by_client(error) from error
        return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}

    routes.include_router(stored_routes(server, conversations))
    return routes


def stored_routes(server: ServerContext, conversations: Conversations) -> APIRouter:
    """Builds the routes of stored responses, and of those in the background."""
    routes = APIRouter()

    @routes.get(f"{RESPONSES_PATH}/{{response_id}}")
    async def retrieve(
        response_id: str,
        caller: CurrentCaller,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, le=INT32_MAX)] = None,
    ) -> Response:
        """A stored response or one in the background; with `stream` its events, those after a `sequence_number`."""
        history = history_of(conversations, caller)
        number = 0 if starting_after is None else starting_after + 1
        kept = await history.response(response_id, number if stream else None)
        if not stream:
            return Response(kept.document, media_type="application/json")
        return event_stream(stored_events(history, kept, number, server.keep_alive_s))

    @routes.post(f"{RESPONSES_PATH}/{{response_id}}/cancel")
    async def cancel(response_id: str, caller: CurrentCaller) -> Response:
        """Ends a response in the background. One that has ended is returned as it is."""
        kept = await history_of(conversations, caller).cancel(response_id)
        return Response(kept.document, media_type="application/json")

    @routes.delete(f"{RESPONSES_PATH}/{{response_id}}")
    async def delete(response_id: str, caller: CurrentCaller) -> dict[str, Any]:
        """Deletes a stored response."""
        await history_of(conversations, caller).delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.get(f"{RESPONSES_PATH}/{{response_id}}/input_items")
    async def input_items(
        response_id: str,
        caller: CurrentCaller,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """The items of a stored response's request, the newest first."""
        kept = await history_of(conversations, caller).response(response_id)
        items = orjson.loads(kept.input_items)
        return page_of(items if order == "asc" else items[::-1], limit, after)

    return routes


def page_of(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Returns one page of a list. Raises ApiError 400 for an unknown `after`."""
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid("after", f"there is no item {after}")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": start + limit < len(items)}


def history_of(conversations: Conversations, caller: Caller) -> History:
    """Returns the responses that the caller may see: those of its key; without keys those of all."""
    return History(conversations, caller.tenant(None, None))


async def answer_maker(server: ServerContext, history: History, body: ResponsesRequest, caller: Caller) -> AnswerMaker:
    """Returns a function that makes the answer once the model is known. Raises ApiError 400."""
    conversation = await history.conversation(body)
    keep = (
        partial(_keep, history, conversation, body.previous_response_id)
        if body.store is not False and not caller.no_store
        else _forget
    )
    return _maker(server, body, caller, conversation, ResponseTerms(echoed_fields(body), keep))


async def background_answer(server: ServerContext, history: History, body: ResponsesRequest, caller: Caller) -> Response:
    """Starts a response in the background, and returns what its client gets. Raises ApiError and BackendError."""
    if caller.no_store:
        raise invalid("background", "background: the response must be stored; leave the header Cache-Control out")
    conversation = await history.conversation(body)
    running = BackgroundResponse(EventLog() if body.stream else None, history.has_room, history.max_entry_bytes)
    terms = ResponseTerms(echoed_fields(body), running.complete, running.queue)
    answer = await _maker(server, body, replace(caller, last_event_id=""), conversation, terms)()
    id = running.kept().id
    running.input_items = orjson.dumps(stored_items(conversation.own, id))
    running.previous = body.previous_response_id
    history.start(running)
    end_span = caller.trace.end_later() if caller.trace is not None else None
    running.compute(answer, partial(_finish, history, id, end_span))
    if not body.stream:
        return Response(running.kept().document, media_type="application/json")
    return event_stream(stored_events(history, running.kept(), 0, server.keep_alive_s))


def _finish(history: History, id: str, end_span: Callable[[], None] | None) -> None:
    history.finish(id)
    if end_span is not None:
        end_span()


def event_stream(events: AsyncIterator[bytes]) -> Response:
    """Returns the response that sends these events."""
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _maker(
    server: ServerContext, body: ResponsesRequest, caller: Caller, conversation: Conversation, terms: ResponseTerms
) -> AnswerMaker:
    chat = chat_request(body, conversation)
    endpoint: Endpoint[ChatRequest] = Endpoint(
        RESPONSES_PATH, RESPONSE_PREFIX, _prompts_of(body), partial(ResponsesFormat, terms)
    )
    # Ids of clients may repeat; those of stored responses may not.
    caller = caller if caller.has_random_id else replace(caller, request_id=random_id(""), has_random_id=True)

    async def make_answer() -> Answer:
        try:
            return await accept(server, endpoint, chat, caller)
        except ApiError as error:
            raise named_by_client(error) from error

    return make_answer


def _prompts_of(body: CountInputRequest) -> PromptMaker:
    return fitted_prompts if body.truncation == "auto" else chat_prompts


def _keep(history: History, conversation: Conversation, previous: str | None, id: str, document: bytes) -> None:
    history.keep(KeptResponse(id, document, orjson.dumps(stored_items(conversation.own, id)), previous))


def _forget(id: str, document: bytes) -> None:
    """Stores nothing."""
