"""Attributes of a request's span. Source: OpenTelemetry semantic conventions for generative AI."""

from collections.abc import Sequence
from functools import partial

from phalanx_api import wire
from phalanx_frontend.tracing.span import Value
from phalanx_frontend.tracing.tracer import RequestTrace

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/score": "embeddings",
    "/v1/rerank": "embeddings",
    "/v1/classify": "embeddings",
}
_CHOICES, _REASONS = "gen_ai.request.choice.count", "gen_ai.response.finish_reasons"


def describe_request(trace: RequestTrace | None, route: str, model: str, requests: Sequence[wire.Request]) -> None:
    """Records what a client requests, without text. A batch calls it for each entry; parameters that differ are left out."""
    if trace is None:
        return
    operation, first = OPERATIONS[route], requests[0]
    trace.name = f"{operation} {model}"
    sampling = first.sampling if first.pooling is None else None
    trace.describe(partial(_add_request, operation, model, sampling, len(requests)))


def _add_request(operation: str, model: str, sampling: wire.Sampling | None, choices: int, trace: RequestTrace) -> None:
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "phalanx",
        "gen_ai.request.model": model,
    }
    if sampling is not None:
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
    is_first = _CHOICES not in trace.attributes
    for name, value in attributes.items():
        if is_first:
            trace.attributes[name] = value
        elif trace.attributes.get(name) != value:
            trace.attributes.pop(name, None)
    _add(trace, _CHOICES, choices)


def _add(trace: RequestTrace, name: str, number: int) -> None:
    former = trace.attributes.get(name, 0)
    trace.attributes[name] = number + (former if isinstance(former, int) else 0)


def describe_response(
    trace: RequestTrace | None, id: str, input_tokens: int, output_tokens: int, finish_reasons: Sequence[str]
) -> None:
    """Records the response, or the part of it that was computed. The entries of a batch are summed, and have no id."""
    if trace is not None:
        trace.describe(partial(_add_response, id, input_tokens, output_tokens, finish_reasons))


def _add_response(id: str, input_tokens: int, output_tokens: int, finish_reasons: Sequence[str], trace: RequestTrace) -> None:
    former = trace.attributes.get(_REASONS)
    trace.attributes[_REASONS] = [*(former if isinstance(former, list) else ()), *finish_reasons]
    if former is None:
        trace.attributes["gen_ai.response.id"] = id
    else:
        trace.attributes.pop("gen_ai.response.id", None)
    _add(trace, "gen_ai.usage.input_tokens", input_tokens)
    _add(trace, "gen_ai.usage.output_tokens", output_tokens)


def describe_error(trace: RequestTrace | None, status: int, code: str, can_resume: bool = False) -> None:
    """Records a failure. Traces of errors of the server are exported. `can_resume`: at another router, which ends the trace."""
    if trace is None:
        return
    if can_resume:
        trace.hand_over()
    trace.attributes["error.type"] = code
    if status >= 500:
        trace.fail(code)
