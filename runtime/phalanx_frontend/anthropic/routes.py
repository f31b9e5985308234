"""The routes of Anthropic's Messages API."""

from fastapi import APIRouter
from starlette.responses import Response

from phalanx_frontend.anthropic.conversation import chat_request
from phalanx_frontend.anthropic.message_format import MessageFormat
from phalanx_frontend.anthropic.schemas import CountTokensRequest, MessagesRequest
from phalanx_frontend.errors import ANTHROPIC_ERRORS, COUNT_TOKENS_PATH, MESSAGES_PATH
from phalanx_frontend.fields import STREAMED
from phalanx_frontend.openai.accept import Endpoint, accept
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.prompt import chat_prompts
from phalanx_frontend.openai.routes import CurrentCaller
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.stream.held import HeldAnswer

MESSAGES: Endpoint[ChatRequest] = Endpoint(MESSAGES_PATH, "msg_", chat_prompts, MessageFormat)


def anthropic_routes(server: ServerContext) -> APIRouter:
    """Builds the routes of the Messages API."""
    routes = APIRouter(tags=["anthropic"])

    @routes.post(MESSAGES_PATH, response_model=None, responses=STREAMED)
    async def messages(body: MessagesRequest, caller: CurrentCaller) -> Response:
        """Answers a conversation in the form of Anthropic's Messages API."""
        chat = chat_request(body)
        if chat.stream and server.lacks_model(chat.model):
            return HeldAnswer(
                lambda: accept(server, MESSAGES, chat, caller), server.keep_alive_s, server.metrics.objectives, ANTHROPIC_ERRORS
            )
        return await accept(server, MESSAGES, chat, caller)

    @routes.post(COUNT_TOKENS_PATH)
    async def count_tokens(body: CountTokensRequest, caller: CurrentCaller) -> dict[str, int]:
        """Number of prompt tokens that the same message request would have."""
        model = await server.model()
        model.name_for(body.model, caller)
        [prompt] = await chat_prompts(chat_request(body), model)
        return {"input_tokens": len(prompt.tokens)}

    return routes
