"""POST /v1/classify in vLLM's form: each input is a pooled request, whose vector is the logits of the classification head."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, assert_never

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import CLASSIFY_PATH, invalid
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.embedding.embeddings import (
    EmbeddingAnswer,
    EmbeddingEndpoint,
    EmbeddingJob,
    Vector,
    VectorForm,
    check_count,
    make_answer,
)
from phalanx_frontend.openai.embedding.inputs import tokenized_inputs
from phalanx_frontend.openai.sampling import refuse_unsupported
from phalanx_frontend.openai.schemas import ClassifyRequest


async def accept_classify(server: ServerContext, body: ClassifyRequest, caller: Caller) -> EmbeddingAnswer:
    """Returns the answer with a class for each input. Raises ApiError, BackendError."""
    arrived_s = server.seconds()
    model = await server.model(body.model, caller)
    model.name_for(body.model, caller)
    classes = model.classification()
    if classes is None:
        raise invalid("model", "this model cannot classify: it has no classification head", "no_classification")
    refuse_unsupported(body.model_extra or {})
    check_count(server, len(body.input), "input")
    inputs = partial(tokenized_inputs, body, body.input, model)
    activation = classes.activation if body.use_activation is not False else "identity"
    document = partial(class_list, labels=classes.labels, activation=activation, created=int(server.unix_s()))
    endpoint = EmbeddingEndpoint(CLASSIFY_PATH, "classify-", "input", document)
    form = VectorForm("last", len(classes.labels))
    return make_answer(server, endpoint, body, caller, model=model, inputs=inputs, form=form, arrived_s=arrived_s)


def class_list(
    job: EmbeddingJob, vectors: Sequence[Vector], *, labels: Sequence[str], activation: wire.Activation, created: int
) -> dict[str, Any]:
    """Returns vLLM's response. The label is that of the largest number, the first of equal ones."""
    data = []
    for index, logits in enumerate(vectors):
        best = max(range(len(logits)), key=lambda label: logits[label])
        probs = activated(logits, activation)
        data.append({"index": index, "label": labels[best], "probs": probs, "num_classes": len(labels)})
    return {"id": job.id, "object": "list", "created": created, "data": data, "usage": job.usage()}


def activated(logits: Vector, activation: wire.Activation) -> list[float]:
    """Returns the numbers of classes: probabilities, or the logits."""
    match activation:
        case "identity":
            return logits.tolist()
        case "sigmoid":
            return [_sigmoid(logit) for logit in logits]
        case "softmax":
            largest = max(logits)
            weights = [math.exp(logit - largest) for logit in logits]
            total = math.fsum(weights)
            return [weight / total for weight in weights]
        case _:
            assert_never(activation)


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    weight = math.exp(logit)
    return weight / (1 + weight)
