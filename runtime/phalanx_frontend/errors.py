"""Errors in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`, and in Anthropic's for the Messages API."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from phalanx_frontend.backend import BackendError

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1000, 200
"""Bounds of a response and of a log line."""
_NOT_IN_CHALLENGE = re.compile(r"[^ !#-\[\]-~]")
PARAM_OF_CODE = {"unsupported_speculation": "speculative.method"}
"""Request fields by the backend's error code."""


class ApiError(Exception):
    """An error response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.can_resume = False
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.challenge = "Bearer"  # the header WWW-Authenticate of a 401


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Returns a 400 that names the invalid field."""
    return ApiError(400, message, param, code)


def internal_error() -> ApiError:
    """Returns a 500 without details."""
    return ApiError(500, "internal error; look for this request's id in the server's log", code="internal_error")


def api_error_of_backend(error: BackendError) -> ApiError:
    """Converts a backend's error."""
    converted = ApiError(error.status, error.message, PARAM_OF_CODE.get(error.code), error.code, error.retry_after_s)
    converted.can_resume = error.can_resume
    return converted


def with_resume_hint(error: ApiError, event_id: str) -> ApiError:
    """Adds how to resume the stream after `event_id`, if possible."""
    if not error.can_resume:
        return error
    message = f"{error.message}; to resume, repeat the request with the header Last-Event-ID: {event_id}"
    return ApiError(error.status, message, None, error.code)


def with_challenge(error: ApiError) -> ApiError:
    """Adds why a key or token that was sent is invalid to WWW-Authenticate (RFC 6750, section 3)."""
    why = _NOT_IN_CHALLENGE.sub("'", error.message[:MAX_PARAM_CHARS])
    error.challenge = f'Bearer error="invalid_token", error_description="{why}"'
    return error


def error_type(status: int) -> str:
    """Returns OpenAI's `type` for an HTTP status."""
    match status:
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _:
            return "server_error" if status >= 500 else "invalid_request_error"


def error_body(error: ApiError) -> bytes:
    """Returns the response body."""
    return json.dumps({"error": error_detail(error)}).encode("ascii")


def error_detail(error: ApiError) -> dict[str, str | None]:
    """Returns the value of `error`, bounded and encodable."""
    message, param = _cut(error.message, MAX_MESSAGE_CHARS), error.param and _cut(error.param, MAX_PARAM_CHARS)
    return {"message": message, "type": error_type(error.status), "param": param, "code": error.code}


def _cut(text: str, longest: int) -> str:
    whole = text.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= longest else whole[: longest - 3] + "..."


def error_headers(error: ApiError) -> dict[str, str]:
    """Returns Retry-After in whole seconds, and retry-after-ms of OpenAI's clients; of a 401 WWW-Authenticate (RFC 6750)."""
    if error.status == 401:
        return {"www-authenticate": error.challenge}
    if error.retry_after_s is None:
        return {}
    seconds = max(0.0, error.retry_after_s)
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(math.ceil(seconds * 1000))}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """Encoding of errors: the body of a response, and an event after the first event of a stream."""

    body: Callable[[ApiError], bytes]
    prefix: bytes = b""
    """Lines of the event before its data."""

    def event(self, body: bytes) -> bytes:
        """Returns the event of a body."""
        return self.prefix + b"data: " + body + b"\n\n"


def anthropic_error_body(error: ApiError) -> bytes:
    """Returns the response body of the Messages API."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return json.dumps({"type": "error", "error": {**error_detail(error), "type": kind}}).encode("ascii")


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's `type` by HTTP status; other statuses: `invalid_request_error` below 500, else `api_error`."""
SCORE_PATH, RERANK_PATH, CLASSIFY_PATH = "/v1/score", "/v1/rerank", "/v1/classify"
OTHER_PATHS = {"/score": SCORE_PATH, "/rerank": RERANK_PATH, "/v2/rerank": RERANK_PATH, "/classify": CLASSIFY_PATH}
"""Other names of these paths, in vLLM and in Cohere's client."""
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
MODELS_PATH = "/v1/models"
VERSION_HEADER = b"anthropic-version"
"""Header of each request of Anthropic's clients."""
OPENAI_ERRORS = ErrorForm(error_body)
ANTHROPIC_ERRORS = ErrorForm(anthropic_error_body, b"event: error\n")


def is_anthropic(scope: Scope) -> bool:
    """Returns whether the response has the form of Anthropic's API: by path, and for models by the header of its clients."""
    path: str = scope["path"]
    if path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/"):
        return any(name == VERSION_HEADER for name, _ in scope["headers"])
    return path in (MESSAGES_PATH, COUNT_TOKENS_PATH)


def error_response(error: ApiError, scope: Scope | None = None) -> Response:
    """Returns the HTTP response to a request, in the form of its API. `scope`: none for paths of OpenAI's API alone."""
    form = ANTHROPIC_ERRORS if scope is not None and is_anthropic(scope) else OPENAI_ERRORS
    return Response(form.body(error), error.status, error_headers(error), "application/json")


def api_error_of_validation(errors: Sequence[Any], prefix: tuple[str, ...] = ("body",)) -> ApiError:
    """Converts the first of pydantic's errors. `prefix`: leading location steps that are not part of the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"the request body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    field = field_path(first["loc"][len(prefix) :])
    message = first["msg"].removeprefix("Value error, ")
    if not field:
        return invalid(None, "the request body must be a JSON object, with content-type application/json")
    if first["type"] == "missing":
        message = "is required"
    return invalid(field, f"{field}: {message}")


def field_path(location: tuple[str | int, ...]) -> str:
    """Returns `messages[0].content` for ("messages", 0, "content")."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")
