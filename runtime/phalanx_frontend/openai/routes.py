"""The OpenAI routes, /tokenize and /detokenize."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller, current_caller
from phalanx_frontend.errors import CLASSIFY_PATH, RERANK_PATH, SCORE_PATH
from phalanx_frontend.fields import CLASSIFIED, EMBEDDED, RANKED, SCORED, STREAMED
from phalanx_frontend.openai.accept import CHAT, COMPLETIONS, accept
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.embedding.classes import accept_classify
from phalanx_frontend.openai.embedding.embeddings import EMBEDDINGS, accept_embeddings
from phalanx_frontend.openai.embedding.scores import accept_rerank, accept_scores
from phalanx_frontend.openai.prompt import tokenize_prompt
from phalanx_frontend.openai.schemas import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from phalanx_frontend.openai.served_model import taken_images
from phalanx_frontend.stream.held import HeldAnswer

CurrentCaller = Annotated[Caller, Depends(current_caller)]


def openai_routes(server: ServerContext) -> APIRouter:
    """Builds the OpenAI routes, /tokenize and /detokenize."""
    routes = APIRouter(tags=["openai"])

    @routes.post(COMPLETIONS.route, response_model=None, responses=STREAMED)
    async def completions(body: CompletionRequest, caller: CurrentCaller) -> Response:
        """Completes a prompt."""
        if body.stream and server.lacks_model(body.model):
            return HeldAnswer(lambda: accept(server, COMPLETIONS, body, caller), server.keep_alive_s, server.metrics.objectives)
        return await accept(server, COMPLETIONS, body, caller)

    @routes.post(CHAT.route, response_model=None, responses=STREAMED)
    async def chat_completions(body: ChatRequest, caller: CurrentCaller) -> Response:
        """Answers a conversation."""
        if body.stream and server.lacks_model(body.model):
            return HeldAnswer(lambda: accept(server, CHAT, body, caller), server.keep_alive_s, server.metrics.objectives)
        return await accept(server, CHAT, body, caller)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest, caller: CurrentCaller) -> dict[str, Any]:
        """Token ids of a prompt or of messages."""
        model = await server.model()
        model.name_for(body.model, caller)
        ids = await tokenize_prompt(body, model)
        tokens = [model.tokenizer.token(id) for id in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": model.assets.max_model_len, "tokens": ids, "token_strs": tokens}

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, caller: CurrentCaller) -> dict[str, str]:
        """Text of token ids, special tokens included."""
        model = await server.model()
        model.name_for(body.model, caller)
        return {"prompt": model.tokenizer.decode(model.checked_ids(body.tokens, "tokens"), skip_special_tokens=False)}

    routes.include_router(embedding_routes(server))
    return routes


def embedding_routes(server: ServerContext) -> APIRouter:
    """Builds the routes that embed."""
    routes = APIRouter()

    @routes.post(EMBEDDINGS.route, response_model=None, responses=EMBEDDED)
    async def embeddings(body: EmbeddingRequest, caller: CurrentCaller) -> Response:
        """Embeds inputs: one vector each, pooled from the model's hidden states."""
        return await accept_embeddings(server, EMBEDDINGS, body, caller)

    @routes.post("/score", response_model=None, responses=SCORED)
    @routes.post(SCORE_PATH, response_model=None, responses=SCORED)
    async def score(body: ScoreRequest, caller: CurrentCaller) -> Response:
        """Similarities of texts: the cosines of their embeddings, or the scores of a cross-encoder."""
        return await accept_scores(server, body, caller)

    @routes.post("/rerank", response_model=None, responses=RANKED)
    @routes.post("/v2/rerank", response_model=None, responses=RANKED)
    @routes.post(RERANK_PATH, response_model=None, responses=RANKED)
    async def rerank(body: RerankRequest, caller: CurrentCaller) -> Response:
        """Documents by their similarity to a query: the cosines of their embeddings, or the scores of a cross-encoder."""
        return await accept_rerank(server, body, caller)

    @routes.post("/classify", response_model=None, responses=CLASSIFIED)
    @routes.post(CLASSIFY_PATH, response_model=None, responses=CLASSIFIED)
    async def classify(body: ClassifyRequest, caller: CurrentCaller) -> Response:
        """Classes of texts, by the model's classification head."""
        return await accept_classify(server, body, caller)

    return routes


def model_card(server: ServerContext, assets: wire.Assets, name: str) -> dict[str, Any]:
    """Returns one entry of /v1/models; the parent of an adapter is the base model."""
    is_adapter = any(adapter.name == name for adapter in assets.adapters)
    taken = taken_images(assets)
    return {
        "id": name,
        "object": "model",
        "created": int(server.first_served_s(assets)),
        "owned_by": "phalanx",
        "root": assets.served_names[0] if is_adapter else name,
        "parent": assets.served_names[0] if is_adapter else None,
        "max_model_len": assets.max_model_len,
        "input_modalities": ["text"] if taken is None or taken.obstacle else ["text", "image"],
    }
