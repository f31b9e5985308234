"""Attributes of a request's span. Source: OpenTelemetry semantic conventions for generative AI."""

from collections.abc import Sequence

from phalanx_api import wire
from phalanx_frontend.tracing.span import Value
from phalanx_frontend.tracing.tracer import RequestTrace

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}


def describe_request(trace: RequestTrace | None, route: str, model: str, requests: Sequence[wire.Request]) -> None:
    """Records what a client requests. No text of it."""
    if trace is None:
        return
    operation, sampling = OPERATIONS[route], requests[0].sampling
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "phalanx",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": len(requests),
    }
    if requests[0].pooling is None:
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
    trace.name = f"{operation} {model}"
    trace.attributes |= attributes


def describe_response(
    trace: RequestTrace | None, id: str, input_tokens: int, output_tokens: int, finish_reasons: Sequence[str]
) -> None:
    """Records the response, or the part of it that was computed."""
    if trace is None:
        return
    trace.attributes |= {
        "gen_ai.response.id": id,
        "gen_ai.usage.input_tokens": input_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.response.finish_reasons": list(finish_reasons),
    }


def describe_error(trace: RequestTrace | None, status: int, code: str, can_resume: bool = False) -> None:
    """Records a failure. Traces of errors of the server are exported. `can_resume`: at another router, which ends the trace."""
    if trace is None:
        return
    if can_resume:
        trace.hand_over()
    trace.attributes["error.type"] = code
    if status >= 500:
        trace.fail(code)
