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


Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is, or not now (429, with Retry-After)."},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve it; 503 has Retry-After."},
}
"""Of every route."""
STREAMED: Responses = {200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "Whole, or streamed."}}
"""Of routes that take `stream`."""
EXPOSITION: Responses = {200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}, "description": "Metrics."}}
"""Of /metrics."""
