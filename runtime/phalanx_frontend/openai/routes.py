"""The OpenAI routes, and those that turn text into tokens and back."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller, caller_of
from phalanx_frontend.fields import STREAMED
from phalanx_frontend.openai.accept import CHAT, COMPLETIONS, accept
from phalanx_frontend.openai.context import Door
from phalanx_frontend.openai.prompt import tokenize_prompt
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from phalanx_frontend.stream.held import HeldAnswer

Asker = Annotated[Caller, Depends(caller_of)]


def openai_routes(door: Door) -> APIRouter:
    """/v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize."""
    routes = APIRouter(tags=["openai"])

    @routes.post(COMPLETIONS.route, response_model=None, responses=STREAMED)
    async def completions(body: CompletionRequest, caller: Asker) -> Response:
        """Completes a prompt."""
        if body.stream and door.is_asleep():
            return HeldAnswer(lambda: accept(door, COMPLETIONS, body, caller), door.keep_alive_s)
        return await accept(door, COMPLETIONS, body, caller)

    @routes.post(CHAT.route, response_model=None, responses=STREAMED)
    async def chat_completions(body: ChatRequest, caller: Asker) -> Response:
        """Answers a conversation."""
        if body.stream and door.is_asleep():
            return HeldAnswer(lambda: accept(door, CHAT, body, caller), door.keep_alive_s)
        return await accept(door, CHAT, body, caller)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The names that requests may use."""
        assets = door.assets()
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


def model_card(door: Door, assets: wire.Assets, name: str) -> dict[str, Any]:
    """One entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": int(door.known_s(assets)),
        "owned_by": "phalanx",
        "root": assets.served_names[0],
        "parent": None,
        "max_model_len": assets.max_model_len,
    }
