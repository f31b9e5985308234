"""POST /v1/score and /v1/rerank in the forms of vLLM, Jina and Cohere.

cross-encoder       a classification head with one label: its activated logit of the query and the text together
Qwen3-Reranker      see `judged`
other models        the cosine of the embeddings of both texts
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import RERANK_PATH, SCORE_PATH, invalid
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.embedding.classes import activated
from phalanx_frontend.openai.embedding.embeddings import (
    EmbeddingAnswer,
    EmbeddingEndpoint,
    EmbeddingJob,
    Vector,
    VectorForm,
    accept_embeddings,
    check_count,
    make_answer,
)
from phalanx_frontend.openai.embedding.inputs import tokenized_pairs
from phalanx_frontend.openai.embedding.judged import judged_inputs, judged_scores
from phalanx_frontend.openai.sampling import refuse_unsupported
from phalanx_frontend.openai.schemas import EmbeddingRequest, PooledRequest, RerankRequest, ScoreRequest

Form = Callable[[EmbeddingJob, Sequence[float]], dict[str, Any]]
"""Returns the response with these scores."""


async def accept_scores(server: ServerContext, body: ScoreRequest, caller: Caller) -> EmbeddingAnswer:
    """Returns the answer with one score for each pair. Raises ApiError, BackendError."""
    _check_texts("text_1", body.text_1)
    _check_texts("text_2", body.text_2)
    if len(body.text_1) not in (1, len(body.text_2)):
        raise invalid("text_1", f"text_1 must have one text, or as many as text_2: {len(body.text_2)}")
    endpoint = partial(EmbeddingEndpoint, SCORE_PATH, "score-", "text_2")
    return await _accept(server, endpoint, body, caller, queries=body.text_1, texts=body.text_2, form=score_list)


async def accept_rerank(server: ServerContext, body: RerankRequest, caller: Caller) -> EmbeddingAnswer:
    """Returns the answer with the documents, the most similar first. Raises ApiError, BackendError."""
    _check_texts("query", [body.query])
    _check_texts("documents", body.documents)
    endpoint = partial(EmbeddingEndpoint, RERANK_PATH, "rerank-", "documents")
    form = partial(ranking, body=body)
    return await _accept(server, endpoint, body, caller, queries=[body.query], texts=body.documents, form=form)


async def _accept(
    server: ServerContext,
    endpoint: Callable[[Callable[[EmbeddingJob, Sequence[Vector]], dict[str, Any]]], EmbeddingEndpoint],
    body: PooledRequest,
    caller: Caller,
    *,
    queries: Sequence[str],
    texts: Sequence[str],
    form: Form,
) -> EmbeddingAnswer:
    """`queries`: one, or as many as `texts`."""
    arrived_s = server.seconds()
    model = await server.model(body.model, caller)
    model.name_for(body.model, caller)
    classes, is_raw = model.classification(), body.use_activation is False
    read: Callable[[Sequence[Vector]], list[float]]
    if model.reranker == "qwen3":
        tokenize = judged_inputs
        judged = partial(judged_scores, is_raw=is_raw)
        read, requests_per_input = (judged, 2) if classes is None else (_score_of(classes, is_raw), 1)
    elif classes is None:
        cosines = endpoint(lambda job, vectors: form(job, cosine_scores(vectors, len(queries))))
        return await accept_embeddings(server, cosines, _embedding_request(body, [*queries, *texts]), caller)
    else:
        tokenize, read, requests_per_input = tokenized_pairs, _score_of(classes, is_raw), 1
    refuse_unsupported(body.model_extra or {})
    if body.truncation_side == "left":
        raise invalid("truncation_side", "truncation_side must be right: this model reads pairs, which are cut at their ends")
    scored = endpoint(lambda job, vectors: form(job, read(vectors)))
    check_count(server, len(texts), scored.field)
    if len(queries) == 1:
        _check_shared(server, len(queries[0]), len(texts), scored.field)
    pairs = [(queries[index if len(queries) > 1 else 0], text) for index, text in enumerate(texts)]
    return make_answer(
        server,
        scored,
        body,
        caller,
        model=model,
        inputs=partial(tokenize, body, pairs, model, scored.field),
        form=VectorForm("last", 1),
        arrived_s=arrived_s,
        requests_per_input=requests_per_input,
    )


def _score_of(classes: wire.Classification, is_raw: bool) -> Callable[[Sequence[Vector]], list[float]]:
    """Returns the scores of a cross-encoder's logits, or the logits. Raises ApiError 400 for other classifiers."""
    if len(classes.labels) != 1:
        why = f"this model gives no scores: it has {len(classes.labels)} labels, a cross-encoder has one; use /v1/classify"
        raise invalid("model", why, "no_scores")
    activation: wire.Activation = "identity" if is_raw else classes.score_activation
    return lambda vectors: [activated(vector, activation)[0] for vector in vectors]


def score_list(job: EmbeddingJob, scores: Sequence[float]) -> dict[str, Any]:
    """Returns vLLM's response."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {"id": job.id, "object": "list", "data": data, "usage": job.usage()}


def ranking(job: EmbeddingJob, scores: Sequence[float], *, body: RerankRequest) -> dict[str, Any]:
    """Returns the response of Jina and Cohere."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        {"index": index, **({"document": {"text": body.documents[index]}} if shown else {}), "relevance_score": scores[index]}
        for index in order
    ]
    return {"id": job.id, "results": results, "usage": job.usage()}


def cosine_scores(vectors: Sequence[Vector], num_queries: int) -> list[float]:
    """Returns the cosine of each text and its query. The first vectors are those of the queries."""
    queries, texts = vectors[:num_queries], vectors[num_queries:]
    return [cosine(queries[index if num_queries > 1 else 0], text) for index, text in enumerate(texts)]


def cosine(one: Vector, other: Vector) -> float:
    """Returns the cosine of two vectors of finite numbers; 0 if one has no direction."""
    lengths = math.sqrt(_product(one, one)) * math.sqrt(_product(other, other))
    return max(-1.0, min(1.0, _product(one, other) / lengths)) if lengths else 0.0


def _product(one: Vector, other: Vector) -> float:
    return sum(map(operator.mul, one, other), 0.0)


def _check_shared(server: ServerContext, query_length: int, num_texts: int, field: str) -> None:
    """Raises ApiError 400 for a query that, copied for each text, has more characters than a body may have."""
    longest = server.limits.max_body_bytes
    if query_length * num_texts > longest:
        raise invalid(
            field, f"a query of {query_length} characters may have at most {longest // query_length} texts in one request"
        )


def _check_texts(field: str, texts: Sequence[str]) -> None:
    if "" in texts:
        raise invalid(field, f"{field} must not have an empty text")


def _embedding_request(body: PooledRequest, texts: Sequence[str]) -> EmbeddingRequest:
    refuse_unsupported(body.model_extra or {})
    return EmbeddingRequest(input=list(texts), **{name: getattr(body, name) for name in PooledRequest.model_fields})
