"""Answers as /openapi.json describes them, beside those that the routes' own types do."""

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error, as OpenAI's clients know it."""

    error: ErrorDetail


_RETRY_AFTER: dict[str, Any] = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "Of 429 and 503, where a time is known: seconds to wait."}
}
Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {
        "model": ErrorBody,
        "description": "It cannot be served as it is, or not now (429).",
        "headers": _RETRY_AFTER,
    },
    "5XX": {"model": ErrorBody, "description": "The server cannot serve it, or not now (503).", "headers": _RETRY_AFTER},
}
"""Of every route."""
STREAMED: Responses = {200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "Whole, or streamed."}}
"""Of routes that take `stream`."""
EXPOSITION: Responses = {200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}, "description": "Metrics."}}
"""Of /metrics."""
