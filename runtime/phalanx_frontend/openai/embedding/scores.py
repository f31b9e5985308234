"""POST /v1/score and /v1/rerank: the cosine of the embeddings of texts, in the forms of vLLM, Jina and Cohere."""

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import RERANK_PATH, SCORE_PATH, invalid
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.embedding.embeddings import (
    EmbeddingAnswer,
    EmbeddingEndpoint,
    EmbeddingJob,
    Vector,
    accept_embeddings,
)
from phalanx_frontend.openai.sampling import refuse_unsupported
from phalanx_frontend.openai.schemas import EmbeddingRequest, PooledRequest, RerankRequest, ScoreRequest


async def accept_scores(server: ServerContext, body: ScoreRequest, caller: Caller) -> EmbeddingAnswer:
    """Returns the answer with one score for each pair. Raises ApiError, BackendError."""
    _check_texts("text_1", body.text_1)
    _check_texts("text_2", body.text_2)
    if len(body.text_1) not in (1, len(body.text_2)):
        raise invalid("text_1", f"text_1 must have one text, or as many as text_2: {len(body.text_2)}")
    endpoint = EmbeddingEndpoint(SCORE_PATH, "score-", "text_2", partial(score_list, num_queries=len(body.text_1)))
    return await accept_embeddings(server, endpoint, _embedding_request(body, [*body.text_1, *body.text_2]), caller)


async def accept_rerank(server: ServerContext, body: RerankRequest, caller: Caller) -> EmbeddingAnswer:
    """Returns the answer with the documents, the most similar first. Raises ApiError, BackendError."""
    _check_texts("query", [body.query])
    _check_texts("documents", body.documents)
    endpoint = EmbeddingEndpoint(RERANK_PATH, "rerank-", "documents", partial(ranking, body=body))
    return await accept_embeddings(server, endpoint, _embedding_request(body, [body.query, *body.documents]), caller)


def score_list(job: EmbeddingJob, vectors: Sequence[Vector], *, num_queries: int) -> dict[str, Any]:
    """Returns vLLM's response. The first vectors are those of the queries."""
    queries, texts = vectors[:num_queries], vectors[num_queries:]
    scores = [cosine(queries[index if num_queries > 1 else 0], text) for index, text in enumerate(texts)]
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {"id": job.id, "object": "list", "data": data, "usage": job.usage()}


def ranking(job: EmbeddingJob, vectors: Sequence[Vector], *, body: RerankRequest) -> dict[str, Any]:
    """Returns the response of Jina and Cohere. The first vector is that of the query."""
    scores = [cosine(vectors[0], vector) for vector in vectors[1:]]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        {"index": index, **({"document": {"text": body.documents[index]}} if shown else {}), "relevance_score": scores[index]}
        for index in order
    ]
    return {"id": job.id, "results": results, "usage": job.usage()}


def cosine(one: Vector, other: Vector) -> float:
    """Returns the cosine of two vectors of finite numbers; 0 if one has no direction."""
    lengths = math.sqrt(_product(one, one)) * math.sqrt(_product(other, other))
    return max(-1.0, min(1.0, _product(one, other) / lengths)) if lengths else 0.0


def _product(one: Vector, other: Vector) -> float:
    return sum(map(operator.mul, one, other), 0.0)


def _check_texts(field: str, texts: Sequence[str]) -> None:
    if "" in texts:
        raise invalid(field, f"{field} must not have an empty text")


def _embedding_request(body: PooledRequest, texts: Sequence[str]) -> EmbeddingRequest:
    refuse_unsupported(body.model_extra or {})
    return EmbeddingRequest(input=list(texts), **{name: getattr(body, name) for name in PooledRequest.model_fields})
